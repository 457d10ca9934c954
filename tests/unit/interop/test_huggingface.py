"""Laws of streamed weights: every piece equals the whole, export undoes import, damage is named.

The tensors are laid out by hand below, so that slots are compared with plain numpy: a fused
transposed q/k/v, fused gate and up, experts' style of stacking, a padded vocabulary.
"""

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.base.safetensors import INDEX
from mjax.checkpoint.base.source import Source, array_source, arrays, block_shape, blocks, flat
from mjax.checkpoint.store import Store
from mjax.checkpoint.weights import read_weights, write_weights
from mjax.config import load
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import Slot
from mjax.interop.huggingface.files import export, hf_source
from mjax.models import build, split
from mjax.run.resume import resume
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.sharding.rules import stored_partitions
from mjax.train.trainer import Trainer
from tests.marks import exhaustive, quick, slow
from tests.sources import restore_params

L, D, N, K, H, F, V = 4, 16, 4, 2, 6, 20, 251
MODEL = [
    f"model.vocab_size={V}",
    f"model.hidden_size={D}",
    f"model.num_hidden_layers={L}",
    f"model.attention.num_attention_heads={N}",
    f"model.attention.num_key_value_heads={K}",
    f"model.attention.head_dim={H}",
    f"model.intermediate_size={F}",
    "model.attention.attention_bias=true",
    "data.mock=true",
    "data.seq_length=16",
    "train.micro_batch_size=1",
]
CFG = load(None, MODEL).model
DEFINITION, _ = split(nnx.eval_shape(lambda: build(CFG, nnx.Rngs(0))))
SPECS = DEFINITION.specs


def make_slots() -> dict[tuple, tuple[Slot, ...]]:
    kv_at = [N * H, (N + K) * H]
    at = range(L)
    name = "h.{}.{}".format
    dense = {
        ("attention", "q"): [Slot(name(i, "c_attn"), (i,), ((1,), (2, 3)), 0, 1) for i in at],
        ("attention", "kv"): [
            Slot(name(i, "c_attn"), (i, j), ((1,), (3, 4)), kv_at[j], 1) for i in at for j in (0, 1)
        ],
        ("attention", "q_bias"): [Slot(name(i, "c_bias"), (i,), ((1, 2),)) for i in at],
        ("attention", "kv_bias"): [
            Slot(name(i, "c_bias"), (i, j), ((2, 3),), kv_at[j]) for i in at for j in (0, 1)
        ],
        ("attention", "out"): [Slot(name(i, "o"), (i,), ((3,), (1, 2))) for i in at],
        ("mlp", "up"): [
            Slot(name(i, "gate_up"), (i, j), ((3,), (1,)), j * F) for i in at for j in (0, 1)
        ],
        ("mlp", "down"): [Slot("all.down", (i,), ((2,), (1,)), lead=(i,)) for i in at],
        ("attention_norm", "gain"): [Slot(name(i, "n1"), (i,), ((1,),)) for i in at],
        ("mlp_norm", "gain"): [Slot(name(i, "n2"), (i,), ((1,),)) for i in at],
    }
    slots = {("dense", *path): tuple(places) for path, places in dense.items()}
    slots["final_norm", "gain"] = (Slot("norm", (), ((0,),)),)
    slots["embedding",] = (Slot("wte", (), ((0,), (1,))),)
    slots["head",] = (Slot("head", (), ((0,), (1,))),)
    return slots


SLOTS = make_slots()


