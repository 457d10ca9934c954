"""The products of experts' adapters (`models/base/adapter.py`): grouped matmuls of low rank.

Each expert has an adapter of its own. Rows, groups and gates are those of the experts' weights
(`expert_matmuls.py`).
"""

import functools

import jax
import jax.numpy as jnp

from mjax.kernels.matmul.grouped import grouped_matmul, grouped_weight_gradient
from mjax.models.base.adapter import Adapter, adapter_matrices
from mjax.models.base.weight import Weight, value_with_adapter
from mjax.models.moe.dispatch import Dispatch, gates_of_rows, rows_of_tokens, sums_of_rows
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import multiply_up


def adapter_up(expert: Expert, x: jax.Array, adapter: Adapter, dispatch: Dispatch) -> jax.Array:
    """[M, (2,) F]: the adapters' part of `multiply_up`, of tokens x [T, D]."""
    a, b = _of_experts(adapter, x.dtype)
    low = multiply_up(expert, x, Weight(a), dispatch) * adapter.scale
    outputs = b.shape[2:]
    y = _grouped(expert.kernel, low, b.reshape(*b.shape[:2], -1), dispatch.sizes)
    return y.reshape(-1, *outputs)


def adapter_down(
    expert: Expert, h: jax.Array, gates: jax.Array, adapter: Adapter, dispatch: Dispatch
) -> jax.Array:
    """[T, D]: the adapters' part of `multiply_down`."""
    a, b = _of_experts(adapter, h.dtype)
    rows = expert.weighted(h, gates_of_rows(gates, dispatch))
    low = _grouped(expert.kernel, rows, a, dispatch.sizes) * adapter.scale
    return _sums(_grouped(expert.kernel, low, b, dispatch.sizes), dispatch)


def values_of_experts(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """The values [E, ..] of experts' weights with their adapters added; from NF4 in `dtype`."""
    if w.adapter is None:
        return value_with_adapter(w, dtype)
    return jax.vmap(lambda one: value_with_adapter(one, dtype))(w)


def _of_experts(adapter: Adapter, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """a [E, inputs, R] and b [E, R, *outputs] of all experts."""
    return jax.vmap(lambda one: adapter_matrices(one, dtype))(adapter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(kernel: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, K] times w [E, K, N] of each row's expert, [M, N]."""
    return grouped_matmul(x, w, sizes, kernel)


def _grouped_forward(kernel, x, w, sizes):
    return _grouped(kernel, x, w, sizes), (x, w, sizes)


def _grouped_backward(kernel, saved, g):
    x, w, sizes = saved
    dx = grouped_matmul(g, w, sizes, kernel, transposed=True)
    return dx, grouped_weight_gradient(x, g, sizes, None, kernel), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


@jax.custom_vjp
def _sums(rows: jax.Array, dispatch: Dispatch) -> jax.Array:
    return sums_of_rows(rows, dispatch)


_sums.defvjp(
    lambda rows, dispatch: (sums_of_rows(rows, dispatch), dispatch),
    lambda dispatch, g: (rows_of_tokens(g, dispatch), None),
)
