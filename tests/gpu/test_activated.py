"""Activation functions within matmuls on a GPU: against fp32 at sizes of models, and bit-equal."""

import jax
import jax.numpy as jnp
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.activation import activated
from mjax.models.base.weight import Weight
from mjax.models.feedforward.mlp_activated import activated_mlp, in_matmuls

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not chooser.on_hopper(),
    reason="needs a Hopper GPU and jax >= 0.11",
)

# tokens, D, F, act: ViT-L/16, GPT-2, CLIP's texts, GPT 1.3B; tokens that fill no tile
SHAPES = [
    (128 * 197, 1024, 4096, "gelu"),
    (32768, 768, 3072, "gelu_tanh"),
    (128 * 77, 768, 3072, "quick_gelu"),
    (16392, 2048, 8192, "gelu_tanh"),
    (8200, 64, 2048, "gelu"),
]


def wide(x):
    return x.astype(jnp.float32)


def error(got, right):
    return float(jnp.linalg.norm(wide(got) - right) / jnp.linalg.norm(right))


@pytest.mark.parametrize("m, depth, width, act", SHAPES)
def test_kernels_equal_fp32_and_themselves(m, depth, width, act):
    from mjax.kernels.matmul.activated_mosaic import multiply_and_activate, multiply_by_slope

    keys = jax.random.split(jax.random.key(m), 5)
    x, g = (jax.random.normal(key, (m, depth), jnp.bfloat16) for key in keys[:2])
    up = (jax.random.normal(keys[2], (depth, width)) / depth**0.5).astype(jnp.bfloat16)
    down = (jax.random.normal(keys[3], (width, depth)) / depth**0.5).astype(jnp.bfloat16)
    bias = jax.random.normal(keys[4], (width,))
    forward = jax.jit(lambda x: multiply_and_activate(x, up, bias, act))
    backward = jax.jit(lambda g, slope: multiply_by_slope(g, down, slope))
    got = *forward(x), *backward(g, forward(x)[1])
    for once, again in zip(got, (*forward(x), *backward(g, got[1])), strict=True):
        assert bool((once == again).all())
    u = jnp.matmul(x, up, preferred_element_type=jnp.float32) + bias
    share, slope = gate._share_and_slope(act, u)
    product = jnp.matmul(g, down.T, preferred_element_type=jnp.float32)
    product *= wide(got[1])
    right = u * share, share + u * slope, product, product.sum(0)
    errors = [error(*pair) for pair in zip(got, right, strict=True)]
    assert max(errors) <= 4e-3, errors


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_every_bf16_number_gets_its_value_and_slope(act):
    """By a product that picks them: to a bf16 rounding, and besides to 2e-4 of the number."""
    from mjax.kernels.matmul.activated_mosaic import multiply_and_activate

    bits = jnp.arange(2**16, dtype=jnp.uint16)
    u = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    u = u[(jnp.abs(u) < 100) & (jnp.abs(u) > 1e-6)]
    u = u[: len(u) // 8 * 8]
    x, pick = jnp.zeros((len(u), 64), u.dtype).at[:, 0].set(u), jnp.zeros((64, 512), u.dtype)
    got = multiply_and_activate(x, pick.at[0].set(1), jnp.zeros(512), act)
    share, slope = gate._share_and_slope(act, wide(u))
    for made, right in zip(got, (u * share, share + u * slope), strict=True):
        assert bool((made == made[:, :1]).all())
        allowed = jnp.abs(right) * 2.0**-8 + 2e-4 * jnp.clip(jnp.abs(wide(u)), 0.5, 5.0)
        assert float(jnp.max(jnp.abs(wide(made[:, 0]) - right) - allowed)) <= 0


def test_a_block_has_the_gradients_of_plain_matmuls():
    m, depth, width, act = SHAPES[0]
    keys = jax.random.split(jax.random.key(1), 5)
    x, r = (jax.random.normal(key, (m, depth), jnp.bfloat16) for key in keys[:2])
    shapes = (depth, width), (width, depth), (width,)
    up, down, bias = (
        (jax.random.normal(key, shape) / depth**0.5).astype(jnp.bfloat16)
        for key, shape in zip(keys[2:], shapes, strict=True)
    )
    assert in_matmuls(x, Weight(up), bias, act)

    def ours(x, up, bias, down):
        return jnp.vdot(wide(r), wide(activated_mlp(x, Weight(up), bias, Weight(down), act)))

    def plain(x, up, bias, down):
        return jnp.vdot(wide(r), wide(activated(x @ up, bias, act) @ down))

    arguments = x, up, bias, down
    found = [jax.jit(jax.grad(f, (0, 1, 2, 3)))(*arguments) for f in (ours, plain)]
    errors = [error(mine, wide(other)) for mine, other in zip(*found, strict=True)]
    assert max(errors) <= 6e-3, errors
