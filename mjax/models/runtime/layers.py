"""How the layers of a model are held and run; the only file that knows.

A master lies in a stack [L, ...] of all layers of its shape, in fp32. With ZeRO, in every stage, a
device has a shard of it. The weight of a layer goes this way in a step:

1. `load_weights` casts the shard of the stack, rounds it to 8 bits for FP8, takes the stack apart
   into layers (`Execution.apart`) and gathers each (`gather="step"`).
2. `Layers.run` applies the layers. Where `gather="layer"`, a layer gathers its weights first.
3. Autodiff gives a cotangent (`models/base/weight.py`), scattered again by layers that gathered.
4. `add_gradients` adds those of micro-batches, or the matmul has done so. In between
   `scatter_micro_batch` reduce-scatters each where `reduce="micro_batch"`.
5. `store_gradients` reduce-scatters what is not yet in shards, stacks the layers, and sums over the
   devices that hold copies. The optimizer then updates the shard of the master.

`plan/execution.py` decides which run does what. Invariant: how layers are held changes no number
beyond the rounding of gradients and of their sums, only memory and time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.config.languages.pipeline_layout import EMPTY
from mjax.kernels.fp8.quantize import quantize_stack, step_scales, transposed_bits, weight_amax
from mjax.models.base.activation_statistics import nothing_seen, see_activations
from mjax.models.base.barriers import (
    gradients_before_previous_layer,
    reduce_under_previous_layer,
    write_once,
)
from mjax.models.base.branch import LayerCache, Rope
from mjax.models.base.context import Context, Tokens
from mjax.models.base.params import Definition
from mjax.models.base.streams import Activation, join_loads, split_loads
from mjax.models.base.weight import (
    Weight,
    WeightOrArray,
    is_weight,
    values_of,
    with_values,
    without_fp8,
)
from mjax.models.runtime.execution import (
    Execution,
    LayerPlan,
    ScanGroup,
    is_matmul_weight,
    scan_groups,
    stack_rows,
)
from mjax.models.runtime.frozen import WeightParts, join_frozen, map_parameters, split_frozen_layer
from mjax.models.runtime.remat import keeps_all, remat
from mjax.models.runtime.stacks import cut_group, layers_of_stack, rows_of_group, stack_in_place
from mjax.models.runtime.vjp import switch_layers
from mjax.sharding.collectives import reduce_gradients
from mjax.sharding.rules import ParamPlacement, Placement
from mjax.sharding.spec import ParamSpec, is_spec, trained_only

# ---- from masters to weights ---------------------------------------------------------------------


def fp8_scales(
    params: dict,
    history: dict,
    tokens: jax.Array | int,
    placement: Placement,
    execution: Execution,
) -> dict:
    """The scales of a step, {stack: {matmul: [L, 3]}}; empty without FP8.

    `history` holds the maxima of the last steps for delayed scaling.
    """
    if execution.recipe is None:
        return {}
    masters = fp8_leaves(params, placement.specs)
    amax = weight_amax(masters, execution.compute, placement.parallel)
    return step_scales(amax, history, tokens)


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
    themselves: its gradient then stays in the dtype of sums. Where only a part is read, no 8-bit
    form is made: the part is rounded.
    """
    in_layer = execution.exchanged_in_layer(where)
    value = master.astype(execution.compute)
    bits = None
    if scales is not None and execution.quantize_stored and is_matmul_weight(where):
        bits = quantize_stack(value, scales)
    if in_layer and execution.overlap:
        value = master.astype(execution.accumulate)

    def weight(where: ParamPlacement, value, bits, scales) -> Weight:
        if not in_layer:
            value = where.gather(value)
            bits = None if bits is None else where.gather(bits)
        of_matmul = {"name": where.spec.matmul, "inputs": where.spec.inputs}
        recipe = execution.recipe if where.spec.takes_fp8 else None
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


def _row(stack: jax.Array | None, i: int) -> jax.Array | None:
    return None if stack is None else stack[i]


# ---- from cotangents to gradients ----------------------------------------------------------------


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

    Gradients of trained parameters are stacks in the dtype of sums, reduced over all devices; with
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


def fp8_leaves(tree: dict, specs: dict) -> dict[str, dict]:
    """The entries of `tree` that 8-bit matmuls of layers read: {stack: {matmul: entry}}.

    `tree` and `specs` are like the parameters; `specs` declares them.
    """
    matmuls: dict[str, dict] = {}

    def add(spec: ParamSpec, entry) -> None:
        if spec.takes_fp8:
            entries[spec.matmul] = entry

    for stack in sorted(specs):
        entries: dict = {}
        jax.tree.map(add, specs[stack], tree[stack], is_leaf=is_spec)
        if entries:
            matmuls[stack] = entries
    return matmuls


