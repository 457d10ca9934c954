"""Activation functions and gates that differentiate: by our kernels where they pay, else by XLA.

`gate.py` has the kernels. Here is what autodiff would do worse, written as rules of its own: a
backward that starts from the input, in one pass. Invariant: values and gradients are those of plain
JAX up to rounding.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.elementwise.gate import (
    activation_backward,
    activation_forward,
    gate_gradient,
    supports,
)


def activate(x: jax.Array, name: str) -> jax.Array:
    """The activation `name` (`model.hidden_act`, or tanh) of x, in x's shape and dtype."""
    if name == "tanh":
        return jnp.tanh(x)
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    if name == "quick_gelu":
        return x * jax.nn.sigmoid(1.702 * x)
    if name == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def activated(h: jax.Array, bias: jax.Array | None, name: str) -> jax.Array:
    """act(h + bias), [..., F] in h's dtype.

    The backward starts from h, as Megatron-LM's fused bias and GELU does. Autodiff would keep what
    the forward computes on the way, which for GELU is another tensor of that size. Each direction
    is one pass, by our kernel or by XLA.
    """
    x = h if bias is None else h + bias
    return activate(x, name)


def _activated_forward(h, bias, name):
    if supports(h, name):
        y = activation_forward(h, bias, name)
    else:
        y = activated(h, bias, name)
    return y, (h, bias)


def _activated_backward(name, residuals, dy):
    h, bias = residuals
    if supports(h, name):
        return activation_backward(h, bias, dy, name)
    h, bias = lax.optimization_barrier((h, bias))  # or XLA keeps what the forward computed
    _, vjp = jax.vjp(lambda h, bias: activated.fun(h, bias, name), h, bias)
    return vjp(dy)


activated.defvjp(_activated_forward, _activated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gated(h: jax.Array, name: str) -> jax.Array:
    """act(gate) * up, [..., F], of h [..., 2, F] (gate, up).

    The backward computes both gradients and stacks them, in one pass by our kernel or by XLA.
    Autodiff would pad each and add them: XLA would compute both halves everywhere.
    """
    return _gate_times_up(h[..., 0, :], h[..., 1, :], name)


def _gate_times_up(gate: jax.Array, up: jax.Array, name: str) -> jax.Array:
    return activate(gate, name) * up


def _gated_forward(h, name):
    return gated(h, name), h


def _gated_backward(name, h, dy):
    if supports(h, name):
        return (gate_gradient(h, dy, name),)
    product = functools.partial(_gate_times_up, name=name)
    _, vjp = jax.vjp(product, h[..., 0, :], h[..., 1, :])
    d_gate, d_up = vjp(dy)
    return (jnp.stack((d_gate, d_up), -2),)


gated.defvjp(_gated_forward, _gated_backward)
