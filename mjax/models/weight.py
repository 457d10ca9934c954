"""A weight as a matmul sees it, and the matmul of all dense layers.

A `Weight` holds a matrix with all that its matmuls read: the value, its 8-bit form, the scales of
its recipe, and the running sum of its gradients. It is a pytree, so it can be differentiated as one
argument. Its cotangent is again a `Weight`: it holds the gradient, or the next running sum, and the
maxima that the matmul saw. Running sums follow Megatron-LM's gradient accumulation fusion: the
product of the backward is added to the sum by the matmul itself, in fp32, without being rounded.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.tree_util import register_dataclass

from mjax.kernels.gate import E4M3
from mjax.kernels.quantize import (
    Recipe,
    bits_as_e4m3,
    dot8,
    quantize,
    quantize_gradient,
    quantize_tensor,
)
from mjax.sharding.collectives import LOCAL, Parallel


def _static(default):
    return field(default=default, metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Weight:
    """A matrix as matmuls read it. A field that is None is not there.

    value: [*inputs, *outputs], in the dtype of the computation.
    bits: uint8, shaped like value: what e4m3 rounds it to. Matmuls then read the bits, and the
        value only takes the gradient.
    transposed: uint8 [N, K], the bits as a matrix, transposed.
    scales: fp32 [3] of x, of the weight and of the gradient of y, if there is a recipe.
    grad_sum: fp32, shaped like value: the sum of the gradients of earlier micro-batches.
    name: of the matmul (`ParamSpec.matmul`). inputs: how many leading axes of value are contracted.

    As a cotangent, `value` is the gradient, or `grad_sum` is the sum with the gradient added and
    `value` is zero; `scales` holds the largest magnitudes [of x, 0, of the gradient of y].

    Stacked weights of L layers have a leading axis L on every array.
    """

    value: jax.Array | None = None
    bits: jax.Array | None = None
    transposed: jax.Array | None = None
    scales: jax.Array | None = None
    grad_sum: jax.Array | None = None
    name: str = _static("")
    inputs: int = _static(1)
    recipe: Recipe | None = _static(None)


def is_weight(x: object) -> bool:
    return isinstance(x, Weight)


def weight_of(param: nnx.Param) -> Weight:
    """The weight that a module's parameter holds; a bare array is the value of one."""
    held, spec = param.get_value(), param.get_metadata("spec")
    if is_weight(held):
        return held
    return Weight(held, name=spec.matmul, inputs=spec.inputs)


def matmul(x: jax.Array, w: Weight, parallel: Parallel = LOCAL) -> jax.Array:
    """Contract the last `w.inputs` axes of x with the first of w, in x's dtype.

    Current scaling measures x and the gradient over tp of `parallel`. All products are of matrices.
    XLA would otherwise transpose the gradient of a weight with several inputs before and after its
    exchange (GPT 1.3B on two H200s: 1.5 % of a step).
    """
    lead, outputs = x.shape[: x.ndim - w.inputs], w.value.shape[w.inputs :]
    matrix = as_matrix(w)
    rows = x.reshape(-1, len(matrix.value))
    if w.recipe is not None:
        y = _matmul_fp8(parallel, rows, matrix)
    elif w.grad_sum is not None:
        y = _matmul_adding(rows, matrix)
    else:
        y = rows @ matrix.value
    return y.reshape(*lead, *outputs)


def as_matrix(w: Weight) -> Weight:
    """The weight with its arrays as matrices [K, N]."""
    size = math.prod(w.value.shape[: w.inputs])

    def flat(a: jax.Array | None) -> jax.Array | None:
        return None if a is None else a.reshape(size, -1)

    return replace(w, value=flat(w.value), bits=flat(w.bits), grad_sum=flat(w.grad_sum), inputs=1)


@jax.custom_vjp
def _matmul_adding(x: jax.Array, w: Weight) -> jax.Array:
    """x [M, K], w [K, N] with a running sum -> [M, N]."""
    return x @ w.value


def _matmul_adding_backward(saved: tuple, g: jax.Array) -> tuple[jax.Array, Weight]:
    x, w = saved
    rows = (((0,), (0,)), ((), ()))
    product = lax.dot_general(x, g, rows, preferred_element_type=w.grad_sum.dtype)
    return g @ w.value.T, replace(w, value=None, grad_sum=w.grad_sum + product)