def make_params(seed: int = 0) -> dict:
    """Random numpy parameters that bfloat16 holds; the rows that pad the vocabulary are zero."""
    rng = np.random.default_rng(seed)

    def one(path, spec):
        x = rng.standard_normal(spec.shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        if path[0].key in ("embedding", "head"):
            x[V:] = 0
        return x

    return jax.tree_util.tree_map_with_path(one, SPECS)


def to_tensors(params: dict) -> dict[str, np.ndarray]:
    """What the slots mean, in plain numpy."""
    d = params["dense"]
    a = d["attention"]
    out = {"wte": params["embedding"][:V], "head": params["head"][:V]}
    out["norm"] = params["final_norm"]["gain"]
    out["all.down"] = d["mlp"]["down"].transpose(0, 2, 1)
    for i in range(L):
        kv = [a["kv"][i, :, j].reshape(D, K * H) for j in (0, 1)]
        out[f"h.{i}.c_attn"] = np.concatenate([a["q"][i].reshape(D, N * H), *kv], 1)
        out[f"h.{i}.c_bias"] = np.concatenate([a["q_bias"][i].ravel(), a["kv_bias"][i].ravel()])
        out[f"h.{i}.o"] = a["out"][i].reshape(N * H, D).T
        out[f"h.{i}.gate_up"] = np.concatenate([d["mlp"]["up"][i, :, j].T for j in (0, 1)])
        out[f"h.{i}.n1"] = d["attention_norm"]["gain"][i]
        out[f"h.{i}.n2"] = d["mlp_norm"]["gain"][i]
    return out


def save(file, tensors: dict[str, np.ndarray], dtype: str) -> None:
    kind = jnp.dtype(dtype)
    arrays = {name: np.ascontiguousarray(x.astype(kind)) for name, x in tensors.items()}
    file.write_bytes(safetensors.numpy.save(arrays, {"format": "pt"}))


def save_folder(folder, tensors: dict[str, np.ndarray], dtype: str = "float32", files: int = 2):
    folder.mkdir(exist_ok=True)
    names = [f"model-{i}.safetensors" for i in range(files)]
    where = {tensor: names[i % files] for i, tensor in enumerate(tensors)}
    for name in names:
        save(folder / name, {t: x for t, x in tensors.items() if where[t] == name}, dtype)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


def open_source(folder) -> Source:
    return hf_source(folder, CFG, SPECS, SLOTS)


def assert_equal(got: dict, want: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(
        lambda g, w: np.testing.assert_array_equal(np.asarray(g, np.float32), w), got, want
    )


# ---- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_piece_of_a_parameter_equals_that_piece_of_the_whole(tmp_path, dtype):
    params = make_params()
    source = open_source(save_folder(tmp_path, to_tensors(params), dtype))
    source.check()
    rng = np.random.default_rng(1)
    for path, want in flat(params).items():
        assert source.read(path, tuple(slice(0, n) for n in want.shape)).dtype == jnp.dtype(dtype)
        for _ in range(8):
            ends = [sorted(rng.integers(0, n + 1, 2)) for n in want.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(source.read(path, index).astype(np.float32), want[index])


@pytest.mark.parametrize(
    ("mesh", "zero"), [("dp=2 tp=2 pp=1", 1), ("dp=4 tp=2 pp=1", 3), ("dp=2 tp=1 pp=4", 3)]
)
def test_the_shards_of_any_mesh_are_read_once_and_equal_the_whole(tmp_path, mesh, zero):
    params = make_params()
    inner = open_source(save_folder(tmp_path, to_tensors(params)))
    seen = []
    source = Source(CFG, lambda p, i: (seen.append((p, str(i))), inner.read(p, i))[1], inner.check)
    cfg = load(None, [*MODEL, *(f"mesh.{part}" for part in mesh.split()), "mesh.ep=1"])
    grid = make_mesh(cfg.mesh, jax.devices()[: cfg.mesh.dp * cfg.mesh.tp * cfg.mesh.pp])
    partitions = stored_partitions(SPECS, parallel_of(grid), zero, None)
    abstract = jax.tree.map(
        lambda s, p: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=NamedSharding(grid, p)),
        SPECS,
        partitions,
    )
    got = arrays(source, abstract)
    assert_equal(got, params)
    jax.tree.map(
        lambda g, a: g.sharding == a.sharding or pytest.fail(str(g.sharding)), got, abstract
    )
    assert len(seen) == len(set(seen))


def test_large_shards_pass_through_the_host_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.checkpoint.base.source.SOURCE_BLOCK", 700)
    params = make_params()
    inner = open_source(save_folder(tmp_path, to_tensors(params), "bfloat16"))
    sizes = []

    def read(path, index):
        part = inner.read(path, index)
        sizes.append(part.size * 4)
        return part

    one = NamedSharding(jax.make_mesh((2,), ("a",)), P())
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32", sharding=one), SPECS)
    assert_equal(arrays(Source(CFG, read, inner.check), abstract), params)
    assert max(sizes) <= 700 < 4 * V * D


@pytest.mark.parametrize("shape", [(7,), (3, 1000), (5, 64, 2, 48), (1000000, 3)])
def test_blocks_cover_every_element_once(shape, monkeypatch):
    monkeypatch.setattr("mjax.checkpoint.base.source.SOURCE_BLOCK", 1000)
    block = block_shape(shape, 4)
    assert np.prod(block) * 4 <= 1000
    shape = tuple(min(n, 2000) for n in shape)
    block = block_shape(shape, 4)
    count = np.zeros(shape, int)
    for index in blocks(shape, block):
        count[index] += 1
    assert (count == 1).all()


# ---- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [3000, 10**9])
def test_export_of_an_import_gives_back_every_byte(tmp_path, dtype, most):
    tensors = to_tensors(make_params())
    save_folder(tmp_path / "in", tensors, dtype)
    write_weights(tmp_path / "ckpt", open_source(tmp_path / "in"), SPECS, dtype)
    source = read_weights(tmp_path / "ckpt")
    assert source.cfg == CFG
    source.check()
    export(source.read, CFG, SPECS, SLOTS, tmp_path / "out", dtype, most, {"config.json": b"{}"})
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (most == 3000) == (tmp_path / "out" / INDEX).exists()
    got = {}
    for file in files:
        got |= dict(safetensors.deserialize(file.read_bytes()))
    assert set(got) == set(tensors)
    for name, x in tensors.items():
        assert tuple(got[name]["shape"]) == x.shape, name
        assert got[name]["data"] == x.astype(jnp.dtype(dtype)).tobytes(), name
    if most == 3000:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        itemsize = jnp.dtype(dtype).itemsize
        assert index["metadata"]["total_size"] == itemsize * sum(x.size for x in tensors.values())
        assert {
            n: n in safetensors.safe_open(tmp_path / "out" / f, "np").keys()
            for n, f in index["weight_map"].items()
        } == dict.fromkeys(tensors, True)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_live_arrays_export_like_a_checkpoint(tmp_path):
    params = make_params()
    live = jax.tree.map(jnp.asarray, params)
    export(array_source(CFG, live).read, CFG, SPECS, SLOTS, tmp_path / "out", "float32")
    source = open_source(tmp_path / "out")
    source.check()
    for path, want in flat(params).items():
        np.testing.assert_array_equal(
            source.read(path, tuple(map(slice, [0] * 9, want.shape))), want
        )


def test_a_weights_checkpoint_restores_with_orbax_onto_any_mesh(tmp_path):
    params = make_params()
    save_folder(tmp_path / "in", to_tensors(params))
    write_weights(tmp_path / "ckpt", open_source(tmp_path / "in"), SPECS)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"))
    where = NamedSharding(mesh, P())
    abstract = {
        "params": jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=where), SPECS
        )
    }
    with ocp.CheckpointManager(tmp_path / "ckpt") as manager:
        got = manager.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
    assert_equal(got["state"], {"params": params})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
    with ocp.PyTreeCheckpointer() as plain:
        got = plain.restore(tmp_path / "ckpt" / "0" / "state", restore_args=as_numpy)
    assert_equal(got, {"params": params})
    assert_equal(restore_params(tmp_path / "ckpt", abstract["params"]), params)


