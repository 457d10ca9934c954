"""Every family: in from Hugging Face, equal numbers, out again byte for byte."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from mjax.config import load
from mjax.config.schema.run import MeshConfig
from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.infer.llm import LLM
from mjax.infer.requests import SamplingParams
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import trained_only
from mjax.train import Trainer
from tests.generation import made_ids
from tests.marks import quick, slow
from tests.oracle.families import LATER, MODELS, make

ROWS, SEQ = 2, 40


CASES = [pytest.param(name, marks=slow if name in LATER else ()) for name in MODELS]


@pytest.fixture(scope="module", params=CASES)
def hf(request, tmp_path_factory):
    """(name, the transformers model, the folder it was saved in)."""
    model = make(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    model.save_pretrained(folder)
    return request.param, model, folder


def run(monkeypatch, *argv) -> None:
    monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
    assert convert() == 0


def batch():
    ids = np.random.default_rng(0).integers(3, 251, (ROWS, SEQ + 1))
    return ids[:, :-1], ids[:, 1:]


def test_logits_and_gradients(hf, tmp_path):
    _, theirs, folder = hf
    tokens, labels = batch()
    ours = from_pretrained(folder)

    def loss(params):
        logits = ours.logits(params, jnp.asarray(tokens, jnp.int32))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return -chosen.mean(), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(ours.params)
    theirs.zero_grad()
    expected = theirs(torch.tensor(tokens)).logits
    flat = expected.reshape(-1, expected.shape[-1]), torch.tensor(labels).reshape(-1)
    torch.nn.functional.cross_entropy(*flat).backward()
    expected = expected.detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4 * np.abs(expected).max())

    # The gradients go through the same import, as a checkpoint of their own.
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    theirs.save_pretrained(tmp_path / "grads")
    restored = make(hf[0])
    theirs.load_state_dict(restored.state_dict())
    wanted = from_pretrained(tmp_path / "grads").params
    grads, wanted = (trained_only(tree, ours.definition.specs) for tree in (grads, wanted))
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
    ):
        bound = 1e-4 * max(np.abs(want).max(), 1e-30)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=str(path))


def test_export_gives_back_every_byte(hf, tmp_path, monkeypatch):
    _, theirs, folder = hf
    run(monkeypatch, "import", "--hf", folder, "--out", tmp_path / "ckpt")
    out = tmp_path / "back"
    run(monkeypatch, "export", "--ckpt", tmp_path / "ckpt", "--hf", out, "--dtype", "float32")
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.tobytes() == after[name].tobytes() and tensor.shape == after[name].shape, name
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert type(again) is type(theirs)
    tokens = torch.tensor(batch()[0])
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=0)


MESHES = {
    "llama3": dict(tp=2, pp=2),
    "gpt2": dict(tp=2, pp=2),
    "phi3": dict(tp=2, pp=2, dp=2, zero=3),
    "mixtral": dict(ep=2, tp=2, pp=2),
    "qwen2_moe": dict(ep=2, tp=2, pp=2),
    "gpt_oss": dict(ep=2, tp=2, pp=2),
    "qwen3_5_moe": dict(tp=2, pp=2, dp=2, zero=3),
    "gpt_neox": dict(tp=2, pp=2),
}


@pytest.mark.parametrize("name", MESHES)  # every layout of tensors
def test_import_onto_a_mesh_equals_import_on_one_device(name, tmp_path):
    folder = tmp_path / "hf"
    make(name).save_pretrained(folder)
    whole, sizes = from_pretrained(folder), {"dp": 1, **MESHES[name]}
    model = {f"model.{k}": v for k, v in whole.cfg.model_dump().items()}
    run = {f"mesh.{k}": v for k, v in sizes.items()} | {"train.global_batch_size": 4}
    run |= {"data.mock": True, "data.seq_length": 16, "train.micro_batch_size": 1}
    cfg = load(None, [f"{k}={json.dumps(v)}" for k, v in (model | run).items()])
    trainer = Trainer(
        cfg,
        make_mesh(cfg.mesh, jax.devices()[: math.prod(v for k, v in sizes.items() if k != "zero")]),
    )
    trainer.load_params(source_of(folder))
    jax.tree.map(np.testing.assert_array_equal, trainer.params(), whole.params)
    mesh = make_mesh(MeshConfig(dp=2, tp=2), jax.devices()[:4])
    split = from_pretrained(folder, mesh).params
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(split))
    jax.tree.map(np.testing.assert_array_equal, split, whole.params)


def test_kimi_k2_is_deepseek_v3_under_its_own_name(tmp_path, monkeypatch):
    make("deepseek_v3_moe").save_pretrained(tmp_path / "hf")
    plain = from_pretrained(tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(said | {"model_type": "kimi_k2"}))
    jax.tree.map(
        np.testing.assert_array_equal, from_pretrained(tmp_path / "hf").params, plain.params
    )
    run(monkeypatch, "import", "--hf", tmp_path / "hf", "--out", tmp_path / "ckpt")
    out = tmp_path / "back"
    run(monkeypatch, "export", "--ckpt", tmp_path / "ckpt", "--hf", out, "--dtype", "float32")
    written = json.loads((out / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("kimi_k2", said["architectures"])
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path / "hf", out))
    assert {n: x.tobytes() for n, x in before.items()} == {n: x.tobytes() for n, x in after.items()}


def test_damage_is_named(tmp_path):
    damaged = tmp_path / "hf"
    make("llama2").save_pretrained(damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors: tensor model.norm.weight has shape"):
        from_pretrained(damaged)


@pytest.mark.grid
def test_greedy_decode_equals_generate(hf):
    """64 tokens each for prompts of unequal lengths, which they pad on the left."""
    _, theirs, folder = hf
    ours = from_pretrained(folder)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 251, n).tolist() for n in (5, 13, 9)]
    padded = torch.tensor([[0] * (13 - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (13 - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        made = theirs.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    rows = made_ids((ours.definition, ours.params, ours.cfg), prompts, 64)
    assert rows == made[:, 13:].tolist()


# Of caches in pages: windows in turn, all windows, latents, sinks, states, deltas.
PAGED = ["gemma3", "deepseek_v3_moe", "gpt_oss", "bamba", "qwen3_next"]


@pytest.mark.parametrize(
    "name", quick(MODELS, *(number for number, name in enumerate(MODELS) if name in PAGED))
)
def test_the_engines_greedy_tokens_equal_generate(name, tmp_path):
    """Of prompts of unequal lengths, one longer than a page and than a chunk."""
    theirs = make(name)
    theirs.save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 251, size).tolist() for size in (5, 80, 13)]
    wanted = []
    for prompt in prompts:
        with torch.no_grad():
            made = theirs.generate(
                torch.tensor([prompt]),
                max_new_tokens=24,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        wanted.append(made[0, len(prompt) :].tolist())
    llm = LLM(tmp_path, max_model_len=128, max_num_seqs=4, max_num_prefill_tokens=64)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
