"""Looking inside a model: the traced run is the model, and hooks change what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.trace import trace
from mjax.models import build

CFG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    attention={"num_attention_heads": 2, "sliding_window": 3},
    layer_pattern="LGN",
    norm_placement="sandwich",
    max_position_embeddings=16,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 9)), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return build(CFG, nnx.Rngs(0))


def test_without_hooks_it_is_the_model(model):
    logits, kept = jax.jit(lambda t: trace(model, t, keep=["layers.*", "embedding"]))(TOKENS)
    np.testing.assert_allclose(logits, model(TOKENS), atol=1e-5)
    assert set(kept) == {"embedding"} | {
        f"layers.{i}{part}" for i in range(3) for part in ("", ".attention", ".mlp")
    }
    assert kept["layers.1"].shape == (2, 9, 16)


def test_the_residual_stream_is_the_sum_of_its_parts(model):
    _, kept = trace(model, TOKENS, keep=["*"])
    stream = kept["embedding"]
    for i in range(3):
        stream = stream + kept[f"layers.{i}.attention"] + kept[f"layers.{i}.mlp"]
        np.testing.assert_allclose(stream, kept[f"layers.{i}"], atol=1e-5)


def test_a_hook_replaces_an_activation(model):
    gone, kept = trace(model, TOKENS, keep=["layers.*"], hooks={"layers.1.mlp": jnp.zeros_like})
    assert not np.any(kept["layers.1.mlp"])
    np.testing.assert_allclose(
        kept["layers.1"], kept["layers.0"] + kept["layers.1.attention"], atol=1e-6
    )
    assert np.abs(gone - model(TOKENS)).max() > 1e-3


def test_gradients_flow_to_an_activation(model):
    def loss(scale):
        return trace(model, TOKENS, hooks={"layers.0": lambda x: x * scale})[0].var()

    slope, step = jax.grad(loss)(1.0), 1e-2
    np.testing.assert_allclose(slope, (loss(1 + step) - loss(1 - step)) / (2 * step), rtol=2e-2)


def test_a_name_that_matches_nothing_is_an_error(model):
    with pytest.raises(UserError, match="nothing is called 'layers.3.mlp'"):
        trace(model, TOKENS, keep=["layers.3.mlp"])