def test_a_weights_checkpoint_is_no_train_state(tmp_path):
    save_folder(tmp_path / "in", to_tensors(make_params()))
    write_weights(tmp_path / "ckpt", open_source(tmp_path / "in"), SPECS)
    store = Store(tmp_path / "ckpt", load(None, MODEL), keep=1, keep_every=None, async_save=False)
    with pytest.raises(UserError, match="holds weights only; .*checkpoint.init_from="):
        store.restore({"params": {}})


# ---- training ----------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    "mesh", quick(["dp=2 tp=2 zero=1", "dp=4 zero=3", "dp=2 pp=2 virtual_stages=2"], 1, 2)
)
def test_training_starts_from_given_weights_and_its_checkpoints_give_them_back(tmp_path, mesh):
    params = make_params()
    save_folder(tmp_path / "in", to_tensors(params))
    write_weights(tmp_path / "ckpt", open_source(tmp_path / "in"), SPECS)
    overrides = [f"mesh.{part}" for part in mesh.split()]
    init = f"checkpoint.init_from={tmp_path / 'ckpt'}"
    cfg = load(None, [*MODEL, *overrides, init, f"run.dir={tmp_path / 'run'}"])
    sizes = [getattr(cfg.mesh, axis) for axis in ("dp", "tp", "pp")]
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: int(np.prod(sizes))]))
    first, second = resume(trainer).splitlines()
    assert first == f"starting at step 0 from the weights in {tmp_path / 'ckpt'}"
    count = len(jax.tree.leaves(params))
    assert second.startswith(f"loaded: {count} of {count} parameters as they are; not loaded: mom")
    assert_equal(trainer.params(), params)
    assert trainer.step_number == 0 and trainer.state["step"] == 0
    want = trainer.abstract_state()

    def same(a, w):
        return (a.shape, a.dtype) == (w.shape, w.dtype) and a.sharding == w.sharding

    assert all(jax.tree.leaves(jax.tree.map(same, trainer.state, want)))
    trainer.save()
    trainer.store.wait()
    source = read_weights(tmp_path / "run" / "checkpoints")
    source.check()
    for path, whole in flat(params).items():
        np.testing.assert_array_equal(
            source.read(path, tuple(map(slice, [0] * 9, whole.shape))), whole
        )


