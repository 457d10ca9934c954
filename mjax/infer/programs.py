"""The programs of the engine: a step of decoding and a step of prefill, at fixed sizes.

A step of decoding adds one token to each of R rows, whose last tokens wait on the device. A step of
prefill adds chunks of several prompts, [1, T] flat tokens. Both are two programs: `forward` runs
the layers, and `draw` makes tokens of logits for rows that end with their last known token. So the
host may look at earlier tokens meanwhile, and all kinds of draws share the large program.

A row is a record (`record_dtype`) that the host fills; rows without a record have length 0 and
write nowhere. Programs run in one `shard_map` with the `Parallel` of training: heads and vocabulary
over tp, experts over ep. Devices of dp and ep are lanes with pages and rows of their own.
Invariant: what a row gives depends on its record and its pages.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.rules.reinforce_rules import lacks_blocks
from mjax.config.schema.model import ModelConfig
from mjax.infer.caches.paged import PAGE
from mjax.infer.caches.rows import decoded_tokens, each_a_row, last_places, prefilled_tokens
from mjax.infer.caches.slots import with_states_copied
from mjax.infer.caches.specs import PoolSizes, paged_specs
from mjax.infer.drafting.multi_token import Guesser, RowEnds, StepActivations
from mjax.infer.records import StepTokens, fields_of_records, record_dtype
from mjax.infer.sample import (
    Drawn,
    DrawRows,
    Draws,
    RowRules,
    Sampling,
    Scored,
    TokenCounts,
    draw_tokens,
    kept_drafts,
    scored_in_parts,
)
from mjax.infer.stages.layers_in_stages import Stages, kinds_of_slots
from mjax.infer.stages.weights_in_stages import own_layers
from mjax.infer.weights import Form, partitions_apart
from mjax.kernels.attention.paged import tokens_of_rows
from mjax.models.base.adapted import has_slots
from mjax.models.base.branch import CacheSpec
from mjax.models.base.context import Context, Kernels, Tokens
from mjax.models.base.params import Definition
from mjax.models.runtime.run import Caches
from mjax.models.runtime.token_blocks import TokenBlocks, each_in_blocks
from mjax.pipeline.layout import Layout
from mjax.sharding.collectives import DATA_AXES, LOCAL, Parallel, mesh_axes
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import on_shards, parallel_of
from mjax.sharding.rules import partition

TOP = 20  # likeliest tokens that a program gives if any are asked for
CHUNKS = 16  # prompts, or parts of them, in one step of prefill


class StepState(NamedTuple):
    """The values that stay on the device from step to step.

    caches: of each layer, in pages or slots.
    last: int32 [rows + 1], the last token of each slot; the slot after all is for no row.
    counts: of each slot's tokens, or None where no row has had penalties.
    """

    caches: Caches
    last: jax.Array
    counts: TokenCounts | None = None


class LayerOutputs(NamedTuple):
    """Results of the layers for a step.

    logits: fp32 [lanes * R * each, V], of the places where rows draw tokens.
    scores: how likely each of `StepTokens.labels` is, [lanes * T], for the host; or None.
    activations: guesses are made of them; None without `PoolSizes.depths`.
    """

    logits: jax.Array
    scores: Scored | None = None
    activations: StepActivations | None = None


@dataclass(frozen=True, eq=False)  # hashed by identity
class EnginePrograms:
    """The jitted functions over what is static, and their compiled forms by size."""

    definition: Definition
    cfg: ModelConfig
    mesh: Mesh | None
    dtype: jnp.dtype
    sizes: PoolSizes
    form: Form | None = None  # of matmul weights, if they are rounded
    layout: Layout | None = None  # of layers in stages, if they are
    batch_invariant: bool = False  # an option of the engine

    @functools.cached_property
    def invariant(self) -> bool:
        """Whether layers are computed in blocks of tokens (`models/runtime/token_blocks.py`)."""
        differs = self.form or self.layout or self.sizes.eight_bits or self.parallel.tp > 1
        return self.batch_invariant and not differs and lacks_blocks(self.cfg) is None

    @functools.cached_property
    def parallel(self) -> Parallel:
        """The devices that share work: those of cp hold and compute the same."""
        if self.mesh is None:
            return LOCAL
        return replace(parallel_of(self.mesh), cp=1, cuts_sequence=False)

    @property
    def lanes(self) -> int:
        """Groups of devices that have rows of their own."""
        return self.parallel.size(*DATA_AXES)

    @functools.cached_property
    def specs(self) -> Caches:
        """The caches of one lane on a stage."""
        return paged_specs(self.cfg, self.sizes, PAGE, self.parallel.tp, self.kinds)

    @functools.cached_property
    def kinds(self) -> Sequence[str]:
        """The kinds of the layers that a device runs one after the other."""
        return self.cfg.layer_kinds if self.layout is None else kinds_of_slots(self.layout)

    @functools.cached_property
    def rows(self) -> PartitionSpec:
        """The partition of arrays whose first axis has the rows, or pages, of all lanes."""
        return partition(("batch",), self.parallel)

    def resized(self, sizes: PoolSizes) -> "EnginePrograms":
        """The programs for other sizes."""
        return replace(self, sizes=sizes)

    def bytes_of_caches(self) -> int:
        """Bytes of the caches of a lane on one of its devices."""
        total = 0
        for spec in jax.tree.leaves(self.specs):
            cuts = [self.parallel.size(*mesh_axes((a,))) for a in self._tail(spec)]
            count = math.prod(spec.shape) // math.prod(cuts)
            total += count * jnp.dtype(spec.dtype or self.dtype).itemsize
        return total

    def lowered(
        self, params: dict, tokens: int | None, rows: int, inputs: dict | None = None
    ) -> jax.stages.Lowered:
        """The layers of a step before they are compiled: of prefill of `tokens`, or of decoding.

        `inputs`: shapes of what is read beside a whole prompt, [1, ..] each.
        """
        state, rows_here = self.abstract_state(False), self.lanes * rows
        if tokens is not None:
            of_lanes = jax.tree.map(lambda x: x.update(shape=(self.lanes, *x.shape[1:])), inputs)
            given = StepTokens(np.zeros((self.lanes, tokens), np.int32), inputs=of_lanes)
        elif self.sizes.drafts:
            given = StepTokens(drafts=np.zeros((rows_here, self.sizes.drafts), np.int32))
        else:
            given = StepTokens()
        width = record_dtype(self.sizes).itemsize // 4
        records = np.zeros((rows_here, width), np.int32)
        caches = self.of_layers(state.caches)
        return self.forward.lower(params, caches, state.last, given, records)

    def of_layers(self, caches: Caches) -> Caches:
        """The caches of layers, which lie before `of_depths`."""
        return caches[: len(self.kinds)]

    def of_depths(self, caches: Caches) -> Caches:
        """The caches of the depths of multi-token prediction (`PoolSizes.depths`)."""
        return caches[len(self.kinds) :]

    def abstract_rows(self, *shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        """The shape and sharding of an array whose first axis has the rows of all lanes."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._shardings(self.rows))

    def abstract_outputs(self, given: StepTokens, records: np.ndarray) -> LayerOutputs:
        """The outputs of a step as shapes with their shardings, without scores."""
        of = self.abstract_rows
        logits = of(len(records) * given.places, self.cfg.vocab_size, dtype="float32")
        if not self.sizes.depths:
            return LayerOutputs(logits)
        shape = (len(records), given.places) if given.ids is None else given.ids.shape
        x = of(math.prod(shape), self.cfg.hidden_size, dtype=self.dtype)
        return LayerOutputs(logits, None, StepActivations(x, of(*shape)))

    def abstract_state(self, has_counts: bool) -> StepState:
        """The state without rows, as shapes with their shardings."""
        shapes, shardings = jax.eval_shape(self._empty), self._shardings(self._states(has_counts))
        if has_counts:
            shapes = shapes._replace(counts=jax.eval_shape(self._no_counts))
        if shardings is None:
            return shapes

        def placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        return jax.tree.map(placed, shapes, shardings)

    def _empty(self) -> StepState:
        def cache(spec: CacheSpec) -> jax.Array:
            first, *rest = spec.shape
            dtype = spec.dtype or self.dtype
            return jnp.zeros((first * self.lanes * self.parallel.pp, *rest), dtype)

        caches = jax.tree.map(cache, self.specs)
        return StepState(caches, jnp.zeros(self.lanes * (self.sizes.rows + 1), jnp.int32))

    def empty(self) -> StepState:
        """The state without rows; pages are never read before they are written."""
        return jax.jit(self._empty, out_shardings=self._shardings(self._states(False)))()

    def empty_counts(self) -> TokenCounts:
        """Counts of no tokens."""
        shardings = self._shardings(TokenCounts(self.rows, self.rows))
        return jax.jit(self._no_counts, out_shardings=shardings)()

    def _no_counts(self) -> TokenCounts:
        shape = self.lanes * (self.sizes.rows + 1), self.cfg.vocab_size
        return TokenCounts(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))

    @functools.cached_property
    def forward(self) -> Callable[..., tuple[Caches, LayerOutputs]]:
        """f(params, caches, last, tokens, records), which takes the caches of layers.

        tokens: `StepTokens`. records: int32 [lanes * R, C], as `record_dtype` says.
        """
        return jax.jit(self._forward, donate_argnums=1)

    @functools.cached_property
    def draw(self) -> Callable[..., tuple[StepState, Drawn, jax.Array]]:
        """f(state, logits, drafts, records, rules, *, draws), which takes the state.

        state: without caches. Returns it, what was drawn for each record, with k drafts in its
        1 + k places, and the place of the one that is last now, int32 [lanes * R], in its lane.
        """
        return jax.jit(self._draw, static_argnames="draws", donate_argnums=0)

    @functools.cached_property
    def guess(self) -> Callable[..., tuple[Caches, jax.Array]]:
        """f(params, caches, last, activations, places, records, rules, *, draws, each).

        It takes the caches of depths. activations, places: of `forward` and `draw`. each: the
        tokens of a row of decoding; None: of prefill. Gives guesses int32 [lanes * R, k].
        """
        return jax.jit(self._guess, static_argnames=("draws", "each"), donate_argnums=1)

    @functools.cached_property
    def count(self) -> Callable[..., StepState]:
        """f(state, slot, ids, is_output): the state with the counts of one slot's tokens.

        slot: int32 [], over all lanes. ids: int32 [N], -1: none. is_output: bool [N].
        """
        return jax.jit(self._counted, donate_argnames="state")

    @functools.cached_property
    def copy_states(self) -> Callable[..., Caches]:
        """f(caches, source, target): the caches with a slot's states also in another slot.

        source, target: int32 [], over all lanes.
        """

        def copied(caches: Caches, source: jax.Array, target: jax.Array) -> Caches:
            return with_states_copied(caches, source, target, self.parallel.index(DATA_AXES))

        states, one = self._states(False).caches, PartitionSpec()
        return jax.jit(self._on_lanes(copied, (states, one, one), states), donate_argnums=0)

    def _counted(
        self,
        state: StepState,
        slot: jax.Array,
        ids: jax.Array,
        is_output: jax.Array,
    ) -> StepState:
        size = self.cfg.vocab_size
        where = jnp.where(ids < 0, size, ids)
        in_prompt = jnp.zeros(size, bool).at[where].max(~is_output, mode="drop")
        times = jnp.zeros(size, jnp.int32).at[where].add(is_output, mode="drop")
        counts = state.counts
        counts = TokenCounts(
            counts.prompt.at[slot].set(in_prompt),
            counts.outputs.at[slot].set(times),
        )
        return state._replace(counts=counts)

    def _forward(self, params, caches: Caches, last, tokens: StepTokens, records):
        held = self._states(False)
        weights = partitions_apart(self.definition.specs, self.parallel, self.form, self.layout)
        own = self.of_layers(held.caches)
        partitions = weights, own, held.last, self.rows, self.rows
        results = own, LayerOutputs(self.rows, PartitionSpec(), self.rows)
        return self._on_lanes(self._forward_on_lane, partitions, results)(
            params, caches, last, tokens, records
        )

    def _draw(self, state: StepState, logits, drafts, records, rules: RowRules, draws: Draws):
        has_counts = state.counts is not None
        held = self._states(has_counts)._replace(caches=[])
        partitions = held, *[self.rows] * 4
        results = held, PartitionSpec(), self.rows
        function = functools.partial(self._draw_on_lane, draws)
        on_lanes = self._on_lanes(function, partitions, results)
        return on_lanes(state, logits, drafts, records, rules)

    def _guess(
        self, params, caches: Caches, last, activations, places, records, rules, draws, each
    ):
        held = self._states(False)
        weights = partitions_apart(self.definition.specs, self.parallel, self.form, self.layout)
        own = self.of_depths(held.caches)
        function = functools.partial(self._guess_on_lane, draws, each)
        partitions = weights, own, held.last, self.rows, self.rows, self.rows, self.rows
        results = own, PartitionSpec()
        return self._on_lanes(function, partitions, results)(
            params, caches, last, activations, places, records, rules
        )

    def _on_lanes(self, function: Callable, partitions: tuple, results: tuple) -> Callable:
        """A function of one lane's arrays, on all of them."""
        if self.mesh is None:
            return function
        devices = self.mesh.devices.flat
        if devices[0].platform == "cpu" and len(devices) > 1:
            function = in_program_order(function)
        return on_shards(function, self.mesh, partitions, results)

    def _for_host(self, found):
        """Arrays of all lanes, on each device."""
        whole = functools.partial(self.parallel.all_gather, axes=mesh_axes(self.rows), dim=0)
        return jax.tree.map(whole, found)

    def _forward_on_lane(
        self, params, caches: Caches, last: jax.Array, tokens: StepTokens, records: jax.Array
    ) -> tuple[Caches, LayerOutputs]:
        model = self.definition.bind(own_layers(params, self.layout), self.parallel)
        row = fields_of_records(records, record_dtype(self.sizes))
        ids = self._ids(last, tokens, row)
        info = self._info(row, ids.shape, None if tokens.ids is not None else ids.shape[1])
        ctx, new, scores = self._context(), info.new, None
        info = each_a_row(info) if self.invariant else info
        shaped = ids.reshape(info.positions.shape)
        x, _, caches = model.extend(shaped, info, ctx, caches, tokens.inputs or {})
        x = x.reshape(-1, x.shape[-1])
        size = self.cfg.vocab_size
        logits = functools.partial(model.logits, parallel=self.parallel)
        if tokens.labels is not None:
            labels = tokens.labels.reshape(-1)
            scores = self._for_host(scored_in_parts(x, labels, min(TOP, size), logits, size))
        of_rows = x if new.each is not None else x[last_places(new)]
        logits = each_in_blocks(logits, of_rows) if self.invariant else logits(of_rows)
        activations = StepActivations(x, ids) if self.sizes.depths else None
        return caches, LayerOutputs(logits, scores, activations)

    def _context(self) -> Context:
        # Kernels of training have no mask for the keys of a source that lie in slots.
        attention = "xla" if self.cfg.architecture.reads_target else "auto"
        kernels = Kernels(attention, blocks=TokenBlocks() if self.invariant else None)
        stages = None if self.layout is None else Stages(self.layout, self.sizes.rows).run
        return Context(self.parallel, kernels=kernels, run_layers=stages)

    def _draw_on_lane(
        self, draws: Draws, state: StepState, logits, drafts, records, rules: RowRules
    ) -> tuple[StepState, Drawn, jax.Array]:
        row = fields_of_records(records, record_dtype(self.sizes))
        each = StepTokens(drafts=drafts).places
        drawn = draw_tokens(logits, self._draw_rows(state.counts, row, rules, each), draws)
        places = jnp.arange(len(row["slot"])) * each
        if drafts is not None:
            places += kept_drafts(drafts, drawn.token.reshape(-1, each))
        token, counts = drawn.token[places], state.counts
        slot = jnp.where(row["samples"] == 1, row["slot"], self.sizes.rows)
        if draws.penalties:
            outputs = counts.outputs.at[slot, token].add(1)
            counts = replace(counts, outputs=outputs)
        state = StepState([], state.last.at[slot].set(token), counts)
        return state, self._for_host(drawn), places

    def _guess_on_lane(
        self,
        draws: Draws,
        each: int | None,
        params: dict,
        caches: Caches,
        last: jax.Array,
        activations: StepActivations,
        places: jax.Array,
        records: jax.Array,
        rules: RowRules,
    ) -> tuple[Caches, jax.Array]:
        row = fields_of_records(records, record_dtype(self.sizes))
        x, ids = activations
        info = self._info(row, ids.shape, each)
        rows = self._draw_rows(None, row, rules, each or 1)
        guesser = self._guesser(params, self._context(), row, rows, places, draws)
        flat = places if each else last_places(info.new)
        position, token = info.positions.reshape(-1)[flat], last[row["slot"]]
        is_row, samples = row["count"] > 0, row["samples"] == 1
        ends = RowEnds(flat, position, is_row, samples, token, row["following"])
        guesses, caches = guesser.guess(x, ids, info, ends, caches, self.sizes.drafts)
        return caches, self._for_host(guesses)

    def _guesser(
        self,
        params: dict,
        ctx: Context,
        row: dict[str, jax.Array],
        rows: DrawRows,
        places: jax.Array,
        draws: Draws,
    ) -> Guesser:
        """Guesses tokens for the rows of a step, each after what was drawn at one of `places`.

        A mask of allowed tokens is of one place, so guesses are without; the host knows more.
        """
        rows = replace(rows, counts=None, rules=replace(rows.rules, allowed=None))
        rows = jax.tree.map(lambda x: x[places], rows)
        draws = replace(draws, penalties=False, top=0)

        def bind(info: Tokens) -> nnx.Module:
            return self.definition.bind(params, self.parallel, slots=info.adapters)

        def draw(x: jax.Array, number: int) -> jax.Array:
            model = self.definition.bind(params, self.parallel)
            logits = model.logits(x, self.parallel)
            own = replace(rows, position=rows.position + number)
            return draw_tokens(logits, own, draws).token

        def at(position: jax.Array) -> Tokens:
            one = row | {"length": position + 1}
            return self._with_adapters(decoded_tokens(one, 1, PAGE), row)

        return Guesser(bind, ctx, draw, at)

    def _ids(self, last: jax.Array, tokens: StepTokens, row: dict[str, jax.Array]) -> jax.Array:
        """The ids of a step, [R, each] or [1, T]."""
        if tokens.ids is not None:
            return tokens.ids
        ids = last[row["slot"]][:, None]
        if tokens.drafts is None:
            return ids
        return jnp.concatenate([ids, jnp.maximum(tokens.drafts, 0)], 1)

    def _info(self, row: dict[str, jax.Array], shape: tuple[int, int], each: int | None) -> Tokens:
        """Facts about the tokens of a step of decoding, `each` of a row; None: of prefill."""
        if each is None:
            return self._with_adapters(prefilled_tokens(row, shape, PAGE), row)
        return self._with_adapters(decoded_tokens(row, each, PAGE), row)

    def _with_adapters(self, found: Tokens, row: dict[str, jax.Array]) -> Tokens:
        """Facts with the adapters of tokens where the model has several."""
        if not has_slots(self.definition.specs):
            return found
        of_token, _ = tokens_of_rows(found.new.rows, found.positions.size)
        return replace(found, adapters=row["adapter"][of_token].reshape(found.positions.shape))

    def _draw_rows(
        self, counts: TokenCounts | None, row: dict, rules: RowRules, each: int
    ) -> DrawRows:
        """The rows of `draw_tokens`, of each record `each` one after the other.

        Parts of `rules` may have so many rows already.
        """
        settings = {f.name: row[f.name] for f in fields(Sampling)}
        if counts is not None:
            counts = jax.tree.map(lambda x: x[row["slot"]], counts)
        rows = DrawRows(settings, row["seed"], row["index"], row["length"], counts, rules)
        if each == 1:
            return rows
        count = each * len(row["count"])
        rows = jax.tree.map(lambda x: jnp.repeat(x, count // len(x), 0), rows)
        after = jnp.arange(len(rows.position), dtype=jnp.int32) % each
        return replace(rows, position=rows.position + after)

    def _states(self, has_counts: bool) -> StepState:
        """The partitions of a state."""
        stages = self.parallel.live("pp", *DATA_AXES)

        def of_cache(spec: CacheSpec) -> PartitionSpec:
            return PartitionSpec(stages or None, *self._tail(spec))

        counts = TokenCounts(self.rows, self.rows) if has_counts else None
        return StepState(jax.tree.map(of_cache, self.specs), self.rows, counts)

    def _tail(self, spec: CacheSpec) -> PartitionSpec:
        """The partition of a cache's axes after pages or slots."""
        return partition(spec.axes[1:], self.parallel)

    def _shardings(self, partitions) -> object:
        """The shardings of partitions; None on a single device."""
        if self.mesh is None:
            return None
        of_mesh = functools.partial(NamedSharding, self.mesh)
        return jax.tree.map(of_mesh, partitions, is_leaf=lambda p: isinstance(p, PartitionSpec))
