"""The products of experts' adapters (`models/base/adapter.py`): grouped matmuls of low rank.

Each expert has an adapter of its own. Rows, groups and gates are those of the experts' weights
(`expert_matmuls.py`). Dropout of what they read is drawn by a token's place for `up`, so it is the
same for all its experts, as it is for gate and up. For `down` it is drawn for each expert, too.
With DoRA each row is stretched by the factors of its expert before rows are summed.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.kernels.matmul.grouped import grouped_matmul, grouped_weight_gradient
from mjax.models.base.adapter import Adapter, InputDropout, add_product, dora_factors
from mjax.models.base.weight import Weight, plain_value, read_value, value_with_adapter
from mjax.models.moe.dispatch import Dispatch, gates_of_rows, rows_of_tokens, sums_of_rows
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import bias_of_rows, multiply_up
from mjax.models.moe.grouped_linear import matrices_of


def add_adapter_up(
    h: jax.Array,
    expert: Expert,
    x: jax.Array,
    up: Weight,
    dispatch: Dispatch,
    places: jax.Array | None,
) -> jax.Array:
    """h [M, (2,) F] of `multiply_up` with the adapters' part.

    x [T, D] are the tokens, places int32 [T, 2] key their dropout.
    """
    adapter = up.adapter
    if adapter is None:
        return h
    h = h + _product_up(expert, _dropped(x, adapter.dropout, places), adapter, dispatch)
    return h if adapter.magnitude is None else h * _factors_of_rows(up, h.dtype, dispatch)


def _product_up(expert: Expert, x: jax.Array, adapter: Adapter, dispatch: Dispatch) -> jax.Array:
    """[M, (2,) F]: the rows of tokens x [T, D], each times its expert's adapter."""
    a, b = _matrices_of_experts(adapter, x)
    experts, rank, *outputs = b.shape
    first = Weight(a)
    low = multiply_up(expert, x, first, dispatch)
    low = adapter.scale * low
    matrices = b.reshape(experts, rank, -1)
    y = _grouped(expert.kernel, low, matrices, dispatch.sizes)
    return y.reshape(-1, *outputs)


def multiply_down_adapted(
    multiply: Callable[..., jax.Array],
    expert: Expert,
    h: jax.Array,
    gates: jax.Array,
    down: Weight,
    dispatch: Dispatch,
    numbers: jax.Array | None,
) -> jax.Array:
    """[T, D]: `multiply`, such as `multiply_down`, and the adapters; `numbers_of_rows` key dropout.

    Stretched rows are summed after it: to it, each row is a token of one expert.
    """
    adapter, base = down.adapter, replace(down, adapter=None)
    if adapter is None:
        return multiply(expert, h, gates, base, dispatch)
    of_rows = gates_of_rows(gates, dispatch)
    a, b = _matrices_of_experts(adapter, h)
    rows = _dropped(expert.weighted(h, of_rows), adapter.dropout, numbers)
    low = _grouped(expert.kernel, rows, a, dispatch.sizes)
    low = adapter.scale * low
    added = _grouped(expert.kernel, low, b, dispatch.sizes)
    if adapter.magnitude is None:
        y = multiply(expert, h, gates, base, dispatch)
        return y + _sums_of_pairs(added, dispatch)
    y = multiply(expert, h, of_rows[:, None], base, _rows_alone(dispatch))
    y = (y + added) * _factors_of_rows(down, y.dtype, dispatch)
    return _sums_of_pairs(y, dispatch)


def _rows_alone(dispatch: Dispatch) -> Dispatch:
    """The dispatch of its rows to themselves."""
    row = jnp.arange(len(dispatch.pairs), dtype=jnp.int32)
    return Dispatch(row, row[:, None], dispatch.sizes)


def _factors_of_rows(w: Weight, dtype: jnp.dtype, dispatch: Dispatch) -> jax.Array:
    """[M, *outputs]: the factors of DoRA of each row's expert."""
    return bias_of_rows(_factors(w, dtype), dispatch)


