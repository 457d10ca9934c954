"""Experts in FP8 against those that round nothing: outputs, gradients, running sums, maxima."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8.quantize import quantize_stack, scale_of, transposed_bits
from mjax.kernels.fp8.recipe import Current, Delayed, Recipe
from mjax.models.base.weight import Weight
from mjax.models.moe import matmuls_fp8 as fp8
from mjax.models.moe.dispatch import make_dispatch
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import multiply_down, multiply_up
from mjax.sharding.collectives import LOCAL
from tests.marks import quick, slow

T, D, F, E, K = 48, 32, 40, 4, 2


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def operands(recipe: Recipe | None, held: int, bits: bool):
    """x, gates, up, down with running sums of ones, and the dispatch to experts 0, .. held - 1."""
    experts = jnp.argsort(draw(0, T, E), 1)[:, :K].astype(jnp.int32)
    x, gates = draw(1, T, D), jax.nn.softmax(draw(2, T, K))
    weights = []
    for name, value in (
        ("expert_up", draw(3, held, D, 2, F)),
        ("expert_down", draw(4, held, F, D)),
    ):
        w = Weight(value / 8, grad_sum=jnp.ones_like(value), name=name, recipe=recipe)
        if recipe is not None:
            top = scale_of(jnp.abs(w.value).max(), E4M3)
            guess = scale_of(jnp.float32(8), E4M3), top, scale_of(jnp.float32(64), E5M2)
            w = replace(w, scales=jnp.stack(guess))
        if bits:
            of = quantize_stack(w.value[None], w.scales[None])[0]
            w = replace(w, bits=of, transposed=transposed_bits(of, 1, of_experts=True))
        weights.append(w)
    return x, gates, *weights, make_dispatch(experts, 0, held)


def run(function, x, gates, up, down, dispatch):
    y, vjp = jax.vjp(lambda *of: function(*of, dispatch), x, gates, up, down)
    dx, d_gates, d_up, d_down = vjp(draw(9, T, D))
    return dict(y=y, dx=dx, d_gates=d_gates, up=d_up, down=d_down)


def in_two(expert, one, two):
    def function(x, gates, up, down, dispatch):
        return two(expert, one(expert, x, up, dispatch), gates, down, dispatch)

    return function


def numbers(made: dict) -> list[jax.Array]:
    """All of a run; weights' cotangents are their sums and maxima."""
    of_weights = [a for w in (made["up"], made["down"]) for a in (w.grad_sum, w.scales)]
    return [made["y"], made["dx"], made["d_gates"], *of_weights]


def far(a, e) -> float:
    return float(np.linalg.norm(a - e) / np.linalg.norm(e))


@slow
@pytest.mark.parametrize("delayed, held", [(True, 2), (False, E)])
def test_they_are_near_and_one_function_is_two(delayed, held):
    """Held experts are all, or half, so that rows of no expert are left over."""
    expert, recipe = Expert("silu", True), (Delayed() if delayed else Current())
    exact = run(in_two(expert, multiply_up, multiply_down), *operands(None, held, False))
    one, two = (
        lambda *of: fp8.multiply_up8(LOCAL, *of),
        lambda *of: fp8.multiply_down8(LOCAL, *of),
    )
    made = run(in_two(expert, one, two), *operands(recipe, held, bits=delayed))
    for name, bound in {"y": 0.08, "dx": 0.15, "d_gates": 0.15}.items():
        assert 1e-3 < far(made[name], exact[name]) < bound, name
    for name in ("up", "down"):
        rounded, want = (of[name].grad_sum - 1 for of in (made, exact))
        assert 1e-3 < far(rounded, want) < 0.15
        seen = np.asarray(made[name].scales)
        assert (seen[[0, 2]] > 0).all() and seen[1] == 0
    assert fp8.in_one(expert, operands(recipe, held, False)[2], False) == delayed
    if delayed:
        again = run(in_one(expert, T * K), *operands(recipe, held, bits=False))
        for a, e in zip(numbers(again), numbers(made), strict=True):
            np.testing.assert_allclose(a, e, atol=1e-4)


def in_one(expert, rows):
    def function(x, gates, up, down, dispatch):
        return fp8.gated_experts8(LOCAL, expert, rows, x[None], gates, (up, down), dispatch)[0]

    return function


@pytest.mark.parametrize("held,bits,sums", quick([(2, True, True), (E, False, False)]))
def test_many_passes_equal_one(held, bits, sums):
    expert = Expert("silu", True)
    given = operands(Delayed(), held, bits)
    if not sums:
        weights = (replace(w, grad_sum=None) for w in given[2:4])
        given = *given[:2], *weights, given[4]
    assert given[4].sizes.sum() > 3 * 12
    many, one = (run(in_one(expert, rows), *given) for rows in (12, T * K))
    assert jax.tree.structure(many) == jax.tree.structure(one)
    for a, e in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        if a.dtype != jax.dtypes.float0:  # of bits
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-4)
    for w in (many["up"], many["down"]):
        assert (np.asarray(w.scales)[[0, 2]] > 0).all()
