"""Running the layers of a model: one after the other, or in scans over stacks of equal ones.

`load.py` has the whole way of a weight, of which this is the middle.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.config.languages.layer_pattern import stream_of
from mjax.models.base.adapter import TokenPlaces
from mjax.models.base.branch import LayerCache, Rope
from mjax.models.base.context import Context, Tokens
from mjax.models.base.params import Definition
from mjax.models.base.streams import Activation, Statistics, add_found, join_loads, split_loads
from mjax.models.runtime.execution import Execution, LayerPlan, ScanGroup, scan_groups, stack_rows
from mjax.models.runtime.remat import keeps_all, remat
from mjax.models.runtime.stacks import cut_group, layers_of_stack, rows_of_group

ADAPTER_SALT = 2**31 - 1  # of the draws of adapters' dropout, beside those of layers (`block.py`)

# The caches of a model, one for each layer; None: it has none.
Caches = list[LayerCache | None]

# The output of the last layer, this device's shares of statistics, new caches.
LayersOutput = tuple[Activation, Statistics, Caches | None]


class LayerInputs(NamedTuple):
    """The inputs of all layers besides weights and activations."""

    tokens: Tokens
    rope: Rope


@register_dataclass
@dataclass(frozen=True)
class LayerCarry:
    """The values that one layer hands on to the next.

    x: the activations. statistics: this device's shares so far, fp32.
    ready: the token of `reduce_under_previous_layer`, fp32 []; None without `Execution.overlap`.
    """

    x: Activation
    statistics: Statistics
    ready: jax.Array | None = None


class LayerCall(NamedTuple):
    """The inputs of one layer besides what the layer before hands on.

    weights: its own, or the stacks that they are rows of. number: its number in the model, int32.
    """

    weights: dict
    inputs: LayerInputs
    number: jax.Array
    cache: LayerCache | None = None


# f(carry, call, choice) -> (carry, cache). `choice` int32 picks one of the kinds of the layer.
LayerFunction = Callable[[LayerCarry, LayerCall, jax.Array], tuple[LayerCarry, LayerCache | None]]


@dataclass(frozen=True)
class Layers:
    """The layers of a model, ready to run.

    `blocks` are the definitions of one layer of each stack. `statistics` names those that are
    summed over the layers; others are left out. Training has `TrainingLayers`.
    """

    blocks: dict[str, Definition]
    execution: Execution
    ctx: Context
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
    ) -> LayersOutput:
        """x [B, S/tp, D] through all layers; the shares of statistics, fp32; the new caches.

        `weights` are as `load_weights` gives them. Lists of layers may take the place of stacks if
        they run one after the other, and `stack_groups` of such lists in a loop. `numbers`
        int32 [L] are the numbers of the layers in the model (default: 0, 1, ..). `choices` int32
        [L] pick one of the kinds of each. Layers take `caches` if they run one after the other.
        """
        if numbers is None:
            numbers = jnp.arange(len(self.execution.layers), dtype=jnp.int32)
        if choices is None:
            choices = jnp.zeros(len(self.execution.layers), jnp.int32)
        statistics = {name: jnp.float32(0) for name in self.statistics}
        ready = jnp.float32(0) if self.execution.overlap else None
        x, statistics = split_loads(x, statistics)
        for look in self.ctx.probe.of_layers:
            statistics |= look.begin(x)
        carry = LayerCarry(x, statistics, ready)
        if not self.execution.loops:
            carry, caches = self._run_list(weights, carry, inputs, numbers, choices, caches)
        else:
            assert caches is None, "layers in a loop have no caches"
            carry = self._run_loop(weights, carry, inputs, numbers, choices)
        return *join_loads(carry.x, carry.statistics), caches

    def _run_list(
        self, weights: dict, carry: LayerCarry, inputs, numbers, choices, caches
    ) -> tuple[LayerCarry, Caches | None]:
        """One layer after the other. Equal layers are traced once."""
        functions: dict[LayerPlan, LayerFunction] = {}
        layers = {stack: layers_of_stack(weights[stack]) for stack in self.blocks}
        new_caches = []
        for i, plan in enumerate(self.execution.layers):
            like = replace(plan, row=0)
            if like not in functions:
                functions[like] = jax.jit(self._layer(plan, in_loop=False))
            cache = None if caches is None else caches[i]
            call = LayerCall(layers[plan.stack][plan.row], inputs, numbers[i], cache)
            carry, cache = functions[like](carry, call, choices[i])
            new_caches.append(cache)
        return carry, None if caches is None else new_caches

    def _run_loop(self, weights: dict, carry: LayerCarry, inputs, numbers, choices) -> LayerCarry:
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

        def body(carry: LayerCarry, xs: tuple) -> tuple[LayerCarry, None]:
            stacks, numbers, choices = xs
            for i, plan in enumerate(group.period):
                first, count = own_rows[plan.stack]
                row = plan.row - first if count > 1 else None
                layer = self._layer(plan, in_loop, row)
                call = LayerCall(stacks[plan.stack], inputs, numbers[i])
                carry, _ = layer(carry, call, choices[i])
            return carry, None

        return body

    def _layer(self, plan: LayerPlan, in_loop: bool, row: int | None = None) -> LayerFunction:
        """One layer, which keeps for its backward what its plan says.

        `row` is the layer's where its weights are stacks.
        """
        layers = []
        for kind in plan.kinds:
            apply = functools.partial(self._apply, plan, kind, row)
            layers.append(remat(apply, plan.remat, self.execution.offload, in_loop))
        if len(layers) > 1:
            return self.one_of(plan, layers)
        return lambda carry, call, choice: layers[0](carry, call)

    def _apply(
        self, plan: LayerPlan, kind: str, row: int | None, carry: LayerCarry, call: LayerCall
    ) -> tuple[LayerCarry, LayerCache | None]:
        """One layer of a kind.

        A layer takes its row of stacks by itself: of a row that a loop takes the backward would
        keep a copy.
        """
        if row is not None:
            call = call._replace(weights=jax.tree.map(lambda w: w[row], call.weights))
        carry, weights = self.enter(plan, kind, carry, call)
        definition, parallel = self.blocks[plan.stack], self.ctx.of(stream_of(kind)).parallel
        places = self._token_places(definition.drops_out, kind, call)
        tokens = call.inputs.tokens.of(stream_of(kind))
        slots = None if tokens is None else tokens.adapters
        blocks = self.ctx.kernels.blocks
        if blocks is not None and call.cache is not None:
            layer = definition, kind, weights
            y, cache = blocks.layer_of_pages(layer, carry.x, tokens, call.cache)
            return replace(carry, x=y), cache
        block = definition.bind(weights, parallel, places, slots)
        output = block(
            carry.x,
            call.inputs.tokens,
            self.ctx.in_training(keeps_all=keeps_all(plan.remat)),
            kind=kind,
            rope=call.inputs.rope,
            layer=call.number,
            cache=call.cache,
        )
        if blocks is not None:
            layer = definition, kind, weights
            output = output._replace(y=blocks.layer_of_documents(layer, output.y, carry.x, tokens))
        statistics = add_found(carry.statistics, output.statistics)
        for look in self.ctx.probe.of_layers:
            statistics = look.after_layer(statistics, output.y, kind, call.number)
        return replace(carry, x=output.y, statistics=statistics), output.cache

    def _token_places(self, drops: bool, kind: str, call: LayerCall) -> TokenPlaces | None:
        """The places of a layer's tokens, which key dropout; None where no adapter `drops` out."""
        tokens = call.inputs.tokens.of(stream_of(kind))
        if not drops or tokens is None or tokens.key is None or not self.ctx.training.dropout:
            return None
        key = jax.random.fold_in(tokens.key, ADAPTER_SALT)
        key = jax.random.fold_in(key, call.number)
        return TokenPlaces(key, tokens.rows, tokens.columns)

    def enter(
        self, plan: LayerPlan, kind: str, carry: LayerCarry, call: LayerCall
    ) -> tuple[LayerCarry, dict]:
        """The input of a layer, and its weights as matmuls read them."""
        return carry, call.weights

    def one_of(self, plan: LayerPlan, layers: list[Callable]) -> LayerFunction:
        """A layer of several kinds, of f(carry, call) of each."""
        raise NotImplementedError("only a pipeline's chunk has layers of several kinds")
