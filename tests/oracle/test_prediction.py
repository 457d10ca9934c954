"""Multi-token prediction equals transformers' parts put together as its publications say.

transformers itself drops these layers. So their loss is written out here in torch, from its decoder
layer, norms and rotary embedding: DeepSeek-V3's paper, Qwen's configs (`mtp.fc` reads embedding,
then hidden state), and MiMo's own modelling file (hidden state, then embedding).
"""

import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.masking_utils import create_causal_mask

from mjax.checkpoint.base.companion_files import UNREAD
from mjax.checkpoint.base.safetensors import unpack
from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.interop.partial_load import fit
from mjax.interop.pretrained import from_pretrained
from mjax.interop.sources import source_of
from mjax.models.base.context import Context, Kernels, tokens_of
from mjax.objectives.next_token import MultiToken
from mjax.sharding.collectives import LOCAL
from mjax.sharding.spec import trained_only
from tests.marks import quick
from tests.oracle.families import make

FACTOR = 0.3


@dataclass(frozen=True)
class Form:
    """How a family's files have prediction layers.

    names: of the parts, with {depth} for the number that DeepSeek gives a layer.
    depths: of the test's model.
    said: what config.json says besides.
    copies: whether the layers have copies of embedding and head.
    hidden_first: the projection reads the hidden state before the embedding.
    stacked: the experts of the layer are in one tensor.
    mean: of norms' random gains.
    """

    names: dict[str, str]
    depths: int = 1
    said: tuple[tuple[str, object], ...] = ()
    copies: bool = False
    hidden_first: bool = False
    stacked: bool = False
    mean: float = 0.0


_NAMES = "enorm", "hnorm", "eh_proj", "norm", "block"
_DEEPSEEK = Form(
    dict(zip(_NAMES, ("{depth}.enorm", "{depth}.hnorm", "{depth}.eh_proj"), strict=False))
    | {"norm": "{depth}.shared_head.norm", "block": "{depth}"},
    depths=2,
    said=(("num_nextn_predict_layers", 2),),
    copies=True,
    mean=1.0,
)
_OF_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0")
_QWEN = Form({own: f"mtp.{name}" for own, name in zip(_NAMES, _OF_QWEN, strict=True)})
_SAID = (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False))
_OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
FORMS = {
    "deepseek_v3_moe": _DEEPSEEK,
    "glm4_moe_plain": _DEEPSEEK,
    "qwen3_next_biased": _QWEN,
    "qwen3_5": Form(_QWEN.names, said=_SAID),
    "qwen3_5_moe": Form(_QWEN.names, said=_SAID, stacked=True),
    "qwen2": Form(
        {own: f"model.mtp_layers.0.{n}" for own, n in zip(_NAMES, _OF_MIMO, strict=False)}
        | {"block": "model.mtp_layers.0"},
        said=(("model_type", "mimo"), ("architectures", ["MiMoForCausalLM"]))
        + (("num_nextn_predict_layers", 1),),
        hidden_first=True,
        mean=1.0,
    ),
}


def joined(model, depth: int, mean: float) -> nn.ModuleDict:
    """The parts of a prediction layer, with random weights; its block attends."""
    layer, norm = type(model.model.layers[-1]), type(model.model.norm)
    cfg = model.config
    types = getattr(cfg, "layer_types", None) or ["full_attention"] * cfg.num_hidden_layers
    number = max(i for i, kind in enumerate(types) if kind == "full_attention")
    torch.manual_seed(depth)
    parts = nn.ModuleDict(
        {
            "enorm": norm(cfg.hidden_size, cfg.rms_norm_eps),
            "hnorm": norm(cfg.hidden_size, cfg.rms_norm_eps),
            "eh_proj": nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False),
            "block": layer(cfg, number),
            "norm": norm(cfg.hidden_size, cfg.rms_norm_eps),
        }
    )
    for name, parameter in parts.named_parameters():
        nn.init.normal_(parameter, mean if "norm" in name else 0.0, 0.15)
    for name, buffer in parts.named_buffers():
        if "correction_bias" in name:
            nn.init.normal_(buffer, 0.0, 0.1)
    return parts.eval()


def losses(model, layers: list[nn.ModuleDict], form: Form, tokens, labels) -> list[torch.Tensor]:
    """The mean cross-entropy of the model and of each depth."""
    body = model.model
    hidden = body(tokens).last_hidden_state
    positions = torch.arange(tokens.shape[1])[None]
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=hidden,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    rotary = body.rotary_emb(hidden, positions)
    found = [cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())]
    for depth, parts in enumerate(layers, 1):
        ahead = torch.zeros_like(tokens)
        ahead[:, :-depth] = tokens[:, depth:]
        both = parts["enorm"](body.embed_tokens(ahead)), parts["hnorm"](hidden)
        x = parts["eh_proj"](torch.cat(both[::-1] if form.hidden_first else both, -1))
        options = {"position_embeddings": rotary, "attention_mask": mask}
        made = parts["block"](x, position_ids=positions, **options)
        hidden = parts["norm"](made[0] if isinstance(made, tuple) else made)
        logits = model.lm_head(hidden)[:, :-depth]
        found.append(cross_entropy(logits.flatten(0, 1), labels[:, depth:].flatten()))
    return found


