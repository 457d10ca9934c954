"""Laws of pruning: dead parts go and change nothing, what is kept has its bits, sizes are real."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax import convert
from mjax.checkpoint.base.source import array_source, flat
from mjax.checkpoint.weights import write_weights
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.pretrained import from_pretrained
from mjax.interop.pruned import KeptParts, pruned
from mjax.models import build, split
from mjax.post import prune
from tests.marks import quick, slow

WHOLE = ModelConfig(
    model_type="qwen3",
    vocab_size=256,
    hidden_size=24,
    num_hidden_layers=3,
    attention={"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "qk_norm": True},
    intermediate_size=20,
    max_position_embeddings=64,
)
DEAD_LAYER, DEAD_GROUP, DEAD_NEURONS, DEAD_ENTRIES = 1, 2, (3, 4, 11), (0, 7)


def with_dead_parts():
    """A model in which one layer, a group of heads, neurons and entries of the stream are 0."""
    definition, params = split(build(WHOLE, nnx.Rngs(0)))
    dense = params["dense"]
    mlp, attention = dense["mlp"], dense["attention"]
    attention["kv"] = attention["kv"].at[:, :, 1, DEAD_GROUP].set(0)
    mlp["up"] = mlp["up"].at[..., DEAD_NEURONS].set(0)
    attention["out"] = attention["out"].at[DEAD_LAYER].set(0)
    mlp["down"] = mlp["down"].at[DEAD_LAYER].set(0)
    return definition, params


@pytest.fixture
def run(tmp_path):
    definition, params = with_dead_parts()
    write_weights(tmp_path / "whole", array_source(WHOLE, params), definition.specs)
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 3)
    return tmp_path


def prune_by(monkeypatch, folder, *sizes):
    words = ["prune", folder / "whole", folder / "pruned", "--text", folder / "text"]
    words += ["--tokenizer", "byte", "--seq-length", 16, "--rows", 5, "--batch-size", 2, *sizes]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    return prune.main()


@slow
def test_dead_parts_go_first_and_the_model_stays_the_same(run, monkeypatch, capsys):
    sizes = ["--num-hidden-layers", 2, "--intermediate-size", 17, "--num-key-value-heads", 2]
    assert prune_by(monkeypatch, run, *sizes) == 0
    assert "layers kept: 0, 2" in capsys.readouterr().out
    whole, small = (from_pretrained(run / name) for name in ("whole", "pruned"))
    assert small.cfg.num_hidden_layers == 2 and small.cfg.intermediate_size == 17
    attention = small.cfg.attention
    assert (attention.num_attention_heads, attention.num_key_value_heads) == (4, 2)
    tokens = jnp.arange(14, dtype=jnp.int32).reshape(2, 7) * 9
    expected, found = (jax.jit(lm.model)(tokens) for lm in (whole, small))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    monkeypatch.setattr(sys, "argv", f"c export --ckpt {run}/pruned --hf {run}/hf".split())
    assert convert.main() == 0
    exported = from_pretrained(run / "hf")
    assert exported.cfg.intermediate_size == 17
    np.testing.assert_allclose(jax.jit(exported.model)(tokens), expected, atol=2e-2)


@slow
def test_entries_of_the_stream_that_nothing_reads_go_first(run, monkeypatch):
    """And every array that is left has the bits of its part."""
    definition, params = with_dead_parts()
    params["embedding"] = params["embedding"].at[:, DEAD_ENTRIES].set(0)
    for name, part in (("attention", "out"), ("mlp", "down")):
        stack = params["dense"][name]
        stack[part] = stack[part].at[..., DEAD_ENTRIES].set(0)
    write_weights(run / "other", array_source(WHOLE, params), definition.specs)
    (run / "whole").rename(run / "first")
    (run / "other").rename(run / "whole")
    assert prune_by(monkeypatch, run, "--hidden-size", 22) == 0
    left = np.setdiff1d(np.arange(24), DEAD_ENTRIES)
    small = from_pretrained(run / "pruned")
    found, whole = flat(small.params), flat(params)
    assert found.keys() == whole.keys()
    for path, spec in flat(small.definition.specs).items():
        expected = np.asarray(whole[path])
        if "embed" in spec.axes:
            expected = np.take(expected, left, spec.axes.index("embed"))
        np.testing.assert_array_equal(found[path], expected)


def test_what_cannot_be_is_refused(run, monkeypatch):
    for words, wrong in (
        (["--hidden-size", 25], "--hidden-size 25: the model has 24; give 1 to 24"),
        (["--num-hidden-layers", 0], "--num-hidden-layers 0: the model has 3"),
        ([], "nothing to prune: give --num-hidden-layers"),
        (["--hidden-size", 8, "--seq-length", 50, "--rows", 0], "make no row of 50"),
    ):
        with pytest.raises(UserError, match=wrong):
            prune_by(monkeypatch, run, *words)
        assert not (run / "pruned").exists()


OTHERS = {
    "mla+experts": {"attention": {"num_attention_heads": 4}, "moe": {"num_experts": 4}},
    "mamba+mlp": {"mamba": {"mamba_num_heads": 4, "mamba_head_dim": 8}},
}


@slow
@pytest.mark.parametrize("pattern", quick(OTHERS, 0))
def test_width_and_depth_of_other_layers(pattern):
    """Their own inner sizes stay."""
    keys = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 20}
    cfg = ModelConfig(**keys, layer_pattern=pattern, **OTHERS[pattern])
    _, params = split(build(cfg, nnx.Rngs(0)))
    small = pruned(array_source(cfg, params), KeptParts(np.array([0, 2]), np.arange(4, 20), {}))
    _, wanted = split(build(small.cfg, nnx.Rngs(1)))
    for path, array in flat(wanted).items():
        part = small.read(path, tuple(slice(0, size) for size in array.shape))
        assert part.shape == array.shape
    assert small.cfg.hidden_size == 16 and small.cfg.num_hidden_layers == 2


def test_layers_of_unequal_sizes_are_refused():
    _, params = with_dead_parts()
    kept = KeptParts(np.arange(3), np.arange(24), {(0, "mlp"): np.arange(3)})
    with pytest.raises(UserError, match=r"would keep \(1, 20, 24\), .* wants \(1, 3, 24\)"):
        pruned(array_source(WHOLE, params), kept)
