"""Multi-token prediction equals transformers' parts put together as DeepSeek-V3's paper says.

transformers itself drops these layers. So their loss is written out here in torch, from its decoder
layer, norms and rotary embedding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.masking_utils import create_causal_mask

from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.interop.pretrained import from_pretrained
from mjax.models.base.context import Context, Kernels, tokens_of
from mjax.objectives.next_token import MultiToken
from mjax.sharding.collectives import LOCAL
from tests.oracle.families import make

DEPTHS, FACTOR = 2, 0.3


def joined(model, depth: int) -> nn.ModuleDict:
    """The parts of a prediction layer, with random weights."""
    layer, norm = type(model.model.layers[-1]), type(model.model.norm)
    cfg = model.config
    torch.manual_seed(depth)
    parts = nn.ModuleDict(
        {
            "enorm": norm(cfg.hidden_size, cfg.rms_norm_eps),
            "hnorm": norm(cfg.hidden_size, cfg.rms_norm_eps),
            "eh_proj": nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False),
            "block": layer(cfg, cfg.num_hidden_layers - 1),
            "norm": norm(cfg.hidden_size, cfg.rms_norm_eps),
        }
    )
    for name, parameter in parts.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        nn.init.normal_(parameter, mean, 0.15)
    for name, buffer in parts.named_buffers():
        if "correction_bias" in name:
            nn.init.normal_(buffer, 0.0, 0.1)
    return parts.eval()


def losses(model, layers: list[nn.ModuleDict], tokens, labels) -> list[torch.Tensor]:
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
        x = parts["eh_proj"](torch.cat(both, -1))
        options = {"position_embeddings": rotary, "attention_mask": mask}
        hidden = parts["norm"](parts["block"](x, position_ids=positions, **options))
        logits = model.lm_head(hidden)[:, :-depth]
        found.append(cross_entropy(logits.flatten(0, 1), labels[:, depth:].flatten()))
    return found


def save(model, layers: list[nn.ModuleDict], folder) -> None:
    """A folder like DeepSeek's own: the layers follow the model's, with copies of the tables."""
    model.config.num_nextn_predict_layers = len(layers)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    words = {"block.": "", "norm.": "shared_head.norm."}
    for depth, parts in enumerate(layers):
        first = f"model.layers.{model.config.num_hidden_layers + depth}."
        tensors[f"{first}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{first}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        for name, tensor in parts.state_dict().items():
            for old, new in words.items():
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                    break
            for piece, part in experts_apart(name, tensor):
                tensors[first + piece] = part.contiguous().clone()
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


@pytest.fixture(scope="module", params=["deepseek_v3_moe", "glm4_moe_plain"])
def saved(request, tmp_path_factory):
    """(the transformers model, its prediction layers, the folder of both)."""
    model = make(request.param)
    layers = [joined(model, depth) for depth in range(1, DEPTHS + 1)]
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    save(model, layers, folder)
    return model, layers, folder


def test_losses_and_gradients(saved):
    model, layers, folder = saved
    ids = np.random.default_rng(0).integers(3, 251, (2, 41))
    tokens, labels = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])
    expected = losses(model, layers, tokens, labels)
    for parameter in (*model.parameters(), *(p for parts in layers for p in parts.parameters())):
        parameter.grad = None
    (expected[0] + FACTOR * torch.stack(expected[1:]).mean()).backward()

    ours = from_pretrained(folder)
    assert ours.cfg.num_nextn_predict_layers == DEPTHS
    objective = MultiToken(DEPTHS, FACTOR)
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
    for name, loss in zip(("loss", "mtp_1", "mtp_2"), expected, strict=True):
        assert float(means[name]) == pytest.approx(loss.item(), rel=2e-6), name
    mine = grads["mtp_2"]
    block = layers[1]["block"]
    pairs = {
        "embedding": (grads["embedding"][:251], model.model.embed_tokens.weight),
        "head": (grads["head"][:251], model.lm_head.weight),
        "final norm": (grads["final_norm"]["gain"], model.model.norm.weight),
        "enorm": (mine["embedding_norm"]["gain"], layers[1]["enorm"].weight),
        "hnorm": (mine["hidden_norm"]["gain"], layers[1]["hnorm"].weight),
        "projection": (
            mine["projection"].reshape(-1, mine["projection"].shape[-1]).T,
            layers[1]["eh_proj"].weight,
        ),
        "norm": (mine["final_norm"]["gain"], layers[1]["norm"].weight),
        "router": (mine["block"]["mlp"]["router"].T, block.mlp.gate.weight),
        "first norm": (
            jax.tree.map(
                lambda g: g[0], grads[next(iter(ours.definition.bind(ours.params).stacks))]
            )["attention_norm"]["gain"],
            model.model.layers[0].input_layernorm.weight,
        ),
    }
    for name, (got, theirs) in pairs.items():
        want = theirs.grad.numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=name)


def test_export_gives_back_every_byte(saved, tmp_path, monkeypatch):
    _, _, folder = saved
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
    model, _, _ = saved
    model.save_pretrained(tmp_path / "hf")
    assert from_pretrained(tmp_path / "hf").cfg.num_nextn_predict_layers == 0


def test_half_of_their_weights_is_an_error(saved, tmp_path):
    _, _, folder = saved
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    dropped = next(name for name in tensors if name.endswith("eh_proj.weight"))
    del tensors[dropped]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"tensor {dropped} is missing"):
        from_pretrained(tmp_path)
