"""Weights in float16: generated from, exported and written; what it does not hold is refused."""

import sys

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mjax import convert
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.export import __main__ as export
from mjax.export.artifact import Artifact
from mjax.interop.pretrained import from_pretrained
from mjax.models import build, split
from tests.generation import made_ids
from tests.marks import exhaustive

CFG = ModelConfig(
    vocab_size=251,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    attention={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    initializer_range=0.3,
    max_position_embeddings=64,
    model_type="llama",
)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that gives a checkpoint's folder and parameters, the head times a factor."""

    def save(factor: float):
        folder = tmp_path_factory.mktemp("fp16") / "ckpt"
        definition, params = split(build(CFG, nnx.Rngs(0)))
        params = params | {"head": params["head"] * factor}
        files = {"config.json": b"{}"}
        write_weights(folder, array_source(CFG, params), definition.specs, extras=files)
        return folder, definition, params

    return save


def export_hf(monkeypatch, folder) -> None:
    options = ["--ckpt", str(folder), "--hf", str(folder / "hf"), "--dtype", "float16"]
    monkeypatch.setattr(sys, "argv", ["convert", "export", *options])
    convert.main()


@exhaustive
def test_generating_in_fp16_gives_the_tokens_of_fp32(saved, monkeypatch):
    folder, definition, params = saved(1.0)
    want = made_ids((definition, params, CFG), PROMPTS, 12)
    model = from_pretrained(folder, dtype="float16")
    assert {str(a.dtype) for a in jax.tree.leaves(model.params)} == {"float16"}
    half = model.definition, model.params, CFG
    assert made_ids(half, PROMPTS, 12, dtype="float16") == want
    sizes = "--batch 2 --length 32 --block 8 --platforms cpu --dtype float16".split()
    export.main(["--ckpt", str(folder), "--out", str(folder / "out"), *sizes])
    assert Artifact(folder / "out").generate(PROMPTS, 12) == want
    export_hf(monkeypatch, folder)
    written = load_file(folder / "hf" / "model.safetensors")
    assert {a.dtype for a in written.values()} == {np.dtype(np.float16)}
    np.testing.assert_array_equal(
        written["lm_head.weight"], np.asarray(params["head"], np.float16)[: CFG.vocab_size]
    )


def test_weights_beyond_its_range_are_refused_in_a_line(saved, monkeypatch):
    folder, _, _ = saved(1e6)
    with pytest.raises(UserError, match=r"weight head: holds numbers beyond 65504"):
        from_pretrained(folder, dtype="float16")
    with pytest.raises(UserError, match=r"weight lm_head.weight: .* take bfloat16 or float32"):
        export_hf(monkeypatch, folder)
    assert not (folder / "hf").exists()
