"""Experts by recipes of blocks: near those that round nothing, whatever padded rows hold."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.fp8.block_recipes import Block128, MxFp8
from mjax.models.base.weight import Weight
from mjax.models.moe.dispatch import make_dispatch
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import multiply_down, multiply_up
from tests.marks import exhaustive, quick
from tests.unit.models.test_experts_fp8 import draw, far, in_two, run

T, D, F, E, K, HELD = 48, 32, 64, 4, 2, 2


def operands(recipe, poisoned: bool) -> list:
    """x, gates, up, down and the dispatch; tokens of no held expert are NaN if `poisoned`."""
    experts = jnp.argsort(draw(0, T, E), 1)[:, :K].astype(jnp.int32)
    x = draw(1, T, D)
    if poisoned:
        x = jnp.where((experts < HELD).any(1, keepdims=True), x, jnp.nan)
    weights = []
    for name, shape in (("expert_up", (HELD, D, 2, F)), ("expert_down", (HELD, F, D))):
        value = draw(len(shape), *shape) / 8
        w = Weight(value, grad_sum=jnp.ones_like(value), name=name, recipe=recipe)
        weights.append(w if recipe is None else replace(w, scales=jnp.zeros(3)))
    gates = jax.nn.softmax(draw(2, T, K))
    return [x, gates, *weights, make_dispatch(experts, 0, HELD)]


@exhaustive
@pytest.mark.parametrize("recipe", quick([Block128(block=16), MxFp8()]))
def test_padded_rows_do_not_matter(recipe):
    function = in_two(Expert("silu", True), multiply_up, multiply_down)
    exact = run(function, *operands(None, False))
    clean, poisoned = (run(function, *operands(recipe, bad)) for bad in (False, True))
    for name in ("y", "dx", "d_gates"):
        assert 1e-3 < far(clean[name], exact[name]) < 0.15, name
        np.testing.assert_array_equal(poisoned[name], clean[name])
    for name in ("up", "down"):
        made, want = (of[name].grad_sum - 1 for of in (clean, exact))
        assert 1e-3 < far(made, want) < 0.15, name
        np.testing.assert_array_equal(poisoned[name].grad_sum, clean[name].grad_sum)
