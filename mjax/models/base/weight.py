"""A weight as a matmul sees it, and the matmul of all dense layers.

A `Weight` holds a matrix with all that its matmuls read: the value, its 8-bit form, the scales of
its recipe, the running sum of its gradients, and its adapter. It is a pytree, so it can be
differentiated as one argument. Its cotangent is again a `Weight`: it holds the gradient, or the
next running sum, and the maxima that the matmul saw. Running sums follow Megatron-LM's gradient
accumulation fusion: the product of the backward is added to the sum by the matmul itself, in fp32,
without being rounded.
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

from mjax.kernels.fp8.channels import Channels8
from mjax.kernels.fp8.four_bits import GradientPlaces
from mjax.kernels.fp8.recipe import Recipe
from mjax.kernels.nf4.values import Nf4
from mjax.models.base.adapter import Adapter, adapted_value, add_product
from mjax.models.base.context import Context, Tokens
from mjax.sharding.collectives import LOCAL, Parallel


def _static(default):
    return field(default=default, metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Weight:
    """A matrix as matmuls read it. A field that is None is not there.

    value: [*inputs, *outputs], in the dtype of the computation; or in few bits, which take no
        gradient: of a frozen weight perhaps `Nf4`, of a served one perhaps `Channels8`.
    bits: uint8, shaped like value: what e4m3 rounds it to. Matmuls then read the bits, and the
        value only takes the gradient.
    transposed: uint8 [N, K], the bits as a matrix, transposed; [E, N, K] of experts.
    scales: fp32 [3] of x, of the weight and of the gradient of y, if there is a recipe.
    input_amax: fp32 [], the largest magnitude of x over tp, where it is known before.
    grad_sum: fp32, shaped like value: the sum of the gradients of earlier micro-batches.
    adapter: its product is added to that of the weight, or None. The weight is frozen then.
    places: of the elements of y's gradient, where a recipe rounds them at random.
    name: of the matmul (`ParamSpec.matmul`). inputs: how many leading axes of value are contracted.

    As a cotangent, `value` is the gradient, or `grad_sum` is the sum with the gradient added and
    `value` is zero; `scales` holds the largest magnitudes [of x, 0, of the gradient of y].

    Stacked weights of L layers have a leading axis L on every array.
    """

    value: jax.Array | Nf4 | Channels8 | None = None
    bits: jax.Array | None = None
    transposed: jax.Array | None = None
    scales: jax.Array | None = None
    input_amax: jax.Array | None = None
    grad_sum: jax.Array | None = None
    adapter: Adapter | None = None
    places: GradientPlaces | None = None
    name: str = _static("")
    inputs: int = _static(1)
    recipe: Recipe | None = _static(None)

    @property
    def is_coded(self) -> bool:
        """Whether the value is in a form of few bits, which multiplies by itself."""
        return isinstance(self.value, Nf4 | Channels8)

    @property
    def scales_tensors(self) -> bool:
        """Whether it has a recipe with one scale a tensor."""
        return self.recipe is not None and self.recipe.scales_tensors

    def of_outputs(self, take: Callable[[jax.Array], jax.Array]) -> "Weight":
        """The weight of some of its outputs: `take` picks them from arrays [.., *outputs]."""
        has_channels = isinstance(self.value, Channels8)
        value = self.value.of_outputs(take) if has_channels else take(self.value)
        adapter = self.adapter
        places = self.places
        if places is not None:
            own = take(places.outputs)
            places = places._replace(outputs=own)
        if adapter is None:
            return replace(self, value=value, places=places)
        length = adapter.magnitude
        if length is not None:
            length = take(length)
        take_b = take if adapter.scales is None else jax.vmap(take)
        adapter = replace(adapter, b=take_b(adapter.b), magnitude=length)
        return replace(self, value=value, adapter=adapter, places=places)

    def for_tokens(self, tokens: Tokens, ctx: Context) -> "Weight":
        """The weight for tokens of another stream than that of its layer.

        Dropout of what its adapter reads is drawn by their places, on the mesh of their stream.
        """
        adapter = self.adapter
        if adapter is None or adapter.dropout is None:
            return self
        dropout = adapter.dropout.at(tokens.rows, tokens.columns, ctx.parallel)
        adapter = replace(adapter, dropout=dropout)
        return replace(self, adapter=adapter)


# A parameter as the model reads it: a matmul's weight, or a table, norm or bias.
WeightOrArray = Weight | jax.Array


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

    Current scaling measures x, unless `input_amax` is there, and the gradient over tp of
    `parallel`. Inputs are always one axis.
    XLA would otherwise transpose the gradient of a weight with several inputs before and after its
    exchange (GPT 1.3B on two H200s: 1.5 % of a step). Outputs of a plain product stay as they are:
    where XLA shards by itself (`infer/`), it gathers a weight whose gate and up became one axis.
    """
    if w.is_coded:
        return _matmul_coded(x, w)
    matrix = as_matrix(w)
    rows = x.reshape(-1, len(matrix.value))
    outputs = w.value.shape[w.inputs :]
    if w.recipe is not None:
        y = _matmul_fp8(parallel, rows, matrix)
    elif w.grad_sum is not None:
        y = _matmul_adding(rows, matrix)
    else:
        y = _product(rows, w.value.reshape(-1, *outputs))
    if w.adapter is not None:
        y = y.reshape(-1, *outputs)
        y = add_product(y, rows, matrix.value, w.adapter)
    lead = x.shape[: x.ndim - w.inputs]
    return y.reshape(*lead, *outputs)


