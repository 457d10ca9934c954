"""`mjax quantize` as a user runs it: texts, perplexities, and mistakes of one line."""

import re
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, run_cli
from mjax.interop.pretrained import Pretrained, from_pretrained
from mjax.models import build, definition_of, split
from mjax.post import quantize
from mjax.sharding.spec import is_spec
from tests.marks import exhaustive, quick, slow

SIZES = dict(
    model_type="qwen3",
    vocab_size=260,
    hidden_size=128,
    num_hidden_layers=2,
    attention={"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "qk_norm": True},
    intermediate_size=128,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize")
    for name, changes in (("model", {}), ("encoder", {"layer_pattern": "BB"})):
        cfg = ModelConfig(**SIZES | changes)
        specs = definition_of(cfg).specs
        zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs, is_leaf=is_spec)
        write_weights(folder / name, array_source(cfg, zeros), specs)
    (folder / "text").write_text("the numbers of a text " * 30)
    return folder


def run(monkeypatch, folder, *words, model="model"):
    argv = ["quantize", folder / model, folder / "out", "--tokenizer", "byte", "--seq-length", 32]
    monkeypatch.setattr(sys, "argv", [str(word) for word in [*argv, *words]])
    with pytest.raises(SystemExit) as end:
        run_cli(quantize.main)
    return end.value.code


@exhaustive
def test_inputs_are_measured_where_experts_and_routers_read_them():
    """Moments of layer 0 are those of the normed embedding; all that read the same have them."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    cfg = ModelConfig(**SIZES | dict(model_type="qwen3_moe", layer_pattern="EE", moe=moe))
    definition, params = split(build(cfg, nnx.Rngs(0)))
    rows = np.arange(5 * 16, dtype=np.int32).reshape(5, 16)
    model = Pretrained(cfg, definition, params, None, None)
    found = quantize.input_moments(model, rows, 5)
    names = {"q", "kv", "attn_proj", "expert_up"}
    assert set(found) == {(layer, name) for layer in (0, 1) for name in names}
    x = np.asarray(params["embedding"])
    x = x[rows.reshape(-1)].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps)
    np.testing.assert_allclose(found[0, "q"], (normed**2).mean(0), rtol=1e-4)
    np.testing.assert_array_equal(found[0, "kv"], found[0, "q"])
    parts = rows[:2], rows[2:]
    halves = [quantize.input_moments(model, part, 2)[1, "expert_up"] for part in parts]
    mean = (2 * halves[0] + 3 * halves[1]) / 5
    np.testing.assert_allclose(found[1, "expert_up"], mean, rtol=1e-4)


@slow
@pytest.mark.parametrize("pattern", ["GG", "EE"])
@pytest.mark.parametrize("options", ["--activation-aware", "--scales mse"])
def test_both_perplexities_are_printed_and_weights_are_near(
    pattern, options, folder, monkeypatch, capsys, tmp_path
):
    cfg = ModelConfig(**SIZES | dict(layer_pattern=pattern))
    if pattern == "EE":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        cfg = ModelConfig(**SIZES | dict(model_type="qwen3_moe", layer_pattern=pattern, moe=moe))
    definition, params = split(build(cfg, nnx.Rngs(0)))
    write_weights(tmp_path / "model", array_source(cfg, params), definition.specs)
    text = folder / "text"
    words = ["--scheme", "int4_group128", "--calibrate", text, "--evaluate", text, "--samples", 4]
    words += ["--seq-length", 512]  # the default, beyond the 64 of the model
    assert run(monkeypatch, tmp_path, *words, *options.split()) == 0
    out = capsys.readouterr().out
    before, after = map(float, re.search(r": ([0-9.]+) before, ([0-9.]+) after", out).groups())
    assert before != after and abs(after / before - 1) < 0.05
    assert re.search(r"matrices of 4.1[0-9] bits a weight", out)
    read = from_pretrained(tmp_path / "out").params
    tokens = np.arange(20, dtype=np.int32)[None]
    found, wanted = (jax.jit(definition.bind(p))(tokens) for p in (read, params))
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-3 < error < 0.25


MISTAKES = {
    "text": (["--evaluate", "nowhere"], "nowhere"),
    "samples": (["--calibrate", "text", "--scales", "mse", "--samples", 0], "make no row of 32"),
    "unused": (["--calibrate", "text"], "--calibrate is read by --scales mse and"),
    "aware": (["--activation-aware"], "goes with --scheme int4_group128 and --calibrate"),
    "size": (["--max-shard-gb", 0], "--max-shard-gb 0.0: give a number above 0"),
    "pattern": (["--ignore", "*.q_proj"], "which servers fuse into one matrix"),
    "encoder": ([], "an encoder"),
}


@pytest.mark.parametrize("mistake", quick(MISTAKES, 2, 5, 6))
def test_a_mistake_is_one_line_and_exit_code_2(mistake, folder, monkeypatch, capsys):
    words, told = MISTAKES[mistake]
    words = [folder / word if word == "text" else word for word in words]
    model = "encoder" if mistake == "encoder" else "model"
    assert run(monkeypatch, folder, "--scheme", "nvfp4", *words, model=model) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("mjax: error: ") and told in lines[0]
    assert not (folder / "out").exists()


def test_an_unknown_scheme_and_a_full_folder_are_refused(folder, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, folder, "--scheme", "int3") == 2
    assert "invalid choice: 'int3'" in capsys.readouterr().err
    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(sys, "argv", f"q {folder}/model {tmp_path} --scheme nvfp4".split())
    with pytest.raises(UserError, match="exists already; give another folder"):
        quantize.main()