_matmul_adding.defvjp(lambda x, w: (x @ w.value, (x, w)), _matmul_adding_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_fp8(parallel: Parallel, x: jax.Array, w: Weight) -> jax.Array:
    """x [M, K], w [K, N] -> [M, N]: e4m3 operands forward, e5m2 gradients."""
    return _matmul_fp8_forward(parallel, x, w)[0]


def _matmul_fp8_forward(parallel: Parallel, x: jax.Array, w: Weight) -> tuple[jax.Array, tuple]:
    x8, used = quantize_tensor(w.recipe, x, w.scales[0], E4M3, parallel)
    w8, axis = forward_operand(w)
    scales = used[0], w.scales[1]
    y = dot8(x8, w8, (1, axis), scales, x.dtype, backend=w.recipe.backend)
    return y, (x8, used, kept_for_backward(w))


def _matmul_fp8_backward(parallel: Parallel, saved: tuple, g: jax.Array) -> tuple:
    x8, used, w = saved
    backend = w.recipe.backend
    g8, g8_transposed, used_g = quantize_gradient(w.recipe, g, w.scales[2], parallel)
    scales = used_g[0], w.scales[1]
    dx = dot8(g8, backward_operand(w), (1, 1), scales, g.dtype, precise=True, backend=backend)

    def product(dtype: jnp.dtype) -> jax.Array:
        dtype = g.dtype if backend == "te" else dtype  # TE's matmul of fp32 is untried
        scales = used[0], used_g[0]
        return dot8(x8, g8_transposed, (0, 1), scales, dtype, precise=True, backend=backend)

    return dx, cotangent_fp8(w, product, g.dtype, (used[1], used_g[1]))


_matmul_fp8.defvjp(_matmul_fp8_forward, _matmul_fp8_backward)


def forward_operand(w: Weight) -> tuple[jax.Array, int]:
    """(a weight [K, N] in e4m3, its axis that a forward contracts).

    It is transposed where the transposed bits are there.
    """
    if w.transposed is not None:
        return bits_as_e4m3(w.transposed), 1
    return backward_operand(w), 0


def backward_operand(w: Weight) -> jax.Array:
    """A weight [K, N] in e4m3, from its bits where they are there."""
    return quantize(w.value, w.scales[1], E4M3) if w.bits is None else bits_as_e4m3(w.bits)


def kept_for_backward(w: Weight) -> Weight:
    """The fields of a weight that a backward in FP8 reads."""
    return replace(w, value=w.value if w.bits is None else None, transposed=None)


def cotangent_fp8(
    w: Weight,
    product: Callable[[jnp.dtype], jax.Array],
    dtype: jnp.dtype,
    seen: tuple[jax.Array, jax.Array],
) -> Weight:
    """The cotangent of `w` from its gradient as a `product` in a given dtype.

    `dtype` is that of a gradient which no sum takes. `seen` holds the maxima of x and of the
    gradient of y.
    """
    maxima = jnp.stack([seen[0], jnp.zeros_like(seen[0]), seen[1]])
    if w.grad_sum is None:
        return replace(w, value=product(dtype), bits=None, transposed=None, scales=maxima)
    total = w.grad_sum + product(w.grad_sum.dtype)
    return replace(w, value=None, bits=None, transposed=None, scales=maxima, grad_sum=total)


# ---- trees of weights and arrays ---------------------------------------------------------------


def with_sums(weights: dict, sums: dict) -> dict:
    """`weights` whose matmuls add to the running sums in `sums` (`add_gradients`)."""

    def one(w: Weight | jax.Array, total: Weight | jax.Array) -> Weight | jax.Array:
        return replace(w, grad_sum=total.grad_sum) if is_weight(w) else w

    return jax.tree.map(one, weights, sums, is_leaf=is_weight)


def add_gradients(sums: dict, cotangents: dict) -> dict:
    """Running sums with the cotangents of one micro-batch: gradients add, maxima join.

    A sum that the matmul itself has added to is taken from the cotangent as it is.
    """

    def one(total: Weight | jax.Array, more: Weight | jax.Array) -> Weight | jax.Array:
        if not is_weight(total):
            return total + more.astype(total.dtype)
        value = None if total.value is None else total.value + more.value.astype(total.value.dtype)
        scales = None if total.scales is None else jnp.maximum(total.scales, more.scales)
        return replace(total, value=value, scales=scales, grad_sum=more.grad_sum)

    return jax.tree.map(one, sums, cotangents, is_leaf=is_weight)


def values_of(weights: dict) -> dict:
    """The leaves of `weights` that take gradients: without 8-bit forms and scales."""

    def one(w: Weight | jax.Array) -> Weight | jax.Array:
        return replace(w, bits=None, transposed=None, scales=None) if is_weight(w) else w

    return jax.tree.map(one, weights, is_leaf=is_weight)


def with_values(weights: dict, values: dict) -> dict:
    """`weights` with other leaves that take gradients: the inverse of `values_of`."""

    def one(w: Weight | jax.Array, value: Weight | jax.Array) -> Weight | jax.Array:
        return replace(w, value=value.value, grad_sum=value.grad_sum) if is_weight(w) else value

    return jax.tree.map(one, weights, values, is_leaf=is_weight)


def without_fp8(weights: dict) -> dict:
    """`weights` as matmuls in the dtype of the computation read them."""

    def one(w: Weight | jax.Array) -> Weight | jax.Array:
        if not is_weight(w):
            return w
        return replace(w, bits=None, transposed=None, scales=None, recipe=None)

    return jax.tree.map(one, weights, is_leaf=is_weight)
