"""Models outside any mesh: plain jit, layer patterns, caches, initialization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config.languages.layer_pattern import LAYERS, expand
from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models import build, split
from mjax.models.attention import positions
from mjax.models.base.context import Context, tokens_of
from mjax.models.runtime.execution import plain_layers, scan_groups
from tests.generation import made_ids

SMALL = {
    "vocab_size": 251,
    "hidden_size": 32,
    "attention.num_attention_heads": 4,
    "attention.num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "pattern": {"layer_pattern": "LG", "num_hidden_layers": 5, "attention.sliding_window": 4},
    "learned": {"position_embedding": "learned", "norm": "layernorm", "mlp_gated": False},
    "sandwich": {
        "norm_placement": "sandwich",
        "norm_zero_centered": True,
        "attention.qk_norm": True,
    },
    "partial": {
        "rope.partial_rotary_factor": 0.5,
        "hidden_act": "relu2",
        "attention.attention_sinks": True,
    },
}


def model(**kw):
    return build(ModelConfig(**nested({**SMALL, **kw})), nnx.Rngs(0))


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_generation_equals_running_the_whole_prefix(name):
    made = model(**VARIANTS[name])
    definition, params = split(made)
    prompt = [3, 5, 7, 9, 11]
    new = made_ids((definition, params, made.cfg), [prompt], 10)[0]
    logits = jax.jit(lambda m, t: m(t))(made, jnp.asarray([prompt + new]))
    np.testing.assert_array_equal(new, logits[0, 4:-1].argmax(-1))


def test_the_gradient_of_a_word_that_comes_often_is_not_lost_in_bf16():
    """A sum of 4096 equal numbers in bf16 stands still at 256 of them."""
    tokens = jnp.full((1, 4096), 7)
    definition, params = nnx.split(model())
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def total(params):
        embed = nnx.merge(definition, params).embed
        return embed(tokens, tokens_of(tokens.shape), Context()).astype(jnp.float32).sum()

    assert (jax.grad(total)(params)["embedding"][...][7] == 4096).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_model_is_causal_and_finite(name):
    made = model(**VARIANTS[name])
    ids = np.random.default_rng(0).integers(0, 251, (2, 12))
    other = ids.copy()
    other[:, 8:] = (other[:, 8:] + 1) % 251
    a, b = (np.asarray(made(jnp.asarray(x))) for x in (ids, other))
    assert a.shape == (2, 12, 251) and a.dtype == np.float32 and np.isfinite(a).all()
    np.testing.assert_allclose(a[:, :8], b[:, :8], atol=1e-5)
    assert np.abs(a[:, 8:] - b[:, 8:]).max() > 1e-2


def test_segments_hide_other_documents():
    made = model()
    ids = np.random.default_rng(0).integers(0, 251, (1, 12))
    segments = jnp.asarray([[1] * 5 + [2] * 7])
    positions = jnp.asarray([[*range(5), *range(7)]])
    packed = made(jnp.asarray(ids), positions, segments)
    alone = made(jnp.asarray(ids[:, 5:]))
    np.testing.assert_allclose(packed[:, 5:], alone, atol=1e-5)


def test_scaled_output_init():
    params = split(model(hidden_size=64, num_hidden_layers=8))[1]["dense"]
    assert np.std(params["attention"]["q"]) == pytest.approx(0.3, rel=0.05)
    assert np.std(params["attention"]["out"]) == pytest.approx(0.3 / 4, rel=0.05)
    assert np.std(params["mlp"]["down"]) == pytest.approx(0.3 / 4, rel=0.05)
    assert not np.array_equal(params["mlp"]["down"][0], params["mlp"]["down"][1])


@pytest.mark.parametrize("rotary", [8, 4])
def test_the_backward_of_rope_is_its_transpose(rotary):
    """With a factor on the tables, heads turned whole and in part."""
    x, y = (jax.random.normal(jax.random.key(i), (2, 5, 3, 8)) for i in (0, 1))
    angles = jax.random.normal(jax.random.key(2), (2, 5, 1, rotary // 2))
    tables = 1.3 * jnp.cos(angles), 1.3 * jnp.sin(angles)
    by_hand, by_jax = (
        jax.vjp(lambda x: turn(x, tables), x)[1](y)[0]  # noqa: B023
        for turn in (positions.apply_rope, lambda x, tables: positions._rotate(x, *tables))
    )
    np.testing.assert_allclose(by_hand, by_jax, rtol=1e-5, atol=1e-6)


def test_dtype_of_the_computation_is_that_of_the_parameters():
    definition, params = split(model())
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x, *_ = definition.bind(low).hidden(jnp.zeros((1, 4), jnp.int32), tokens_of((1, 4)), Context())
    assert x.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "pattern,layers,expected",
    [
        ("G", 4, "GGGG"),
        ("LG", 5, "LGLGL"),
        ("(LLG)*2,L", 7, "LLGLLGL"),
        ("((LG)*2,G)*2", 10, "LGLGGLGLGG"),
        ("L*3,G", 8, "LLLGLLLG"),
    ],
)
def test_patterns_expand(pattern, layers, expected):
    assert expand(pattern, layers) == tuple(LAYERS[letter] for letter in expected)


@pytest.mark.parametrize("pattern", ["", "X", "(LG", "GGGGG", "2G"])
def test_malformed_patterns_are_one_line(pattern):
    with pytest.raises(UserError, match="layer_pattern"):
        expand(pattern, 4)


def test_scans_cover_every_layer_once_in_the_fewest_scans():
    def kinds_of(group):
        return tuple(plan.kinds[0] for plan in group.period) * group.repeats

    def groups(kinds):
        return list(scan_groups(plain_layers(kinds)))

    (group,) = groups(expand("G", 32))
    assert (group.first, len(group.period), group.repeats) == (0, 1, 32)
    group = groups(expand("LLLLLG", 26))[0]
    assert (group.first, len(group.period), group.repeats) == (0, 6, 4)
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = tuple(rng.choice(["full+mlp", "window+mlp"], rng.integers(1, 20)))
        parts = [kinds_of(group) for group in groups(kinds)]
        assert sum(parts, ()) == kinds
        firsts = np.cumsum([0, *map(len, parts)])[:-1]
        assert [group.first for group in groups(kinds)] == list(firsts)