def _matmul_coded(x: jax.Array, w: Weight) -> jax.Array:
    """`matmul` by a weight in few bits, which takes no gradient."""
    coded, adapter = w.value, w.adapter
    outputs = coded.shape[w.inputs :]
    width = math.prod(coded.shape[: w.inputs])
    rows = x.reshape(-1, width)
    y = coded.product(rows)
    y = y.reshape(-1, *outputs)
    if adapter is not None:
        value = None
        if adapter.magnitude is not None:
            value = plain_value(w, x.dtype)
            value = value.reshape(width, -1)
        y = add_product(y, rows, value, adapter)
    lead = x.shape[: x.ndim - w.inputs]
    return y.reshape(*lead, *outputs)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] times w [K, ...], as a matmul of two rows or more.

    XLA for GPUs makes no matmul of one row and a small weight. It writes the products of elements,
    rounded and as large as the weight, and then sums them. So one row becomes two equal ones. They
    take no more time, since a weight takes longer to read than to multiply.
    """
    one_row = len(x) == 1
    if one_row:
        x = jnp.repeat(x, 2, axis=0)
    y = jnp.tensordot(x, w, 1)
    if one_row:
        y = y[:1]
    return y


def as_matrix(w: Weight) -> Weight:
    """The weight with its arrays as matrices [K, N], without its adapter."""
    size = math.prod(w.value.shape[: w.inputs])

    def flat(a: jax.Array | None) -> jax.Array | None:
        return None if a is None else a.reshape(size, -1)

    return replace(
        w,
        value=flat(w.value),
        bits=flat(w.bits),
        grad_sum=flat(w.grad_sum),
        adapter=None,
        inputs=1,
    )


def product_cotangent(x: jax.Array, g: jax.Array, w: Weight) -> Weight:
    """The cotangent of w [K, N] by x [M, K] and the gradient g [M, N] of their product."""
    contract_rows = (((0,), (0,)), ((), ()))
    if w.grad_sum is None:
        gradient = lax.dot_general(x, g, contract_rows)
        return replace(w, value=gradient)
    dtype = w.grad_sum.dtype
    product = lax.dot_general(x, g, contract_rows, preferred_element_type=dtype)
    total = w.grad_sum + product
    return replace(w, value=None, grad_sum=total)


@jax.custom_vjp
def _matmul_adding(x: jax.Array, w: Weight) -> jax.Array:
    """x [M, K], w [K, N] with a running sum -> [M, N]."""
    return x @ w.value


def _matmul_adding_backward(saved: tuple, g: jax.Array) -> tuple[jax.Array, Weight]:
    x, w = saved
    dx = g @ w.value.T
    return dx, product_cotangent(x, g, w)


def _matmul_adding_forward(x: jax.Array, w: Weight) -> tuple[jax.Array, tuple]:
    return x @ w.value, (x, w)


_matmul_adding.defvjp(_matmul_adding_forward, _matmul_adding_backward)


def plain_value(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """The value as an array; of a weight in few bits in `dtype`, for what may be under `vmap`."""
    return w.value.dequantized(dtype) if w.is_coded else w.value


def value_with_adapter(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """`plain_value` for what is no matmul of it, its adapter added."""
    value = plain_value(w, dtype)
    return value if w.adapter is None else adapted_value(value, w.adapter)


@jax.custom_vjp
def read_value(w: Weight) -> jax.Array:
    """The value of a weight, for what is no matmul of it; the gradient joins the running sum."""
    return w.value


def _read_value_forward(w: Weight) -> tuple[jax.Array, Weight]:
    return w.value, w


def _read_value_backward(w: Weight, g: jax.Array) -> tuple[Weight]:
    if w.grad_sum is None:
        return (replace(w, value=g),)
    return (replace(w, value=None, grad_sum=w.grad_sum + g.astype(w.grad_sum.dtype)),)


read_value.defvjp(_read_value_forward, _read_value_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_fp8(parallel: Parallel, x: jax.Array, w: Weight) -> jax.Array:
    """x [M, K], w [K, N] -> [M, N], each operand rounded by the recipe of w."""
    return _matmul_fp8_forward(parallel, x, w)[0]


def _matmul_fp8_forward(parallel: Parallel, x: jax.Array, w: Weight) -> tuple[jax.Array, tuple]:
    x8 = w.recipe.round_input(x, w.scales, parallel, w.input_amax)
    w8, axis = forward_operand(w)
    y = w.recipe.product(x8, w8, axis, w.scales, x.dtype)
    kept_x = w.recipe.kept_input(x8)
    kept_w = kept_for_backward(w)
    return y, (kept_x, kept_w)


def _matmul_fp8_backward(parallel: Parallel, saved: tuple, g: jax.Array) -> tuple:
    x8, w = saved
    recipe = w.recipe
    g8 = recipe.round_gradient(g, w.scales, parallel, w.places)
    w8 = backward_operand(w)
    dx = recipe.input_gradient(g8, w8, w.scales, g.dtype)

    def product(dtype: jnp.dtype, total: jax.Array | None) -> jax.Array:
        dtype = recipe.sum_dtype(dtype, g.dtype)
        return recipe.weight_gradient(x8, g8, dtype, total)

    seen = x8.used[1], g8.used[1]
    cotangent = cotangent_fp8(w, product, g.dtype, seen)
    return dx, cotangent


_matmul_fp8.defvjp(_matmul_fp8_forward, _matmul_fp8_backward)


def forward_operand(w: Weight) -> tuple[jax.Array, int]:
    """(a weight [K, N] in 8 bits, its axis that a forward contracts).

    It is transposed where the transposed bits are there.
    """
    if w.transposed is not None:
        return w.recipe.stored_weight(w.transposed), 1
    return backward_operand(w, 0), 0


def backward_operand(w: Weight, contracted: int = 1) -> jax.Array:
    """A weight [K, N] in 8 bits, from its stored bits where they are there.

    A product over the axis `contracted` reads it; the backward's is over N.
    """
    if w.bits is not None:
        return w.recipe.stored_weight(w.bits)
    return w.recipe.round_weight(w.value, w.scales, contracted)


def kept_for_backward(w: Weight) -> Weight:
    """The fields of a weight that a backward in FP8 reads."""
    value = w.value if w.bits is None else None
    return replace(w, value=value, transposed=None, input_amax=None)


def cotangent_fp8(
    w: Weight,
    product: Callable[..., jax.Array],
    dtype: jnp.dtype,
    seen: tuple[jax.Array, jax.Array],
) -> Weight:
    """The cotangent of `w` from its gradient: a `product` in a given dtype, added to a sum if any.

    `dtype` is that of a gradient which no sum takes. `seen` holds the maxima of x and of the
    gradient of y.
    """
    seen_x, seen_g = seen
    maxima = jnp.stack([seen_x, jnp.zeros_like(seen_x), seen_g])
    cotangent = replace(w, value=None, bits=None, transposed=None, places=None, scales=maxima)
    if w.grad_sum is None:
        value = product(dtype, None)
        return replace(cotangent, value=value)
    total = product(w.grad_sum.dtype, w.grad_sum)
    return replace(cotangent, grad_sum=total)


# ---- trees of weights and arrays ---------------------------------------------------------------


def map_weights(function: Callable, tree: dict, *trees: dict) -> dict:
    """A tree with function(entry, ..) for every weight or array of trees of one structure."""
    return jax.tree.map(function, tree, *trees, is_leaf=is_weight)


def with_sums(weights: dict, sums: dict) -> dict:
    """`weights` whose matmuls add to the running sums in `sums` (`add_gradients`)."""

    def add_to(w: WeightOrArray, total: WeightOrArray) -> WeightOrArray:
        return replace(w, grad_sum=total.grad_sum) if is_weight(w) else w

    return map_weights(add_to, weights, sums)


def add_gradients(sums: dict, cotangents: dict) -> dict:
    """Running sums with the cotangents of one micro-batch: gradients add, maxima join.

    A sum that the matmul itself has added to is taken from the cotangent as it is.
    """

    def add(total: jax.Array | None, gradient: jax.Array | None) -> jax.Array | None:
        return None if total is None else total + gradient.astype(total.dtype)

    def add_one(total: WeightOrArray, cotangent: WeightOrArray) -> WeightOrArray:
        if not is_weight(total):
            return add(total, cotangent)
        value, scales = add(total.value, cotangent.value), total.scales
        if scales is not None:
            scales = jnp.maximum(scales, cotangent.scales)
        return replace(total, value=value, scales=scales, grad_sum=cotangent.grad_sum)

    return map_weights(add_one, sums, cotangents)


def values_of(weights: dict) -> dict:
    """The leaves of `weights` that take gradients: without 8-bit forms and scales."""

    def values(w: WeightOrArray) -> WeightOrArray:
        if not is_weight(w):
            return w
        return replace(w, bits=None, transposed=None, scales=None)

    return map_weights(values, weights)


def with_values(weights: dict, values: dict) -> dict:
    """`weights` with other leaves that take gradients: the inverse of `values_of`."""

    def put(w: WeightOrArray, new: WeightOrArray) -> WeightOrArray:
        if not is_weight(w):
            return new
        return replace(w, value=new.value, grad_sum=new.grad_sum)

    return map_weights(put, weights, values)


def without_fp8(weights: dict) -> dict:
    """`weights` as matmuls in the dtype of the computation read them."""
    return map_weights(lambda w: replace(w, recipe=None) if is_weight(w) else w, values_of(weights))