# ---- running -------------------------------------------------------------------------------------


# The caches of a model, one for each layer; None: it has none.
Caches = list[LayerCache | None]


class LayerInputs(NamedTuple):
    """The inputs of all layers besides weights and activations."""

    tokens: Tokens
    rope: Rope


@dataclass(frozen=True)
class Layers:
    """The layers of a model, ready to run.

    `blocks` are the definitions of one layer of each stack. Only layers that gather read
    `placement`. `statistics` names those that are summed over the layers; others are left out.
    """

    blocks: dict[str, Definition]
    execution: Execution
    ctx: Context
    placement: Placement | None = None
    statistics: tuple[str, ...] = ()

    def run(
        self,
        weights: dict,
        x: Activation,
        inputs: LayerInputs,
        *,
        numbers: jax.Array | None = None,
        choices: jax.Array | None = None,
        caches: Caches | None = None,
    ) -> tuple[Activation, dict[str, jax.Array], Caches | None]:
        """x [B, S/tp, D] through all layers; the shares of statistics, fp32; the new caches.

        `weights` are as `load_weights` gives them. Lists of layers may take the place of stacks if
        they run one after the other, and `stack_groups` of such lists in a loop. `numbers`
        int32 [L] are the numbers of the layers in the model (default: 0, 1, ..), `choices` int32
        [L] pick one of the kinds of each. Layers take `caches` if they run one after the other.
        """
        if numbers is None:
            numbers = jnp.arange(len(self.execution.layers), dtype=jnp.int32)
        if choices is None:
            choices = jnp.zeros(len(self.execution.layers), jnp.int32)
        statistics = {name: jnp.float32(0) for name in self.statistics}
        if self.ctx.seen_layers is not None:
            statistics |= nothing_seen(*self.ctx.seen_layers)
        carry = split_loads(x, statistics)
        if self.execution.overlap:
            carry = *carry, jnp.float32(0)
        if not self.execution.loops:
            carry, caches = self._run_list(weights, carry, inputs, numbers, choices, caches)
        else:
            assert caches is None, "layers in a loop have no caches"
            carry = self._run_loop(weights, carry, inputs, numbers, choices)
        return *join_loads(carry[0], carry[1]), caches

    def _run_list(
        self, weights: dict, carry: tuple, inputs, numbers, choices, caches
    ) -> tuple[tuple, Caches | None]:
        """One layer after the other. Equal layers are traced once."""
        functions: dict[LayerPlan, Callable] = {}
        layers = {stack: layers_of_stack(weights[stack]) for stack in self.blocks}
        new_caches = []
        for i, plan in enumerate(self.execution.layers):
            like = replace(plan, row=0)
            if like not in functions:
                functions[like] = jax.jit(self._layer(plan, in_loop=False))
            layer = layers[plan.stack][plan.row]
            cache = None if caches is None else caches[i]
            facts = inputs, numbers[i], choices[i]
            carry, cache = functions[like](carry, layer, *facts, cache)
            new_caches.append(cache)
        return carry, None if caches is None else new_caches

    def _run_loop(self, weights: dict, carry: tuple, inputs, numbers, choices) -> tuple:
        """A scan over each group of equal layers."""
        groups = list(scan_groups(self.execution.layers))
        if isinstance(weights, dict):
            weights = [cut_group(weights, group) for group in groups]
        for group, stacks in zip(groups, weights, strict=True):
            rows = rows_of_group(group.first, group.repeats, len(group.period))
            xs = stacks, rows(numbers), rows(choices)
            unroll = min(self.execution.unroll, group.repeats)
            body = self._scan_body(group, inputs, in_loop=unroll < group.repeats)
            carry, _ = jax.lax.scan(body, carry, xs, unroll=unroll)
        return carry

    def _scan_body(self, group: ScanGroup, inputs: LayerInputs, in_loop: bool) -> Callable:
        """One period of layers, as `jax.lax.scan` calls it."""
        own_rows = stack_rows(group.period)

        def body(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            stacks, numbers, choices = xs
            for i, plan in enumerate(group.period):
                first, count = own_rows[plan.stack]
                row = plan.row - first if count > 1 else None
                layer = self._layer(plan, in_loop, row)
                facts = inputs, numbers[i], choices[i]
                carry, _ = layer(carry, stacks[plan.stack], *facts, None)
            return carry, None

        return body

    def _layer(self, plan: LayerPlan, in_loop: bool, row: int | None = None) -> Callable:
        """f(carry, weights, inputs, number, choice, cache) -> (carry, cache): one layer.

        `row` is the layer's where `weights` are stacks. A layer takes it by itself: of a row that
        a loop takes the backward would keep a copy. A carry is (x, shares of statistics), and with
        `overlap` the token of `reduce_under_previous_layer`.
        """

        ctx = replace(self.ctx, keeps_all=keeps_all(plan.remat))

        def of_kind(kind: str) -> Callable:
            def apply(carry, weights, inputs, number, cache):
                if row is not None:
                    weights = jax.tree.map(lambda w: w[row], weights)
                carry, weights = self._enter(plan, carry, weights)
                x, statistics, *ready = carry
                block = self.blocks[plan.stack].bind(weights)
                options = {"kind": kind, "rope": inputs.rope, "layer": number, "cache": cache}
                output = block(x, inputs.tokens, ctx, **options)
                statistics = _add_found(statistics, output.statistics)
                if self.ctx.seen_layers is not None:
                    seen = see_activations(output.y, kind, number, self.ctx.seen_layers[0])
                    statistics = _add_found(statistics, seen)
                return (output.y, statistics, *ready), output.cache

            return remat(apply, plan.remat, self.execution.offload, in_loop)

        if len(plan.kinds) == 1:
            only = of_kind(plan.kinds[0])
            return lambda carry, weights, inputs, number, choice, cache: only(
                carry, weights, inputs, number, cache
            )
        switch = switch_layers([_chosen(kind, of_kind) for kind in plan.kinds])

        def choose(carry, weights, inputs, number, choice, cache):
            trained, frozen = self._split(plan, weights)
            return switch(choice, carry, trained, (inputs, number, frozen)), cache

        return choose

    def _split(self, plan: LayerPlan, weights: dict) -> WeightParts:
        """The weights of a layer, apart into trained and frozen ones."""
        part = None if self.placement is None else self.placement.part(plan.stack)
        return split_frozen_layer(weights, part)

    def _enter(self, plan: LayerPlan, carry: tuple, weights: dict) -> tuple[tuple, dict]:
        """Make a layer's weights whole, and order its exchanges and gradients among others."""
        execution, (x, statistics, *ready) = self.execution, carry
        if not plan.fp8:
            weights = without_fp8(weights)
        if execution.overlap:
            trained, frozen = self._split(plan, weights)
            x, values, *ready = reduce_under_previous_layer(x, values_of(trained), *ready)
            weights = join_frozen(with_values(trained, values), frozen)
        if execution.gather == "layer":
            weights = self._gather(plan, weights)
        # A loop waits for gradients anyway, and ZeRO-3 reduces them one by one.
        if execution.unroll != 1 and (execution.overlap or execution.gather == "step"):
            trained, frozen = self._split(plan, weights)
            x, values = gradients_before_previous_layer(x, values_of(trained))
            weights = join_frozen(with_values(trained, values), frozen)
        return (x, statistics, *ready), weights

    @jax.named_scope("gather")
    def _gather(self, plan: LayerPlan, weights: dict) -> dict:
        """The weights of a layer from their stored shards.

        Where matmuls read the bits, the value only takes the gradient: its gather is dead code.
        """
        execution = self.execution

        def gather(where: ParamPlacement, w: WeightOrArray) -> WeightOrArray:
            if not execution.exchanged_in_layer(where):
                return w
            where = where.layer
            if not is_weight(w):
                return where.gather(w)
            if execution.overlap:
                value = where.gather_low(w.value, jnp.dtype(execution.compute))
            else:
                value = where.gather(w.value)
            return replace(w, value=value, bits=None if w.bits is None else where.gather(w.bits))

        return self.placement.part(plan.stack).map(gather, weights)


def _add_found(
    statistics: dict[str, jax.Array], found: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """The sums of statistics with those that one layer found; others are left out."""
    return {
        name: total + found[name] if name in found else total for name, total in statistics.items()
    }


def _chosen(kind: str, of_kind: Callable) -> Callable:
    """A layer as `switch_layers` takes it; an empty slot hands on what it gets."""
    if kind == EMPTY:
        return lambda carry, weights, constants: carry
    layer = of_kind(kind)

    def apply(carry: tuple, trained: dict, constants: tuple) -> tuple:
        inputs, number, frozen = constants
        return layer(carry, join_frozen(trained, frozen), inputs, number, None)[0]

    return apply