def test_weights_of_another_model_are_refused_by_field(tmp_path):
    save_folder(tmp_path / "in", to_tensors(make_params()))
    cfg = load(None, [*MODEL, "model.rope.rope_theta=5.0", f"run.dir={tmp_path / 'run'}"])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    with pytest.raises(
        UserError, match="rope.rope_theta=10000.0, but this run has model.rope.rope_theta=5.0"
    ):
        trainer.load_params(open_source(tmp_path / "in"))
    assert trainer.state is None


# ---- damage ------------------------------------------------------------------------------------


def cut_file(folder):
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def spoil_header(folder):
    file = folder / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    data[8:16] = b"\xff" * 8
    file.write_bytes(bytes(data))


def huge_header(folder):
    file = folder / "model-1.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def lose_file(folder):
    (folder / "model-1.safetensors").unlink()


def change(**changes):
    """Tensors with some replaced (an array), dropped (None) or added."""

    def apply(folder):
        tensors = to_tensors(make_params()) | {k.replace("__", "."): v for k, v in changes.items()}
        save_folder(folder, {k: v for k, v in tensors.items() if v is not None})

    return apply


def integers(folder):
    tensors = to_tensors(make_params())
    save(folder / "model-1.safetensors", {"h.1.o": tensors.pop("h.1.o")}, "int32")
    save(folder / "model-0.safetensors", tensors, "float32")
    where = dict.fromkeys(tensors, "model-0.safetensors") | {"h.1.o": "model-1.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


DAMAGE = {
    "truncated": (cut_file, r"model-1.safetensors: ends within tensor \S+; copy"),
    "corrupt": (spoil_header, "model-1.safetensors: damaged safetensors header"),
    "header length": (huge_header, "model-1.safetensors: damaged safetensors header"),
    "no file": (lose_file, "model-1.safetensors: No such file"),
    "missing": (change(h__2__o=None), "tensor h.2.o is missing; "),
    "missing two": (change(h__2__o=None, norm=None), r"tensor h.2.o is missing \(and 1 more\)"),
    "extra": (change(surplus=np.zeros(3)), r"model-\d.safetensors: tensor surplus has no place"),
    "shape": (
        change(h__2__o=np.zeros((D, 3))),
        r"model-\d.\S+: tensor h.2.o has shape \(16, 3\), .*",
    ),
    "integers": (integers, "model-1.safetensors: tensor h.1.o is I32, which is not one of F32"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_that_names_tensor_and_file_and_nothing_is_written(tmp_path, kind):
    folder = save_folder(tmp_path / "in", to_tensors(make_params()))
    spoil, message = DAMAGE[kind]
    spoil(folder)
    with pytest.raises(UserError, match=message) as error:
        write_weights(tmp_path / "ckpt", open_source(folder), SPECS)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_tensors_without_meaning_are_passed_over(tmp_path):
    none = np.zeros(3)
    change(**{"h__0__attn__bias": none, "h__0__attn__masked_bias": none})(tmp_path / "in")
    open_source(tmp_path / "in").check()
    change(**{"x__rotary_emb__inv_freq": none})(tmp_path / "in")
    open_source(tmp_path / "in").check()
    change(**{"lm_head__weight": none})(tmp_path / "in")
    with pytest.raises(UserError, match="lm_head.weight has no place"):
        open_source(tmp_path / "in").check()


def test_pickles_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="save it as safetensors"):
        open_source(tmp_path)


def test_a_folder_is_never_overwritten_and_a_failed_export_leaves_nothing(tmp_path):
    source = array_source(CFG, make_params())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match="out exists already"):
        export(source.read, CFG, SPECS, SLOTS, tmp_path / "out")

    def fail(path, index):
        if path == ("final_norm", "gain"):
            raise UserError("broken")
        return source.read(path, index)

    with pytest.raises(UserError, match="broken"):
        export(fail, CFG, SPECS, SLOTS, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_lost_block_of_a_checkpoint_is_no_zeros(tmp_path):
    save_folder(tmp_path / "in", to_tensors(make_params()))
    write_weights(tmp_path / "ckpt", open_source(tmp_path / "in"), SPECS)
    lost = tmp_path / "ckpt" / "0" / "state" / "params.dense.mlp.up" / "0.0.0.0"
    lost.unlink()
    source = read_weights(tmp_path / "ckpt")
    index = tuple(slice(0, n) for n in SPECS["dense"]["mlp"]["up"].shape)
    with pytest.raises(UserError, match="cannot read array params.dense.mlp.up"):
        source.read(("dense", "mlp", "up"), index)
    with pytest.raises(UserError, match="0 is damaged: state/params.dense.mlp.up/0.0.0.0 cannot"):
        source.check()


# ---- memory ------------------------------------------------------------------------------------

MEASURED = """
    import json, sys, threading, time
    from pathlib import Path
    import numpy as np
    from mjax.interop.huggingface.files import export, hf_source
    from mjax.checkpoint.base.safetensors import write_file
    from mjax.interop.huggingface.families.family import Slot
    from mjax.checkpoint.weights import read_weights, write_weights
    from mjax.config.schema.model import ModelConfig
    from mjax.sharding.spec import ParamSpec
    from mjax.checkpoint.base import source as streaming

    folder = Path(sys.argv[1])
    streaming.THREADS = 1
    layers, d, f = 3, 2048, 12288  # up and down: 6 tensors of 48 MiB in bfloat16
    spec = lambda *n: ParamSpec((layers, *n), ("layers", "embed", "mlp"), "matrix")
    specs = {"dense": {"up": spec(d, f), "down": spec(f, d)}}
    slots = {("dense", n): tuple(Slot(f"{i}.{n}", (i,), ((2,), (1,))) for i in range(layers))
             for n in specs["dense"]}
    cfg = ModelConfig()
    shapes = {f"{i}.{n}": s for i in range(layers) for n, s in (("down", (d, f)), ("up", (f, d)))}
    (folder / "in").mkdir()
    kind = streaming.jnp.dtype("bfloat16")
    some = np.random.default_rng(0).integers(0, 2**14, f * d, np.uint16)
    tensor = lambda n: (some + list(shapes).index(n)).reshape(shapes[n]).view(kind)
    entries = {n: (shape, kind) for n, shape in shapes.items()}
    write_file(folder / "in" / "model.safetensors", entries, lambda n: [tensor(n)])

    def anonymous():
        lines = open("/proc/self/status").read().split("\\n")
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    peak, done = 0, False
    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    base = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    made = hf_source(folder / "in", cfg, specs, slots)
    write_weights(folder / "ckpt", made, specs, "bfloat16")
    after_import = peak - base
    ckpt = read_weights(folder / "ckpt")  # starts jax
    base, peak = anonymous(), 0
    export(ckpt.read, cfg, specs, slots, folder / "out", "bfloat16")
    done = True
    watcher.join()
    same = (folder / "in/model.safetensors").read_bytes()[-10**8:] == (
        folder / "out/model.safetensors").read_bytes()[-10**8:]
    print(json.dumps({"import": after_import, "export": peak - base, "same": same}))
"""


@exhaustive
def test_host_memory_stays_under_twice_the_largest_tensor(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout.splitlines()[-1])
    largest, constant = 48 * 2**20, 96 * 2**20  # a block read and one converted
    assert got["same"] and max(got["import"], got["export"]) < 2 * largest + constant, got