def _factors(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """[E, *outputs]: the factors of DoRA of each expert."""
    of_each = jax.vmap(dora_factors)
    factors = of_each(matrices_of(w, dtype), _without_dropout(w.adapter))
    outputs = w.value.shape[2:]
    return factors.reshape(-1, *outputs).astype(dtype)


def numbers_of_rows(
    places: jax.Array | None, experts: jax.Array, dispatch: Dispatch
) -> jax.Array | None:
    """(row, column, expert) of each row, int32 [M, 3]; of tokens at `places` [T, 2], if any."""
    if places is None:
        return None
    of_tokens = rows_of_tokens(places, dispatch)
    of_experts = jnp.take(experts.reshape(-1), dispatch.pairs, mode="clip")
    return jnp.column_stack([of_tokens, of_experts])


def multiply_one(
    x: jax.Array,
    w: Weight,
    dropout: InputDropout | None,
    numbers: jax.Array | None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """x [T, K] times the weight of one expert, with its adapter's product of what is left of x."""
    y = jnp.tensordot(x, w.value, 1, preferred_element_type=dtype)
    if w.adapter is None:
        return y
    return add_product(y, _dropped(x, dropout, numbers), None, w.adapter)


def _dropped(x: jax.Array, dropout: InputDropout | None, numbers: jax.Array | None) -> jax.Array:
    return x if dropout is None else dropout.of_rows(x, numbers)


def _without_dropout(adapter: Adapter) -> Adapter:
    """Adapters whose arrays all have an axis of experts: dropout has none."""
    return replace(adapter, dropout=None)


def weights_one_by_one(w: Weight, dtype: jnp.dtype) -> Weight:
    """Plain weights [E, ..] of experts, as `multiply_one` takes each of them.

    Adapters that drop out stay beside them, and factors of DoRA join both. Others are added.
    """
    adapter = w.adapter
    if adapter is None and not w.is_coded:
        return Weight(read_value(w))
    if adapter is None or adapter.dropout is None:
        return Weight(_values_of_experts(w, dtype))
    value, adapter = plain_value(w, dtype), _without_dropout(adapter)
    if adapter.magnitude is not None:
        factors = _factors(w, dtype)[:, None]
        b = adapter.b * factors
        value, adapter = value * factors, replace(adapter, b=b, magnitude=None)
    return Weight(value, adapter=adapter)


def _values_of_experts(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """The values [E, ..] of experts' weights with adapters added; from few bits in `dtype`."""
    value = plain_value(w, dtype)
    if w.adapter is None:
        return value

    def of_one(one: Weight) -> jax.Array:
        return value_with_adapter(one, dtype)

    return jax.vmap(of_one)(replace(w, value=value))


def _matrices_of_experts(adapter: Adapter, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a [E, inputs, R] and b [E, R, *outputs] of all experts, in the dtype of `like`."""

    def of_one(adapter: Adapter) -> tuple[jax.Array, jax.Array]:
        return adapter.matrices(like.dtype)

    return jax.vmap(of_one)(_without_dropout(adapter))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(kernel: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, K] times w [E, K, N] of each row's expert, [M, N]."""
    return grouped_matmul(x, w, sizes, kernel)


def _grouped_forward(kernel, x, w, sizes):
    y = grouped_matmul(x, w, sizes, kernel)
    return y, (x, w, sizes)


def _grouped_backward(kernel, saved, g):
    x, w, sizes = saved
    dx = grouped_matmul(g, w, sizes, kernel, transposed=True)
    dw = grouped_weight_gradient(x, g, sizes, None, kernel)
    return dx, dw, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


@jax.custom_vjp
def _sums_of_pairs(rows: jax.Array, dispatch: Dispatch) -> jax.Array:
    return sums_of_rows(rows, dispatch)


def _sums_of_pairs_forward(rows, dispatch):
    sums = sums_of_rows(rows, dispatch)
    return sums, dispatch


def _sums_of_pairs_backward(dispatch, g):
    rows = rows_of_tokens(g, dispatch)
    return rows, None


_sums_of_pairs.defvjp(_sums_of_pairs_forward, _sums_of_pairs_backward)
