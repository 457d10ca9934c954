"""Oracle: torch_dist checkpoints written by torch itself, in Megatron's names, layouts and shards,
give the logits of a plain-torch forward of Megatron's GPT. Megatron and the classes that its
pickles name do not exist here when the checkpoint is read."""

import argparse
import enum
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from flax import nnx
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.nn import functional as F

from mjax import convert
from mjax.checkpoint.base.source import flat
from mjax.config import load
from mjax.config.schema.run import MeshConfig
from mjax.errors import UserError
from mjax.interop.megatron.parameters import megatron_source
from mjax.interop.pretrained import from_pretrained
from mjax.models import build, split
from mjax.sharding.mesh import make_mesh

VOCAB, PADDED, BATCH, SEQ = 251, 320, 2, 16
BASE = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "max_position_embeddings": 32,
    "vocab_size": VOCAB,
    "padded_vocab_size": PADDED,
    "make_vocab_size_divisible_by": 64,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "bias_gelu_fusion": True,
    "num_experts": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
}
VARIANTS = {
    "llama": {
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "rotary_base": 500,
        "use_rope_scaling": True,
        "rope_scaling_factor": 8.0,
    },
    "gpt2": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "group_query_attention": False,
        "num_query_groups": 1,  # Megatron's default, without meaning here
        "kv_channels": 4,
    },
    "windowed": {
        "rotary_percent": 0.5,
        "swiglu": False,
        "squared_relu": True,
        "add_qkv_bias": True,
        "window_size": (2, 0),
        "window_attn_skip_freq": 3,
        "softmax_type": "learnable",
        "softmax_scale": 0.3,
        "vocab_size": None,
    },
    "moe": {
        "num_experts": 4,
        "moe_layer_freq": [0, 1, 1],
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 20,
        "moe_router_pre_softmax": True,
    },
}
STYLES = ("stacked", "numbered", "singletons")  # of layers; experts and gate/up apart in the last


def arguments(name: str, **more) -> dict:
    return {**BASE, **VARIANTS[name], **more}


# ---- the model: weights by Megatron's names in a layer, and its forward -------------------------


def weights(a: dict) -> tuple[dict, list[dict]]:
    """(weights of the whole, weights of each layer); experts are stacked."""
    torch.manual_seed(0)
    d, h, f = a["hidden_size"], a["kv_channels"], a["ffn_hidden_size"]
    n = a["num_attention_heads"]
    k = a["num_query_groups"] if a["group_query_attention"] else n
    layer_norm = a["normalization"] == "LayerNorm"
    two = 2 if a["swiglu"] else 1

    def norm(name, size, sep="."):
        at = 0.0 if a.get("apply_layernorm_1p") else 1.0
        made = {f"{name}{sep}weight": at + 0.3 * torch.randn(size)}
        return made | ({f"{name}{sep}bias": 0.3 * torch.randn(size)} if layer_norm else {})

    def linear(name, rows, columns, bias):
        made = {f"{name}.weight": torch.randn(rows, columns) * columns**-0.5}
        return made | ({f"{name}.bias": 0.3 * torch.randn(rows)} if bias else {})

    def layer(i):
        bias, attention = a["add_bias_linear"], "self_attention."
        w = norm(attention + "linear_qkv.layer_norm", d, "_")
        w |= linear(attention + "linear_qkv", (n + 2 * k) * h, d, bias or a.get("add_qkv_bias"))
        if a.get("qk_layernorm"):
            w |= norm(attention + "q_layernorm", h) | norm(attention + "k_layernorm", h)
        if a.get("softmax_type") == "learnable":
            w[attention + "core_attention.softmax_offset"] = torch.randn(n)
        w |= linear(attention + "linear_proj", d, n * h, bias)
        if not (a["num_experts"] and a["moe_layer_freq"][i]):
            w |= norm("mlp.linear_fc1.layer_norm", d, "_")
            return (
                w
                | linear("mlp.linear_fc1", two * f, d, bias)
                | linear("mlp.linear_fc2", d, f, bias)
            )
        e, m = a["num_experts"], a["moe_ffn_hidden_size"]
        w |= norm("pre_mlp_layernorm", d) | linear("mlp.router", e, d, False)
        w["mlp.experts.experts.linear_fc1.weight"] = torch.randn(e, two * m, d) * d**-0.5
        w["mlp.experts.experts.linear_fc2.weight"] = torch.randn(e, d, m) * m**-0.5
        return w

    whole = {"embedding.word_embeddings.weight": 0.5 * torch.randn(PADDED, d)}
    if a["position_embedding_type"] == "learned_absolute":
        table = 0.5 * torch.randn(a["max_position_embeddings"], d)
        whole["embedding.position_embeddings.weight"] = table
    if a["untie_embeddings_and_output_weights"]:
        whole["output_layer.weight"] = 0.5 * torch.randn(PADDED, d)
    return whole | norm("decoder.final_layernorm", d), [layer(i) for i in range(a["num_layers"])]