def save(model, layers: list[nn.ModuleDict], form: Form, folder) -> None:
    """A folder as the family publishes it."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(form.said)))
    tensors = load_file(folder / "model.safetensors")
    for depth, parts in enumerate(layers):
        number = f"model.layers.{model.config.num_hidden_layers + depth}"
        if form.copies:
            tensors[f"{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        for name, tensor in parts.state_dict().items():
            own, _, rest = name.partition(".")
            start = form.names[own].format(depth=number)
            pieces = [(rest, tensor)] if form.stacked else experts_apart(rest, tensor)
            for piece, part in pieces:
                tensors[f"{start}.{piece}"] = part.contiguous().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def experts_apart(name: str, tensor: torch.Tensor):
    """A module's tensor as files have it: transformers fuses experts while loading."""
    if name.endswith("mlp.experts.gate_up_proj"):
        for i, fused in enumerate(tensor):
            for part, half in zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True):
                yield f"mlp.experts.{i}.{part}.weight", half
    elif name.endswith("mlp.experts.down_proj"):
        for i, down in enumerate(tensor):
            yield f"mlp.experts.{i}.down_proj.weight", down
    else:
        yield name, tensor


@pytest.fixture(scope="module", params=quick(FORMS, 0, 2, 5))
def saved(request, tmp_path_factory):
    """(the transformers model, its prediction layers, the folder of both, their form)."""
    model, form = make(request.param), FORMS[request.param]
    layers = [joined(model, depth, form.mean) for depth in range(1, form.depths + 1)]
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    save(model, layers, form, folder)
    return model, layers, folder, form


def test_losses_and_gradients(saved, tmp_path):
    model, layers, folder, form = saved
    ids = np.random.default_rng(0).integers(3, 251, (2, 41))
    tokens, labels = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])
    expected = losses(model, layers, form, tokens, labels)
    parameters = [*model.parameters(), *(p for parts in layers for p in parts.parameters())]
    for parameter in parameters:
        parameter.grad = None
    (expected[0] + FACTOR * torch.stack(expected[1:]).mean()).backward()

    ours = from_pretrained(folder)
    assert ours.cfg.num_nextn_predict_layers == form.depths
    objective = MultiToken(form.depths, FACTOR)
    ids = ids.astype(np.int32)
    batch = {
        "tokens": jnp.asarray(ids[:, :-1]),
        "labels": jnp.asarray(ids[:, 1:]),
        "loss_mask": jnp.ones((2, 40)),
        "segment_ids": jnp.zeros((2, 40), jnp.int32),
        "columns": jnp.arange(40, dtype=jnp.int32),
    }
    batch |= objective.derive_fields(batch, LOCAL)
    info, ctx = tokens_of((2, 40)), Context(kernels=Kernels(attention="xla"))
    counts = objective.counts(batch)

    def total(params):
        decoder = ours.definition.bind(params)
        x = objective.embed(decoder, batch, info, ctx)
        x, *_ = decoder.layers(x, info, ctx)
        sums = objective.losses(decoder, x, batch, info, ctx)
        means = {name: sums[name] / count for name, count in counts.items()}
        return sum(means.values()), means

    (_, means), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(ours.params)
    for name, loss in zip(("loss", "mtp_1", "mtp_2"), expected, strict=False):
        assert float(means[name]) == pytest.approx(loss.item(), rel=2e-6), name
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():  # the gradients go through the same import, as weights of their own
        for p in parameters:
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        save(model, layers, form, tmp_path / "grads")
        for p, before in zip(parameters, kept, strict=True):
            p.copy_(before)
    wanted = from_pretrained(tmp_path / "grads").params
    grads, wanted = (trained_only(tree, ours.definition.specs) for tree in (grads, wanted))
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
    ):
        bound = 1e-4 * max(np.abs(want).max(), 1e-30)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=str(path))


def test_export_gives_back_every_byte(saved, tmp_path, monkeypatch):
    *_, folder, _ = saved
    arguments = ["import", "--hf", folder, "--out", tmp_path / "ckpt"]
    monkeypatch.setattr("sys.argv", ["convert", *map(str, arguments)])
    assert convert() == 0
    arguments = ["export", "--ckpt", tmp_path / "ckpt", "--hf", tmp_path / "back"]
    monkeypatch.setattr("sys.argv", ["convert", *map(str, arguments), "--dtype", "float32"])
    assert convert() == 0
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_a_folder_without_their_weights_has_no_prediction_layers(saved, tmp_path):
    model, *_ = saved
    model.save_pretrained(tmp_path / "hf")
    assert from_pretrained(tmp_path / "hf").cfg.num_nextn_predict_layers == 0


def test_a_run_without_the_layer_keeps_it_aside(saved, tmp_path):
    *_, folder, form = saved
    cfg = source_of(folder).cfg.model_copy(update={"num_nextn_predict_layers": 0})
    (left,) = fit(source_of(folder), cfg, []).left_out[:1]
    assert left == "mtp_1"
    if form.copies:  # DeepSeek's names would be those of a layer
        return
    source = source_of(folder, cfg)
    source.check()
    assert source.cfg == cfg
    aside, tensors = unpack(source.unread()[UNREAD]), load_file(folder / "model.safetensors")
    wanted = {name for name in tensors if name.startswith(("mtp.", "model.mtp_layers."))}
    assert aside.keys() == wanted
    for name in wanted:
        np.testing.assert_array_equal(aside[name], tensors[name])


def test_half_of_their_weights_is_an_error(saved, tmp_path):
    *_, folder, form = saved
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    wanted = form.names["hnorm"].removeprefix("{depth}")
    dropped = next(name for name in tensors if name.endswith(f"{wanted}.weight"))
    del tensors[dropped]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"tensor {dropped} is missing"):
        from_pretrained(tmp_path)
