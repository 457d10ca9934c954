"""From cotangents of weights to gradients as stored; `load.py` has the whole way of a weight."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.models.base.barriers import write_once
from mjax.models.base.weight import Weight, WeightOrArray, is_weight
from mjax.models.runtime.execution import Execution, is_matmul_weight
from mjax.models.runtime.frozen import map_parameters
from mjax.models.runtime.load import fp8_leaves
from mjax.models.runtime.stacks import stack_in_place
from mjax.sharding.collectives import reduce_gradients
from mjax.sharding.rules import ParamPlacement, Placement
from mjax.sharding.spec import trained_only


def zero_sums(weights: dict, placement: Placement, execution: Execution) -> dict:
    """The running sums of gradients before the first micro-batch, for `add_gradients`.

    `weights` are the trained ones.
    """

    def zero(where: ParamPlacement, w: WeightOrArray) -> WeightOrArray:
        value = w.value if is_weight(w) else w
        if value is None:
            return replace(w, scales=None if w.scales is None else jnp.zeros_like(w.scales))
        dtype = where.spec.dtype(execution.accumulate)
        if execution.reduce == "micro_batch":
            value = jax.eval_shape(lambda x: where.scatter(x, dtype), value)
        total = jnp.zeros(value.shape, dtype)
        if not is_weight(w):
            return total
        in_matmul = execution.sums_in_matmuls and is_matmul_weight(where)
        return replace(
            w,
            value=None if in_matmul else total,
            bits=None,
            transposed=None,
            scales=None if w.scales is None else jnp.zeros_like(w.scales),
            grad_sum=total if in_matmul else None,
        )

    return map_parameters(zero, weights, placement)


@jax.named_scope("reduce")
def scatter_micro_batch(cotangents: dict, placement: Placement, execution: Execution) -> dict:
    """Cotangents of one micro-batch, scattered to ZeRO's shards if `execution` says so."""
    if execution.reduce != "micro_batch":
        return cotangents

    def scatter(where: ParamPlacement, cotangent: WeightOrArray) -> WeightOrArray:
        if not is_weight(cotangent):
            return where.scatter(cotangent, where.spec.dtype(execution.accumulate))
        if cotangent.value is None:
            return cotangent
        return replace(cotangent, value=where.scatter(cotangent.value, execution.accumulate))

    return map_parameters(scatter, cotangents, placement)


@jax.named_scope("reduce")
def store_gradients(
    cotangents: dict, placement: Placement, execution: Execution
) -> tuple[dict, dict]:
    """(gradients as stored, maxima that matmuls in FP8 saw on this device).

    Gradients of trained parameters are stacks in the dtype of sums, reduced over all devices. With
    `gradients_apart` those of matmul weights are lists of layers, in dtypes of their own. The
    maxima are fp32 {stack: {matmul: [L, 3]}}.
    """

    def store(where: ParamPlacement, cotangent) -> jax.Array | None:
        if not where.spec.is_trained:
            return None
        return _store_gradient(where, cotangent, execution)

    gradients = {}
    for name, part in cotangents.items():
        gradients[name] = placement.part(name).map(store, part)
    gradients = trained_only(gradients, placement.specs)
    gradients = reduce_gradients(gradients, placement.of_gradients, placement.parallel)
    matmuls = fp8_leaves(cotangents, placement.specs)
    maxima = {
        stack: {matmul: _maxima(cotangent) for matmul, cotangent in of_stack.items()}
        for stack, of_stack in matmuls.items()
    }
    return gradients, maxima


def _store_gradient(
    where: ParamPlacement, cotangent: WeightOrArray | list[Weight], execution: Execution
) -> jax.Array | list[jax.Array]:
    """The gradient of one parameter, scattered: a stack in the dtype of sums, or layers."""
    dtype = jnp.dtype(execution.accumulate)
    is_shard = where.stored == where.weight or execution.reduce == "micro_batch"
    is_shard |= execution.exchanged_in_layer(where)

    def scatter(where: ParamPlacement, cotangent: WeightOrArray) -> jax.Array:
        gradient = gradient_of(cotangent)
        return gradient if is_shard else where.scatter(gradient, dtype)

    if isinstance(cotangent, list):
        layers = [scatter(where.layer, layer) for layer in cotangent]
        if execution.gradients_apart:
            return layers
        gradient = stack_in_place(layers)
    else:
        gradient = scatter(where, cotangent)
    if where.spec.is_stacked and (execution.apart or execution.micro_batches == 1):
        gradient = write_once(gradient)
    return gradient.astype(dtype)


def gradient_of(cotangent: WeightOrArray) -> jax.Array:
    """The gradient, or the sum of gradients, in the cotangent of a parameter."""
    if not is_weight(cotangent):
        return cotangent
    return cotangent.value if cotangent.grad_sum is None else cotangent.grad_sum


def _maxima(cotangent: Weight | list[Weight]) -> jax.Array | None:
    """The maxima [L, 3] in the cotangents of a stack; None without FP8."""
    if not isinstance(cotangent, list):
        return cotangent.scales
    if cotangent[0].scales is None:
        return None
    return jnp.stack([layer.scales for layer in cotangent])