def forward(a: dict, whole: dict, layers: list[dict], tokens: torch.Tensor) -> torch.Tensor:
    """Megatron's GPT in fp32; logits of all padded rows."""
    x = whole["embedding.word_embeddings.weight"][tokens]
    if a["position_embedding_type"] == "learned_absolute":
        x = x + whole["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for i, w in enumerate(layers):
        x = x + attention(a, w, norm(a, w, "self_attention.linear_qkv.layer_norm_", x), i)
        moe = "mlp.router.weight" in w
        y = norm(a, w, "pre_mlp_layernorm." if moe else "mlp.linear_fc1.layer_norm_", x)
        x = x + (experts(a, w, y) if moe else mlp(a, w, y))
    x = norm(a, whole, "decoder.final_layernorm.", x)
    head = "embedding.word_embeddings" if "output_layer.weight" not in whole else "output_layer"
    return x @ whole[f"{head}.weight"].T


def norm(a, w, name, x):
    gain = w[name + "weight"] + (1 if a.get("apply_layernorm_1p") else 0)
    if a["normalization"] == "LayerNorm":
        return F.layer_norm(x, gain.shape, gain, w[name + "bias"], a["norm_epsilon"])
    return F.rms_norm(x, gain.shape, gain, a["norm_epsilon"])


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attention(a, w, x, i):
    h, n = a["kv_channels"], a["num_attention_heads"]
    k = a["num_query_groups"] if a["group_query_attention"] else n
    mixed = linear(w, "self_attention.linear_qkv", x).view(*x.shape[:2], k, n // k + 2, h)
    q, key, v = mixed.split([n // k, 1, 1], dim=3)
    q = q.reshape(*x.shape[:2], n, h)
    key, v = (t.expand(-1, -1, -1, n // k, -1).reshape(q.shape) for t in (key, v))
    if a.get("qk_layernorm"):
        q = norm(a, w, "self_attention.q_layernorm.", q)
        key = norm(a, w, "self_attention.k_layernorm.", key)
    if a["position_embedding_type"] == "rope":
        q, key = rope(a, q), rope(a, key)
    scores = torch.einsum("bsnh,btnh->bnst", q, key) * (a.get("softmax_scale") or h**-0.5)
    rows, columns = torch.arange(SEQ)[:, None], torch.arange(SEQ)
    seen = columns <= rows
    if a.get("window_size") and (i + 1) % a["window_attn_skip_freq"]:
        seen &= columns >= rows - a["window_size"][0]
    scores = scores.masked_fill(~seen, -torch.inf)
    if a.get("softmax_type") == "learnable":
        sink = w["self_attention.core_attention.softmax_offset"].view(1, n, 1, 1)
        scores = torch.cat([scores, sink.expand(len(x), n, SEQ, 1)], -1)
    probs = scores.softmax(-1)[..., :SEQ]
    o = torch.einsum("bnst,btnh->bsnh", probs, v).reshape(*x.shape[:2], n * h)
    return linear(w, "self_attention.linear_proj", o)


def rope(a, x):
    dim = int(a["kv_channels"] * a.get("rotary_percent", 1.0))
    freq = a.get("rotary_base", 10000) ** -(torch.arange(0, dim, 2) / dim)
    if a.get("use_rope_scaling"):  # Llama 3's constants
        factor, low, high, old = a["rope_scaling_factor"], 1, 4, 8192
        length = 2 * torch.pi / freq
        smooth = (old / length - low) / (high - low)
        between = (1 - smooth) * freq / factor + smooth * freq
        slow = torch.where(length > old / low, freq / factor, between)
        freq = torch.where(length < old / high, freq, slow)
    angle = torch.outer(torch.arange(x.shape[1]), freq)
    angle = torch.cat([angle, angle], -1)[:, None]
    t, rest = x[..., :dim], x[..., dim:]
    turned = torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1)
    return torch.cat([t * angle.cos() + turned * angle.sin(), rest], -1)


def act(a, y):
    if a["swiglu"]:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return F.relu(y) ** 2 if a.get("squared_relu") else F.gelu(y, approximate="tanh")


def mlp(a, w, x):
    return linear(w, "mlp.linear_fc2", act(a, linear(w, "mlp.linear_fc1", x)))


def experts(a, w, x):
    probs, chosen = linear(w, "mlp.router", x).softmax(-1).topk(a["moe_router_topk"])
    up, down = (w[f"mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2))
    hidden = act(a, torch.einsum("efd,bsd->bsef", up, x))
    every = torch.einsum("edf,bsef->bsed", down, hidden)
    own = every.gather(2, chosen[..., None].expand(-1, -1, -1, x.shape[-1]))
    return (probs[..., None] * own).sum(2)


# ---- writing, with torch's own writer -----------------------------------------------------------


class Sharded(torch.Tensor):
    """A tensor that torch.distributed.checkpoint saves as a grid of shards, as Megatron's does."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, grid: tuple[int, ...]):
        made = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        made.whole, made.chunk = whole, [n // g for n, g in zip(whole.shape, grid, strict=True)]
        return made

    def __create_write_items__(self, fqn, _):
        items = []
        for at in np.ndindex(*(n // c for n, c in zip(self.shape, self.chunk, strict=True))):
            offset = torch.Size(i * c for i, c in zip(at, self.chunk, strict=True))
            data = TensorWriteData(
                ChunkStorageMetadata(offset, torch.Size(self.chunk)),
                TensorProperties.create_from_tensor(self.whole),
                self.whole.shape,
            )
            index = dcp.metadata.MetadataIndex(fqn, offset)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        return self.whole[
            tuple(slice(o, o + c) for o, c in zip(index.offset, self.chunk, strict=True))
        ].clone()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a shard holder")


def megatron_names(a: dict, whole: dict, layers: list[dict], style: str) -> dict:
    state = dict(whole)
    if style == "stacked":
        for name in layers[0]:
            state[f"decoder.layers.{name}"] = torch.stack([w[name] for w in layers])
        return state
    for i, w in enumerate(layers):
        for name, value in w.items():
            split_experts = style == "singletons" and ".experts." in name
            for e, one in enumerate(value if split_experts else [value]):
                own = name.replace(".experts.linear", f".experts.{e}.linear")
                own = f"decoder.layers.{i}.{own if split_experts else name}"
                halves = style == "singletons" and a["swiglu"] and "fc1.weight" in name
                gate_up = zip(("_w", "_v"), one.chunk(2), strict=True) if halves else [("", one)]
                state |= {own + end: half.contiguous() for end, half in gate_up}
    return state


def grid(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """One shard a stacked layer, and two for tp on the first other axis that it divides."""
    lead = (shape[0],) if name.startswith("decoder.layers.") and not name[15].isdigit() else ()
    rest = shape[len(lead) :]
    halved = next((i for i, n in enumerate(rest) if n % 2 == 0), None)
    return (*lead, *(2 if i == halved else 1 for i in range(len(rest))))


def save(folder, a: dict, state: dict, dtype=torch.float32) -> None:
    """An iteration folder as Megatron leaves it; the pickles name classes that then vanish."""
    folder.mkdir(parents=True)
    bundle = {k: Sharded(v.to(dtype), grid(tuple(v.shape), k)) for k, v in state.items()}
    bundle["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(3)
    for name in ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_1", "rng_state/shard_0.0_1.1"):
        bundle[name] = io.BytesIO(b"opaque")
    dcp.save(
        bundle,
        storage_writer=dcp.FileSystemWriter(folder, thread_count=2, single_file_per_rank=True),
        no_dist=True,
    )
    gone = types.ModuleType("megatron_that_is_gone")
    sys.modules[gone.__name__] = gone
    for made in (enum.Enum("AttnBackend", "auto flash"), type("MCoreMetadata", (), {})):
        made.__module__, made.__qualname__ = gone.__name__, made.__name__
        setattr(gone, made.__name__, made)
    values = {**a, "attention_backend": gone.AttnBackend.auto, "params_dtype": torch.bfloat16}
    common = {"args": argparse.Namespace(**values), "iteration": 7, "count": torch.arange(3)}
    torch.save(common, folder / "common.pt")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    theirs = gone.MCoreMetadata()
    theirs.__dict__.update(vars(metadata))
    (folder / ".metadata").write_bytes(pickle.dumps(theirs))
    del sys.modules[gone.__name__]
    version = {"sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **version}))


def specs_of(cfg) -> tuple:
    definition, _ = split(nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0))))
    return definition, nnx.traversals.flatten_mapping(definition.specs)


def read_all(source) -> dict:
    _, specs = specs_of(source.cfg)
    return {path: source.read(path, (slice(None),) * len(s.shape)) for path, s in specs.items()}


def run(folder, name, style, **more):
    """(checkpointed arguments, source, reference state)."""
    a = arguments(name, **more)
    whole, layers = weights(a)
    state = megatron_names(a, whole, layers, style)
    save(folder, a, state)
    return a, whole, layers, state


# ---- laws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,style",
    [("llama", "stacked"), ("llama", "singletons"), ("gpt2", "stacked"), ("gpt2", "numbered")]
    + [
        ("windowed", "stacked"),
        ("moe", "numbered"),
        ("moe", "singletons"),
    ],
)
def test_logits_equal_megatrons(tmp_path, name, style):
    a, whole, layers, _ = run(tmp_path / "iter_0000007", name, style)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    want = forward(a, whole, layers, tokens).numpy()
    source = megatron_source(tmp_path)
    source.check()
    definition, _ = specs_of(source.cfg)
    params = nnx.traversals.unflatten_mapping(
        {path: jnp.asarray(value) for path, value in read_all(source).items()}
    )
    with jax.default_matmul_precision("highest"):
        got = np.asarray(definition.bind(params)(jnp.asarray(tokens.numpy())))
    want = want[..., : got.shape[-1]]
    assert source.cfg.vocab_size == got.shape[-1] == (a["vocab_size"] or PADDED)
    assert np.abs(got - want).max() < 2e-4 * np.abs(want).max()


@pytest.mark.parametrize(
    "name,style", [("llama", "stacked"), ("gpt2", "numbered"), ("moe", "singletons")]
)
def test_any_part_of_a_leaf_is_that_part_of_the_whole(tmp_path, name, style):
    run(tmp_path / "c", name, style)
    source = megatron_source(tmp_path / "c")
    rng = np.random.default_rng(0)
    for path, whole in read_all(source).items():
        for _ in range(6):
            edges = [sorted(rng.integers(0, n + 1, 2)) for n in whole.shape]
            index = tuple(slice(int(lo), max(int(hi), int(lo) + 1)) for lo, hi in edges)
            index = tuple(
                s if s.start < n else slice(0, n) for s, n in zip(index, whole.shape, strict=True)
            )
            np.testing.assert_array_equal(
                source.read(path, index), whole[index], str((path, index))
            )


def test_rows_that_pad_the_vocabulary_are_zero_and_bfloat16_is_read_exactly(tmp_path):
    a = arguments("llama")
    whole, layers = weights(a)
    save(tmp_path / "c", a, megatron_names(a, whole, layers, "stacked"), torch.bfloat16)
    source = megatron_source(tmp_path / "c")
    got = source.read(("embedding",), (slice(None), slice(None)))
    assert got.shape == (source.cfg.padded_vocab_size, a["hidden_size"]) == (256, 24)
    want = whole["embedding.word_embeddings.weight"].bfloat16().float().numpy()[:VOCAB]
    np.testing.assert_array_equal(got[:VOCAB].astype(np.float32), want)
    assert got.dtype == jnp.bfloat16 and not got[VOCAB:].any()


def test_weights_in_8_bits_are_those_of_torchs_own_pickle(tmp_path, monkeypatch):
    """A class in the place of Transformer Engine's, which pickles as that does."""
    name = "transformer_engine.pytorch.tensor.float8_tensor"
    gone, kinds = types.ModuleType(name), types.ModuleType("transformer_engine_torch")

    class DType:
        def __reduce__(self):
            return DType, (7,)

    class Float8Tensor(torch.Tensor):
        @staticmethod
        def __new__(cls, x):
            made = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)
            made.scale = (x.abs().max() / 448).reshape(1)
            made.bits = (x / made.scale).to(torch.float8_e4m3fn).view(torch.uint8)
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} of a class that is stored alone")

        def detach(self):
            return self

        cpu = clone = contiguous = detach

        def storage(self):
            return types.SimpleNamespace(size=self.numel)

        def __reduce_ex__(self, protocol):
            args = self.bits, DType(), self.scale, self.dtype
            return Float8Tensor._make_in_reduce_ex, args

        @classmethod
        def _make_in_reduce_ex(cls, *args):
            raise AssertionError("run while it is read")

    for module, made in ((gone, Float8Tensor), (kinds, DType)):
        made.__module__, made.__qualname__ = module.__name__, made.__name__
        setattr(module, made.__name__, made)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for end in (1, 2, 3):
        parent = ".".join(name.split(".")[:end])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    plain, stored = Sharded.__get_tensor_shard__, []

    def shard(self, index):
        x = plain(self, index)
        if not index.fqn.endswith("linear_fc2.weight"):
            return x
        stored.append(Float8Tensor(x))
        return stored[-1]

    monkeypatch.setattr(Sharded, "__get_tensor_shard__", shard)
    a, _, layers, _ = run(tmp_path / "c", "llama", "stacked")
    monkeypatch.undo()
    got = read_all(megatron_source(tmp_path / "c"))["dense", "mlp", "down"]
    want = np.stack([w["mlp.linear_fc2.weight"].numpy().T for w in layers])
    assert len(stored) == 2 * a["num_layers"]
    assert got.dtype == np.float32 and 0 < np.abs(got - want).max() < 0.04 * np.abs(want).max()
    values = set()
    for x in stored:
        values |= set((x.bits.view(torch.float8_e4m3fn).float() * x.scale).flatten().tolist())
    assert set(got.astype(float).flatten().tolist()) == values


def test_only_the_files_that_hold_a_part_are_opened(tmp_path):
    run(tmp_path / "c", "llama", "stacked")
    source = megatron_source(tmp_path / "c")
    want = read_all(source)
    files = sorted((tmp_path / "c").glob("*.distcp"))
    assert len(files) == 2
    failures = 0
    for gone in files:
        gone.rename(gone.with_suffix(".away"))
        for path, value in want.items():
            for row in range(len(value)):
                index = (slice(row, row + 1), *(slice(None) for _ in value.shape[1:]))
                try:
                    np.testing.assert_array_equal(source.read(path, index), value[row : row + 1])
                except UserError:
                    failures += 1
        gone.with_suffix(".away").rename(gone)
    assert (
        0 < failures < sum(2 * len(v) for v in want.values())
    )  # either file serves some rows alone


def test_import_onto_a_mesh_equals_import_on_one_device(tmp_path):
    run(tmp_path / "c", "moe", "singletons")
    whole = read_all(megatron_source(tmp_path / "c"))
    mesh = make_mesh(MeshConfig(dp=2, tp=2, ep=2))
    for path, value in flat(from_pretrained(tmp_path / "c", mesh).params).items():
        np.testing.assert_array_equal(np.asarray(value), whole[path], str(path))


def test_torch_is_not_needed(tmp_path):
    run(tmp_path / "c", "llama", "stacked")
    code = """
        import sys
        sys.modules["torch"] = sys.modules["megatron"] = None  # importing either raises
        from mjax.interop.megatron.stored.torch_dist import open_torch_dist
        store = open_torch_dist(sys.argv[1])
        x = store.read("output_layer.weight", (slice(3, 5), slice(0, 24)))
        print(store.common["args"].num_layers, x.view(store.dtype("output_layer.weight")).sum())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "c")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    rows = weights(arguments("llama"))[0]["output_layer.weight"][3:5]
    assert out[0] == "3" and float(out[1]) == pytest.approx(float(rows.sum()), abs=1e-4)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["MJAX_BOMB"],)


def test_nothing_in_a_pickle_is_run(tmp_path, monkeypatch):
    run(tmp_path / "c", "llama", "stacked")
    monkeypatch.setenv("MJAX_BOMB", str(tmp_path / "ran"))
    args = argparse.Namespace(**arguments("llama"), tokenizer=Bomb())
    torch.save({"args": args}, tmp_path / "c" / "common.pt")
    megatron_source(tmp_path / "c")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "ran").exists()  # the bomb works


def rewrite(folder, name="llama", drop=(), **args):
    """Save again with other arguments or fewer tensors."""
    a = arguments(name)
    state = megatron_names(a, *weights(a), "stacked")
    state = {k: v for k, v in state.items() if k not in drop}
    save(folder, {**a, **args}, state)
    return folder


REFUSED = {
    "attention_output_gate": True,
    "position_embedding_type": "mrope",
    "normalization": "L2Norm",
    "rotary_interleaved": True,
    "quick_geglu": True,
    "mtp_use_repeated_layer": True,
    "softmax_type": "off-by-one",
    "vocab_size": 1000,
    "window_size": (4, 4),
    "padded_vocab_size": None,
}


@pytest.mark.parametrize("arg", REFUSED)
def test_an_argument_that_we_cannot_honor_is_named(tmp_path, arg):
    values = {**arguments("llama"), arg: REFUSED[arg]}
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(types.SimpleNamespace(state_dict_metadata={}, storage_data={}))
    )
    torch.save({"args": argparse.Namespace(**values)}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(UserError, match=rf"common\.pt: args\.{arg}\b.*(imported|newer)"):
        megatron_source(tmp_path)


@pytest.mark.parametrize(
    "moe_arg,value",
    [("moe_expert_capacity_factor", 1.0), ("moe_router_score_function", "sqrtsoftplus")]
    + [("add_bias_linear", True), ("moe_router_load_balancing_type", "quantile")],
)
def test_experts_that_we_do_not_have_are_named(tmp_path, moe_arg, value):
    from mjax.interop.megatron.arguments import model_config

    assert model_config(arguments("moe"), "common.pt").layer_pattern == "full+mlp, full+experts*2"
    with pytest.raises(UserError, match=moe_arg):
        model_config({**arguments("moe"), moe_arg: value}, "common.pt")
    dense = model_config({**arguments("llama", swiglu=True), moe_arg: value}, "x")
    assert dense.moe.num_experts == 0


def test_layer_arguments_become_a_pattern():
    from mjax.interop.megatron.arguments import model_config

    def pattern(**more):
        cfg = model_config({**BASE, "num_layers": 6, **more}, "common.pt")
        return cfg.layer_pattern, cfg.attention.sliding_window

    assert pattern() == ("full+mlp", None)
    assert pattern(window_size=(127, 0)) == ("window+mlp", 128)
    assert pattern(window_size=(127, 0), window_attn_skip_freq=2) == ("window+mlp, full+mlp", 128)
    marks = [1, 0, 0, 1, 1, 0]
    some = "window+mlp, full+mlp*2, window+mlp"  # which repeats
    assert pattern(window_size=(3, 0), window_attn_skip_freq=marks) == (some, 4)
    assert pattern(no_rope_freq=3) == ("full+mlp*2, nope+mlp", None)
    every_second = pattern(num_experts=2, moe_router_topk=1, moe_layer_freq=2)
    assert every_second == ("full+experts, full+mlp", None)
    with pytest.raises(UserError, match="window_size and args.no_rope_freq"):
        pattern(window_size=(3, 0), no_rope_freq=2)


def test_gelu_is_the_form_that_megatrons_kernel_computes():
    from mjax.interop.megatron.arguments import model_config

    def act(**more):
        return model_config({**arguments("gpt2"), **more}, "common.pt").hidden_act

    assert act() == "gelu_tanh"
    assert act(bias_gelu_fusion=False) == "gelu" == act(add_bias_linear=False)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c: (c / "metadata.json").unlink(), "no metadata.json.*format torch_dcp"),
        (
            lambda c: (c / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "'zarr'.*convert",
        ),
        (lambda c: (c / "metadata.json").write_text("{"), "names no sharded_backend"),
        (lambda c: (c / "common.pt").unlink(), "common.pt is missing"),
        (lambda c: (c / "common.pt").write_bytes(b"PK"), "cannot read common.pt"),
        (
            lambda c: (c / ".metadata").write_bytes(b"\x80\x04}."),
            "cannot read common.pt or .metadata",
        ),
        (lambda c: torch.save({"iteration": 1}, c / "common.pt"), "holds no `args`"),
        (lambda c: (c / "__0_1.distcp").unlink(), "__0_1.distcp is missing"),
        (lambda c: os.truncate(c / "__0_0.distcp", 99), "__0_0.distcp has 99 of"),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path, change, message):
    change(rewrite(tmp_path / "c"))
    with pytest.raises(UserError, match=message) as error:
        megatron_source(tmp_path / "c").check()
    assert str(tmp_path / "c") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"drop": ["decoder.final_layernorm.weight"]},
            "'decoder.final_layernorm.weight' or .* is missing",
        ),
        (
            {"drop": ["decoder.layers.mlp.linear_fc2.weight"]},
            r"'decoder\.layers\.0\.mlp\.linear_fc2\.weight' or 'decoder\.layers\.mlp.* is missing",
        ),
        ({"ffn_hidden_size": 48}, r"linear_fc2\.weight' is \[3, 24, 40\].*\[3, 24, 48\]"),
        ({"num_layers": 2}, r"is \[3, .*\[2, "),
        ({"qk_layernorm": False}, r"q_layernorm\.weight' has no counterpart"),
        (
            {"padded_vocab_size": 512, "vocab_size": 500},
            r"word_embeddings.*\[320, 24\].*\[500, 24\]",
        ),
    ],
)
def test_tensors_that_the_arguments_contradict_are_named(tmp_path, change, message):
    folder = rewrite(tmp_path / "c", **change)
    with pytest.raises(UserError, match=message):
        megatron_source(folder).check()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_model_part_that_is_printed_is_what_training_needs(tmp_path, monkeypatch, capsys, name):
    run(tmp_path / "iter_0000007", name, "numbered")
    monkeypatch.setattr("sys.argv", ["convert", "config", "--megatron", str(tmp_path)])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert convert.main() == 0
    file = tmp_path / "own.yaml"
    file.write_text(capsys.readouterr().out)
    assert load(file).model == megatron_source(tmp_path).cfg


def test_run_folders(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        megatron_source(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no metadata.json; give"):
        megatron_source(tmp_path)
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00/model_optim_rng.pt").write_bytes(b"")
    with pytest.raises(UserError, match="model_optim_rng.pt: cannot read it"):
        megatron_source(tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("12")
    with pytest.raises(UserError, match="names iter_0000012, which is absent"):
        megatron_source(tmp_path)
    tracker.write_text("release")
    rewrite(tmp_path / "release")
    assert megatron_source(tmp_path).cfg == megatron_source(tmp_path / "release").cfg
