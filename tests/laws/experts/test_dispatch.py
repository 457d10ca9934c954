"""Laws of the dispatch of tokens to experts: it equals running every expert on every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.base.weight import Weight
from mjax.models.moe.dispatch import make_dispatch
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import multiply_down, multiply_up
from mjax.models.moe.experts import ExpertWeights, RoutedTokens, every_expert
from mjax.prove import deviation

D, F, E = 12, 10, 8


def spread(tokens: int, k: int) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    return np.stack([rng.permutation(E)[:k] for _ in range(tokens)])


ROUTINGS = {
    "spread": spread(40, 3),
    "all to one": np.full((40, 1), 5),
    "all to the same two": np.tile([6, 1], (40, 1)),
    "few experts used": 2 * (spread(40, 2) // 2) + [0, 1],
    "one token": spread(1, 4),
    "each to all": spread(9, E),
}


def operands(experts, halves):
    keys = jax.random.split(jax.random.key(0), 5)
    tokens, k = experts.shape
    shape = (halves, F) if halves == 2 else (F,)
    x = jax.random.normal(keys[0], (tokens, D))
    gates = jax.nn.softmax(jax.random.normal(keys[1], (tokens, k)))
    up = jax.random.normal(keys[2], (E, D, *shape)) * 0.3
    down = jax.random.normal(keys[3], (E, F, D)) * 0.3
    return (x, gates, up, down), jax.random.normal(keys[4], (tokens, D))


GATED, PLAIN = Expert("silu", True), Expert("gelu_tanh", False)


@pytest.mark.grid
@pytest.mark.parametrize("expert,first,held", [(GATED, 0, E), (GATED, 5, 3), (PLAIN, 0, 2)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_dispatch_equals_every_expert_forward_and_backward(name, expert, first, held):
    experts = jnp.asarray(ROUTINGS[name], jnp.int32)
    given, cotangent = operands(experts, 1 + expert.gated)
    mine = slice(first, first + held)

    def sorted_rows(x, gates, up, down):
        dispatch = make_dispatch(experts, first, held)
        h = multiply_up(expert, x, Weight(up[mine]), dispatch)
        return multiply_down(expert, h, gates, Weight(down[mine]), dispatch)

    def loop(x, gates, up, down):
        routed = RoutedTokens(x, experts, gates)
        weights = ExpertWeights(Weight(up[mine]), Weight(down[mine]))
        return every_expert(expert, routed, weights, first)

    (y, vjp), (want, want_vjp) = jax.vjp(sorted_rows, *given), jax.vjp(loop, *given)
    assert deviation(y, want) <= 1e-5
    for got, wanted in zip(vjp(cotangent), want_vjp(cotangent), strict=True):
        # Where no token meets an expert of this device, all is zero.
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_pair_has_one_row_of_its_expert(name):
    experts = ROUTINGS[name]
    first, held = 2, 4
    dispatch = jax.tree.map(np.asarray, make_dispatch(jnp.asarray(experts), first, held))
    flat, places = experts.reshape(-1), dispatch.places.reshape(-1)
    local = (flat >= first) & (flat < first + held)
    assert dispatch.sizes.tolist() == [(flat == first + e).sum() for e in range(held)]
    assert (places[~local] >= len(dispatch.pairs)).all()
    assert (dispatch.pairs[places[local]] == np.flatnonzero(local)).all()
    of_rows = np.repeat(np.arange(held), dispatch.sizes)
    assert (flat[dispatch.pairs[: len(of_rows)]] - first == of_rows).all()
    assert local.sum() == len(of_rows) <= len(dispatch.pairs)
