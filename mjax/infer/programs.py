"""The programs of the engine: a step of decoding and a step of prefill, at fixed sizes.

A step of decoding adds one token to each of R rows, whose last tokens wait on the device. A step of
prefill adds chunks of several prompts, [1, T] flat tokens. Both draw a token for rows that end with
their last known one. A row is a record (`record_dtype`) that the host fills; rows without a record
have length 0 and write nowhere. Both run in one `shard_map` with the `Parallel` of training: heads
and vocabulary over tp, experts over ep. Devices of dp and ep are lanes with pages and rows of their
own. Invariant: what a row gives depends on its record and its pages alone.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.schema.model import ModelConfig
from mjax.infer.caches.paged import PAGE
from mjax.infer.caches.slots import SlotStates
from mjax.infer.caches.specs import PoolSizes, paged_specs
from mjax.infer.drafting.multi_token import Guesser, RowEnds
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
from mjax.infer.weights import Form, partitions_apart
from mjax.kernels.attention.paged import PagedRows, places_of_tokens, tokens_of_rows
from mjax.models.base.adapted import has_slots
from mjax.models.base.branch import CacheSpec
from mjax.models.base.context import Context, Kernels, PagedTokens, Tokens, tokens_of
from mjax.models.base.params import Definition
from mjax.models.runtime.run import Caches
from mjax.sharding.collectives import DATA_AXES, LOCAL, Parallel, mesh_axes
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import on_shards, parallel_of
from mjax.sharding.rules import partition

CHUNKS = 16  # prompts, or parts of them, in one step of prefill


def record_dtype(sizes: PoolSizes) -> np.dtype:
    """A row of a step, 4 bytes a number; its lists have the lengths in brackets.

    length: tokens of the row, the new ones included. count: new tokens.
    slot: its place on the device. samples: 1 if it draws a token, 0 if not.
    adapter: the slot of its adapter where the model has several, else 0.
    shift: what positions have above slots, after images that take fewer than their tokens.
    seed, index: of its noise. Settings of `Sampling`, by name.
    following: tokens after the new ones, where it draws none, [depths]; 0: not known.
    table: its pages in order, [width]; 0 after its own.
    """
    settings = [(f.name, "<i4" if f.name == "top_k" else "<f4") for f in fields(Sampling)]
    numbers = [(n, "<i4") for n in "length count slot samples index adapter shift".split()]
    lists = [("following", "<i4", (sizes.depths,)), ("table", "<i4", (sizes.width,))]
    return np.dtype([*numbers, ("seed", "<u4"), *settings, *lists])


class StepTokens(NamedTuple):
    """The tokens of a step that the host knows; without `ids` it is one of decoding.

    ids: int32 [lanes, T], the tokens of prefill.
    labels: int32 [lanes, T], the tokens after them, if their log-probabilities are wanted.
    drafts: int32 [lanes * R, k], guesses of the tokens after each row's last one; -1: none.
    inputs: what the model reads beside a prompt (`Decoder.extend`), [lanes, ..] each, or None.
    """

    ids: np.ndarray | None = None
    labels: np.ndarray | None = None
    drafts: np.ndarray | None = None
    inputs: Mapping | None = None

    @property
    def places(self) -> int:
        """The tokens that are drawn for a row."""
        return 1 if self.drafts is None else 1 + self.drafts.shape[1]


class StepState(NamedTuple):
    """The values that stay on the device from step to step.

    caches: of each layer, in pages or slots.
    last: int32 [rows + 1], the last token of each slot; the slot after all is for no row.
    counts: of each slot's tokens, or None where no row has had penalties.
    """

    caches: Caches
    last: jax.Array
    counts: TokenCounts | None = None


@dataclass(frozen=True, eq=False)  # hashed by identity
class EnginePrograms:
    """The jitted functions over what is static, and their compiled forms by size."""

    definition: Definition
    cfg: ModelConfig
    mesh: Mesh | None
    dtype: jnp.dtype
    sizes: PoolSizes
    form: Form | None = None  # of matmul weights, if they are rounded

    @functools.cached_property
    def parallel(self) -> Parallel:
        """The devices that share work: those of pp and cp hold and compute the same."""
        if self.mesh is None:
            return LOCAL
        return replace(parallel_of(self.mesh), pp=1, cp=1, cuts_sequence=False)

    @property
    def lanes(self) -> int:
        """Groups of devices that have rows of their own."""
        return self.parallel.size(*DATA_AXES)

    @functools.cached_property
    def specs(self) -> Caches:
        """The caches of one lane."""
        return paged_specs(self.cfg, self.sizes, PAGE, self.parallel.tp)

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
        """A greedy step before it is compiled: of prefill of `tokens`, or of decoding.

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
        return self.step.lower(params, state, given, records, RowRules(), draws=Draws())

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
            return jnp.zeros((first * self.lanes, *rest), dtype)

        caches = jax.tree.map(cache, self.specs)
        slots = self.lanes * (self.sizes.rows + 1)
        last = jnp.zeros(slots, jnp.int32)
        return StepState(caches, last)

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
    def step(self) -> Callable[..., tuple[StepState, Drawn, Scored | None, jax.Array | None]]:
        """f(params, state, tokens, records, rules, *, draws), which takes the state.

        tokens: `StepTokens`. records: int32 [lanes * R, C], as `record_dtype` says.
        Returns the state, and for the host what was drawn for each record, with k drafts in its
        1 + k places, how likely each of `labels` is, [lanes * T], and with `PoolSizes.depths`
        guesses of what follows, int32 [lanes * R, k].
        """
        return jax.jit(self._step, static_argnames="draws", donate_argnames="state")

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
            def put(cache: object) -> object:
                if not isinstance(cache, SlotStates):
                    return cache
                return jax.tree.map(lambda x: x.at[target].set(x[source]), cache)

            return jax.tree.map(put, caches, is_leaf=lambda x: isinstance(x, SlotStates))

        states = self._states(False)
        shardings = self._shardings(states.caches)
        return jax.jit(copied, donate_argnums=0, out_shardings=shardings)

    def _counted(
        self,
        state: StepState,
        slot: jax.Array,
        ids: jax.Array,
        is_output: jax.Array,
    ) -> StepState:
        size = self.cfg.vocab_size
        where = jnp.where(ids < 0, size, ids)
        in_prompt = jnp.zeros(size, bool)
        in_prompt = in_prompt.at[where].max(~is_output, mode="drop")
        times = jnp.zeros(size, jnp.int32)
        times = times.at[where].add(is_output, mode="drop")
        counts = state.counts
        counts = TokenCounts(
            counts.prompt.at[slot].set(in_prompt),
            counts.outputs.at[slot].set(times),
        )
        return state._replace(counts=counts)

    def _step(self, params, state: StepState, tokens, records, rules: RowRules, draws: Draws):
        function = functools.partial(self._on_lane, draws)
        inputs = params, state, tokens, records, rules
        if self.mesh is None:
            return function(*inputs)
        devices = self.mesh.devices.flat
        if devices[0].platform == "cpu" and len(devices) > 1:
            function = in_program_order(function)
        states = self._states(state.counts is not None)
        weights = partitions_apart(self.definition.specs, self.parallel, self.form)
        partitions = weights, states, self.rows, self.rows, self.rows
        outputs = states, PartitionSpec(), PartitionSpec(), PartitionSpec()
        return on_shards(function, self.mesh, partitions, outputs)(*inputs)

    def _on_lane(
        self, draws: Draws, params, state: StepState, tokens: StepTokens, records, rules: RowRules
    ) -> tuple[StepState, Drawn, Scored | None, jax.Array | None]:
        model = self.definition.bind(params, self.parallel)
        row = fields_of_records(records, record_dtype(self.sizes))
        ids, info = self._tokens(state, tokens, row)
        new, layers = info.new, len(self.cfg.layer_kinds)
        # Kernels of training have no mask for the keys of a source that lie in slots.
        kernels = Kernels(attention="xla" if self.cfg.architecture.reads_target else "auto")
        ctx = Context(self.parallel, kernels=kernels)
        held, of_depths = state.caches[:layers], state.caches[layers:]
        x, _, caches = model.extend(ids, info, ctx, held, tokens.inputs or {})
        x, scores, guesses = x.reshape(-1, x.shape[-1]), None, None
        if tokens.labels is not None:
            scores = self._scores(model, x, tokens.labels.reshape(-1), draws.top)
        ends = jnp.maximum(new.rows.starts[1:] - 1, 0)
        of_rows = x[ends] if new.each is None else x
        rows = self._draw_rows(state, row, rules, new.each or 1)
        drawn = draw_tokens(model.logits(of_rows, self.parallel), rows, draws)
        last = jnp.arange(len(ends)) * (new.each or 1)  # of what was drawn for each row
        if tokens.drafts is not None:
            each = drawn.token.reshape(-1, new.each)
            last += kept_drafts(tokens.drafts, each)
        token, counts = drawn.token[last], state.counts
        if self.sizes.depths:
            guesser = self._guesser(params, ctx, row, rows, last, draws)
            of_ends = self._row_ends(row, info, ends if new.each is None else last, token)
            step = x, ids, info, of_ends
            guesses, of_depths = guesser.guess(*step, of_depths, self.sizes.drafts)
        slot = jnp.where(row["samples"] == 1, row["slot"], self.sizes.rows)
        if draws.penalties:
            outputs = counts.outputs.at[slot, token].add(1)
            counts = replace(counts, outputs=outputs)
        caches = [*caches, *of_depths]
        state = StepState(caches, state.last.at[slot].set(token), counts)
        axes = mesh_axes(self.rows)
        whole = functools.partial(self.parallel.all_gather, axes=axes, dim=0)
        return state, *jax.tree.map(whole, (drawn, scores, guesses))

    def _scores(self, model: nnx.Module, x: jax.Array, labels: jax.Array, top: int) -> Scored:
        """How likely labels [T] are after x [T, D]."""
        logits = functools.partial(model.logits, parallel=self.parallel)
        return scored_in_parts(x, labels, top, logits, self.cfg.vocab_size)

    @staticmethod
    def _row_ends(row: dict, info: Tokens, last: jax.Array, token: jax.Array) -> RowEnds:
        """The ends of rows, whose last tokens lie at flat places, and what was drawn there."""
        position = info.positions.reshape(-1)[last]
        is_row, draws = row["count"] > 0, row["samples"] == 1
        return RowEnds(last, position, is_row, draws, token, row["following"])

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
            count = len(position)
            starts = jnp.arange(count + 1, dtype=jnp.int32)
            paged = PagedRows(row["table"], position + 1, starts)
            return self._facts(row, paged, (count, 1), None, 1)

        return Guesser(bind, ctx, draw, at)

    def _tokens(
        self, state: StepState, tokens: StepTokens, row: dict[str, jax.Array]
    ) -> tuple[jax.Array, Tokens]:
        """The ids of a step, [R, each] or [1, T], and facts about them.

        Each row has all places for drafts; places beyond its pages are in the null page.
        """
        count, lengths = len(row["count"]), row["length"]
        if tokens.ids is None:
            ids, real = state.last[row["slot"]][:, None], None
            if tokens.drafts is not None:
                ids = jnp.concatenate([ids, jnp.maximum(tokens.drafts, 0)], 1)
            each = ids.shape[1]
            starts = each * jnp.arange(count + 1, dtype=jnp.int32)
            lengths = jnp.where(lengths > 0, lengths + each - 1, 0)
        else:
            ids, each = tokens.ids, None
            ends = jnp.cumsum(row["count"], dtype=jnp.int32)
            starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
            real = ends[-1:]
        rows = PagedRows(row["table"], lengths, starts)
        return ids, self._facts(row, rows, ids.shape, real, each)

    def _facts(
        self,
        row: dict[str, jax.Array],
        rows: PagedRows,
        shape: tuple[int, int],
        real: jax.Array | None,
        each: int | None,
    ) -> Tokens:
        """Facts about tokens of `rows`, as in `PagedTokens`."""
        of_token, position = tokens_of_rows(rows, math.prod(shape))
        pages, places = places_of_tokens(rows, of_token, position, PAGE)
        new = PagedTokens(rows, row["slot"], pages, places, real, each)
        positions = jnp.maximum(position, 0) + row["shift"][of_token]
        positions = jnp.maximum(positions, 0).reshape(shape)
        info = replace(tokens_of(shape, positions, jnp.ones(shape, jnp.int32)), new=new)
        if has_slots(self.definition.specs):
            info = replace(info, adapters=row["adapter"][of_token].reshape(shape))
        return info

    def _draw_rows(self, state: StepState, row: dict, rules: RowRules, each: int) -> DrawRows:
        """The rows of `draw_tokens`, of each record `each` one after the other.

        Parts of `rules` may have so many rows already.
        """
        settings = {f.name: row[f.name] for f in fields(Sampling)}
        counts = state.counts
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

        def of_cache(spec: CacheSpec) -> PartitionSpec:
            return PartitionSpec(*self.rows, *self._tail(spec))

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


def fields_of_records(records: jax.Array, dtype: np.dtype) -> dict[str, jax.Array]:
    """The fields of records int32 [R, C]: [R] each, and [R, width] of a field of several."""
    found = {}
    for name, (kind, offset) in dtype.fields.items():
        base, shape = kind.subdtype or (kind, ())
        begin = offset // 4
        columns = records[:, begin : begin + (shape[0] if shape else 1)]
        values = jax.lax.bitcast_convert_type(columns, base)
        found[name] = values if shape else values[:, 0]
    return found
