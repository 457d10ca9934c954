"""From masters as stored to the weights of a step.

A master lies in a stack [L, ...] of all layers of its shape, in fp32. With ZeRO, in every stage, a
device has a shard of it. A matmul weight of layers goes this way in a step:

1. `load_weights` casts the shard of the stack, and rounds it to 8 bits for FP8. It takes the stack
   apart into layers (`Execution.apart`) and gathers each (`gather="step"`).
2. `Layers.run` (`run.py`) applies the layers. With `gather="layer"`, a layer gathers its weights
   first.
3. Autodiff gives a cotangent (`models/base/weight.py`). A layer that gathered has reduce-scattered
   it.
4. `add_gradients` adds those of micro-batches, or the matmul has done so. In between
   `scatter_micro_batch` (`store.py`) reduce-scatters each where `reduce="micro_batch"`.
5. `store_gradients` reduce-scatters what is not yet in shards, stacks the layers, and sums over the
   devices that hold copies. The optimizer then updates the shard of the master.

`plan/execution.py` decides which run does what. Invariant: how layers are held changes no number
beyond the rounding of gradients and of their sums, only memory and time.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.errors import UserError
from mjax.kernels.fp8.quantize import transposed_bits
from mjax.kernels.fp8.weight_rounding import SIDES_OF_GROUPS, rounded_in_groups
from mjax.models.base.weight import Weight, WeightOrArray
from mjax.models.runtime.execution import Execution, is_matmul_weight
from mjax.sharding.rules import ParamPlacement, Placement
from mjax.sharding.spec import ParamSpec, is_spec


def fp8_scales(
    params: dict,
    history: dict,
    tokens: jax.Array | int,
    placement: Placement,
    execution: Execution,
) -> dict:
    """The scales of a step, {stack: {matmul: [L, 3]}}; empty without FP8.

    `history` is the state of the recipe, if it has one.
    """
    scales: dict[str, dict] = {}
    if execution.recipe is None:
        return scales
    for name, recipe in execution.recipes:
        masters = fp8_leaves(params, placement.specs, name)
        facts = execution.compute, history, tokens, placement.parallel
        for stack, of_stack in recipe.step_scales(masters, *facts).items():
            scales.setdefault(stack, {}).update(of_stack)
    return scales


@jax.named_scope("gather")
def load_weights(params: dict, scales: dict, placement: Placement, execution: Execution) -> dict:
    """Masters as stored -> the weights of a step.

    Matmul weights of layers become `Weight`s: a list of L of them with `execution.apart`, else one
    whose arrays are stacks [L, ...]. All other parameters become arrays, those of layers stacks.
    `scales` are those of FP8, fp32 {stack: {matmul: [L, 3]}}, or empty.
    """

    def load_part(masters: dict, placement: Placement, scales: dict) -> dict:
        def load(where: ParamPlacement, master: jax.Array) -> WeightOrArray | list[Weight]:
            matmul = where.spec.matmul
            if matmul is None:
                return _load_array(where, master, execution)
            return _load_weight(where, master, scales.get(matmul), execution)

        return placement.map(load, masters)

    return {
        name: load_part(masters, placement.part(name), scales.get(name, {}))
        for name, masters in params.items()
    }


def _load_array(where: ParamPlacement, master: jax.Array, execution: Execution) -> jax.Array:
    """A parameter that no matmul reads: tables, norms, biases, routers."""
    value = master.astype(where.spec.dtype(execution.compute))
    return value if execution.exchanged_in_layer(where) else where.gather(value)


def _load_weight(
    where: ParamPlacement, master: jax.Array, scales: jax.Array | None, execution: Execution
) -> Weight | list[Weight]:
    """A stack [L, ...] of matmul weights, or one that is in no stack.

    With `execution.apart` each layer gets arrays of its own. Matmuls read those as they are, where
    XLA would copy slices of a stack. Layers that overlap their exchanges round the value
    themselves: its gradient then stays in the dtype of sums. No 8-bit form is
    made of a weight of which only a part is read: the part is rounded.
    """
    in_layer = execution.exchanged_in_layer(where)
    master = _rounded_in_groups(where.spec, master, execution.weights)
    value = master.astype(where.spec.dtype(execution.compute))
    bits, recipe = None, execution.recipe_for(where.spec)
    rounds = recipe is not None and recipe.stores_weights and execution.quantize_stored
    if scales is not None and rounds and is_matmul_weight(where):
        bits = recipe.store_weights(value, scales)
    if in_layer and execution.overlap and where.spec.is_trained:
        value = master.astype(execution.accumulate)

    def weight(where: ParamPlacement, value, bits, scales) -> Weight:
        if not in_layer:
            value = where.gather(value)
            bits = None if bits is None else where.gather(bits)
        of_matmul = {"name": where.spec.matmul, "inputs": where.spec.inputs}
        return Weight(value, bits, scales=scales, recipe=recipe, **of_matmul)

    if not (execution.apart and where.spec.is_stacked):
        return weight(where, value, bits, scales)
    weights = []
    for i in range(len(value)):
        w = weight(where.layer, value[i], _row(bits, i), _row(scales, i))
        if w.bits is not None and not in_layer:
            turned = transposed_bits(w.bits, w.inputs, where.spec.is_of_experts)
            w = replace(w, transposed=turned)
        weights.append(w)
    return weights


def _rounded_in_groups(spec: ParamSpec, master: jax.Array, scheme: str | None) -> jax.Array:
    """A device's part of a matrix with the numbers that servers have (`precision.weights`).

    Gradients by what is read are those of the master. Raises `UserError` where the part ends within
    a group of inputs.
    """
    if scheme is None or spec.role != "matrix":
        return master
    batch, inputs, outputs = spec.matrix_view()
    sizes = [master.shape[axis] for axis in inputs]
    side, count = SIDES_OF_GROUPS[scheme], math.prod(sizes)
    is_cut_within = any(master.shape[axis] != spec.shape[axis] for axis in inputs[1:])
    if is_cut_within or count % side:
        raise UserError(
            f"precision.weights={scheme} rounds groups of {side} inputs, and a device has {sizes} "
            f"of those of {spec.matmul}; choose wider layers, or a mesh that cuts them elsewhere"
        )
    order = (*batch, *outputs, *inputs)
    matrix = master.astype(jnp.float32).transpose(order)
    numbers = rounded_in_groups(matrix.reshape(-1, count), scheme).reshape(matrix.shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    return numbers.transpose(back).astype(master.dtype)


def _row(stack: jax.Array | None, i: int) -> jax.Array | None:
    return None if stack is None else stack[i]


def fp8_leaves(tree: dict, specs: dict, recipe: str | None = None) -> dict[str, dict]:
    """The entries of `tree` that 8-bit matmuls of layers read: {stack: {matmul: entry}}.

    `tree` and `specs` are like the parameters; `specs` declares them. `recipe`: only entries of
    that name.
    """
    matmuls: dict[str, dict] = {}

    def add(spec: ParamSpec, entry) -> None:
        if spec.takes_fp8 and recipe in (None, spec.recipe):
            entries[spec.matmul] = entry

    for stack in sorted(specs):
        entries: dict = {}
        jax.tree.map(add, specs[stack], tree[stack], is_leaf=is_spec)
        if entries:
            matmuls[stack] = entries
    return matmuls
