"""Law: a text's vector is that of the model's plain activations, whatever runs beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.weights import mesh_of, take_apart
from mjax.models import build, definition_of, split
from mjax.models.base.context import Context, tokens_of
from mjax.serve.embeddings import POOLINGS, Embedder
from tests.laws.serving.kinds import KINDS, LENGTH, SMALL, VOCAB, on_mesh
from tests.marks import slow

ENCODER = {"layer_pattern": "B", "position_embedding": "learned", "hidden_act": "gelu"}
DRAWN = np.random.default_rng(0)
TEXTS = [DRAWN.integers(0, VOCAB, n).tolist() for n in (3, 17, 3)]


def check(sizes: dict, mesh: dict | None = None) -> None:
    cfg = ModelConfig(**nested({**SMALL, **sizes}))
    definition, params = definition_of(cfg), split(build(cfg, nnx.Rngs(0)))[1]
    model = definition.bind(params)
    places = on_mesh(definition, params, mesh) if mesh else params
    embedder = Embedder(definition, cfg, mesh_of(places), jnp.dtype("float32"), LENGTH)
    if cfg.architecture.generates:
        places = take_apart(definition.specs, places, jnp.dtype("float32"))
    wanted = []
    for text in TEXTS:
        x, _, _ = model.hidden(jnp.array([text]), tokens_of((1, len(text))), Context())
        wanted.append(np.asarray(x[0]))
    of = {"mean": lambda x: x.mean(0), "last": lambda x: x[-1], "first": lambda x: x[0]}
    for pooling in POOLINGS:
        found = embedder.embed(places, TEXTS, pooling)
        plain = np.stack([of[pooling](x) for x in wanted])
        np.testing.assert_allclose(found, plain, rtol=0, atol=2e-5)
    assert embedder.embed(places, [], "mean").shape == (0, cfg.hidden_size)
    for texts, pooling, message in (
        ([[]], "mean", "0 tokens"),
        ([[VOCAB]], "mean", "not in"),
        ([[1] * (LENGTH + 1)], "last", "129 tokens"),
        ([[1]], "max", "pooling=max"),
    ):
        with pytest.raises(UserError, match=message):
            embedder.embed(places, texts, pooling)


@slow
def test_of_a_decoder_and_of_an_encoder():
    check({"num_hidden_layers": 1})
    check({"num_hidden_layers": 1, **ENCODER})


@slow
@pytest.mark.parametrize("kind", ["windows in turn", "mamba", "latent", "experts"])
def test_of_other_decoders(kind):
    check(KINDS[kind])


@slow
@pytest.mark.parametrize("sizes", [{}, ENCODER], ids=["decoder", "encoder"])
def test_on_a_mesh(sizes):
    assert len(jax.devices()) > 1
    check(sizes, {"tp": 2})
