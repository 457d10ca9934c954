"""A vjp taken apart and put together, and a switch whose backward is a switch, against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mjax.models.runtime.remat import all_but_views, from_arguments, remat
from mjax.models.runtime.vjp import join_vjp, split_vjp, switch_layers

DIM, LAYERS = 6, 4


def block(scale):
    def apply(carry, weights, facts):
        x, total = carry
        w, more = weights["w"], facts["shift"] + facts["layer"]
        h = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w) * scale, "up")
        return (x + jnp.sin(h) + more, total + jnp.sum(h**2))

    return apply


def nothing(carry, weights, facts):
    return carry


BLOCKS = nothing, remat(block(1.0), "dots"), block(0.5)


def run(choose, codes, weights, x, shift):
    """Blocks by their codes, in a scan, as in a chunk."""

    def body(carry, xs):
        code, w, layer = xs
        return choose(code, carry, {"w": w}, {"shift": shift, "layer": layer}), None

    layers = jnp.arange(LAYERS)
    (x, total), _ = lax.scan(body, (x, x.dtype.type(0)), (codes, weights, layers), unroll=LAYERS)
    return jnp.sum(jnp.cos(x)) + total


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(LAYERS, DIM, DIM)) / 3)
    return weights, jnp.asarray(rng.normal(size=(3, DIM))), jnp.asarray(rng.normal(size=DIM))


@pytest.mark.parametrize("codes", [(1, 0, 2, 1), (0, 0, 0, 0), (2, 2, 1, 0)])
def test_switch_layers_has_the_gradient_of_a_switch(codes, data):
    with jax.enable_x64(True):
        weights, x, shift = (jnp.asarray(np.asarray(a), jnp.float64) for a in data)
        codes = jnp.asarray(codes)
        made = []
        for choose in (switch_layers(BLOCKS), lambda code, *args: lax.switch(code, BLOCKS, *args)):

            def loss(w, x):
                return run(choose, codes, w, x, shift)  # noqa: B023

            made.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, x))
        for a, b in zip(*map(jax.tree.leaves, made), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
        assert float(jnp.abs(made[0][1][1]).max()) > 0.01


def test_what_waits_holds_no_weights_and_makes_the_same_vjp(data):
    weights, x, shift = data
    codes = jnp.asarray((1, 0, 1, 0))
    shapes = []

    @jax.jit
    def gradients(weights, x):
        def loss(w, x):
            return run(switch_layers(BLOCKS[:2]), codes, w, x, shift)

        _, vjp = jax.vjp(loss, weights, x)
        layout, kept = split_vjp(vjp, [weights, x, shift])
        shapes.extend(k.shape for k in kept)
        return join_vjp(layout, [weights, x, shift], kept)(1.0)

    expected = jax.grad(lambda *a: run(switch_layers(BLOCKS[:2]), codes, *a, shift), (0, 1))(
        weights, x
    )
    for a, b in zip(gradients(weights, x), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert (LAYERS, 3, DIM) in shapes and (LAYERS, DIM, DIM) not in shapes


def test_what_starts_from_its_arguments_keeps_them_alone_under_a_policy_that_keeps_all():
    def gate(x, gain):
        return x * jax.nn.silu(jnp.exp(x)) * gain

    def kept(layer):
        return sum(a.size for a in jax.tree.leaves(jax.vjp(all_but_views(layer), x, gain)[1]))

    x, gain = jnp.linspace(0.0, 1.0, 64), jnp.float32(2.0)
    assert kept(from_arguments(gate)) == 65 < kept(jax.checkpoint(gate))
    got, wanted = (
        jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1))(x, gain) for f in (from_arguments(gate), gate)
    )
    for mine, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-6)
