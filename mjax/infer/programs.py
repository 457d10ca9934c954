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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.languages.layer_pattern import BRANCHES, branches_of, of_decoder
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.sample import Counts, Drawn, DrawRows, Draws, RowRules, Sampling, draw
from mjax.infer.weights import partitions_apart
from mjax.kernels.attention.paged import PagedRows, places_of_tokens, tokens_of_rows
from mjax.models.attention.caches import KeysValues, Latents
from mjax.models.attention.cross import SourceKeysValues
from mjax.models.attention.paged import PAGE, PagedKeysValues, PagedLatents
from mjax.models.attention.slots import SlotKeysValues, SlotSources
from mjax.models.base.branch import CacheSpec, branch_class
from mjax.models.base.context import Context, Kernels, PagedTokens, tokens_of
from mjax.models.base.params import Definition
from mjax.models.recurrent.recurrent_mixer import RecurrentCache, SlotStates
from mjax.models.runtime.run import Caches
from mjax.sharding.collectives import DATA_AXES, LOCAL, Parallel, mesh_axes
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import on_shards, parallel_of
from mjax.sharding.rules import partition

_SPARE = 0.03  # of memory that caches leave free
CHUNKS = 16  # prompts, or parts of them, in one step of prefill


def record_dtype(width: int) -> np.dtype:
    """A row of a step, 4 bytes a number.

    length: tokens of the row, the new ones included. count: new tokens.
    slot: its place on the device. samples: 1 if it draws a token, 0 if not.
    seed, index: of its noise. Settings of `Sampling`, by name.
    table: its pages in order, [width]; 0 after its own.
    """
    settings = [(f.name, "<i4" if f.name == "top_k" else "<f4") for f in fields(Sampling)]
    numbers = [(name, "<i4") for name in ("length", "count", "slot", "samples", "index")]
    return np.dtype([*numbers, ("seed", "<u4"), *settings, ("table", "<i4", (width,))])


class PoolSizes(NamedTuple):
    """Sizes of one lane: pages, rows at a time, and pages of the longest row.

    eight_bits: whether keys and values are cached in e4m3.
    """

    pages: int
    rows: int
    width: int
    eight_bits: bool = False


class StepState(NamedTuple):
    """What stays on the device from step to step.

    caches: of each layer, in pages or slots.
    last: int32 [rows + 1], the last token of each slot; the slot after all is for no row.
    counts: of each slot's tokens, or None where no row has had penalties.
    """

    caches: Caches
    last: jax.Array
    counts: Counts | None = None


def paged_specs(cfg: ModelConfig, sizes: PoolSizes, tp: int) -> Caches:
    """The caches of all layers as trees of `CacheSpec`, whose first axis is pages or slots.

    Raises `UserError` for a branch whose cache does not lie in pages.
    """
    layers: Caches = []
    for kind in cfg.layer_kinds:
        if cfg.architecture.has_streams and not of_decoder(kind):
            layers.append(None)
            continue
        layer = {}
        for word in branches_of(kind):
            of_layer, module = cfg.of_layer(kind), branch_class(word)
            found = module.cache(of_layer, sizes.pages, PAGE, tp)
            by_slot = of_layer, sizes.rows + 1, sizes.width * PAGE, tp
            match found:
                case SourceKeysValues():
                    found = SlotSources(*module.cache(*by_slot))
                case KeysValues() if cfg.position_embedding == "relative":
                    found = SlotKeysValues(*module.cache(*by_slot))
                case KeysValues():
                    found = PagedKeysValues(*found)
                    found = found.in_8_bits() if sizes.eight_bits else found
                case Latents():
                    found = PagedLatents(*found)
                case RecurrentCache():
                    found = SlotStates(*module.cache(*by_slot))
                case None:
                    pass
                case _:
                    raise UserError(
                        f"model.layer_pattern={cfg.layer_pattern}: the engine does not serve "
                        f"layers with {module.__name__}; run the model on whole texts"
                    )
            layer[BRANCHES[word].name] = found
        layers.append(layer)
    return layers


def fitting_pages(
    programs: "EnginePrograms", params: dict, largest: Sequence[tuple[int | None, int]]
) -> int:
    """The pages of each lane that memory holds beside weights and the largest programs.

    `largest`: tokens (None: a step of decoding) and rows of these programs. On a device that does
    not say its memory, so many that all rows have a quarter of their length.
    """
    sizes, device = programs.sizes, jax.tree.leaves(params)[0].devices().pop()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return 2 + sizes.rows * -(-sizes.width // 4)
    one, two = (programs.resized(sizes._replace(pages=n)).bytes_of_caches() for n in (2, 3))
    if one == two:  # all caches lie in slots
        return 1 + sizes.rows * sizes.width
    free = stats["bytes_limit"] - stats["bytes_in_use"] - one
    scratch = 0
    for tokens, rows in largest:
        memory = programs.lowered(params, tokens, rows).compile().memory_analysis()
        scratch = max(scratch, memory.temp_size_in_bytes + memory.output_size_in_bytes)
    # As much again is for the compiler's trials and for holes between arrays.
    spare = 2 * scratch + _SPARE * stats["bytes_limit"]
    pages = int((free - spare) // (two - one))
    if pages < sizes.width + 2:
        raise UserError(
            f"{free / 1e9:.1f} GB of memory are left for caches and {scratch / 1e9:.1f} GB are "
            "scratch: no text of full length fits; lower its length, or use more devices"
        )
    return pages


@dataclass(frozen=True, eq=False)  # hashed by identity
class EnginePrograms:
    """The jitted functions over what is static, and their compiled forms by size."""

    definition: Definition
    cfg: ModelConfig
    mesh: Mesh | None
    dtype: jnp.dtype
    sizes: PoolSizes

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
        return paged_specs(self.cfg, self.sizes, self.parallel.tp)

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

    def lowered(self, params: dict, tokens: int | None, rows: int) -> jax.stages.Lowered:
        """A greedy step before it is compiled: of prefill of `tokens`, or of decoding."""
        state = jax.eval_shape(self._empty)
        ids = None if tokens is None else np.zeros((self.lanes, tokens), np.int32)
        width = record_dtype(self.sizes.width).itemsize // 4
        records = np.zeros((self.lanes * rows, width), np.int32)
        return self.step.lower(params, state, ids, records, RowRules(), draws=Draws())

    def _empty(self) -> StepState:
        def cache(spec: CacheSpec) -> jax.Array:
            shape = spec.shape[0] * self.lanes, *spec.shape[1:]
            return jnp.zeros(shape, spec.dtype or self.dtype)

        slots = self.lanes * (self.sizes.rows + 1)
        return StepState(jax.tree.map(cache, self.specs), jnp.zeros(slots, jnp.int32))

    def empty(self) -> StepState:
        """The state without rows. What pages hold before they are written is never read."""
        return jax.jit(self._empty, out_shardings=self._shardings(self._states(False)))()

    def empty_counts(self) -> Counts:
        """Counts of no tokens."""
        shape = self.lanes * (self.sizes.rows + 1), self.cfg.vocab_size

        def make() -> Counts:
            return Counts(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))

        return jax.jit(make, out_shardings=self._shardings(Counts(self.rows, self.rows)))()

    @functools.cached_property
    def step(self) -> Callable[..., tuple[StepState, Drawn]]:
        """f(params, state, ids, records, rules, inputs, *, draws), which takes the state.

        ids: int32 [lanes, T] of prefill, or None: each record is of a row with one new token.
        records: int32 [lanes * R, C], as `record_dtype` says.
        inputs: what the model reads beside a prompt (`Decoder.extend`), [lanes, ..] each, or None.
        Returns the state and what was drawn for each record, for the host.
        """
        return jax.jit(self._step, static_argnames="draws", donate_argnames="state")

    @functools.cached_property
    def count(self) -> Callable[..., StepState]:
        """f(state, slot, ids, is_output): the state with the counts of one slot's tokens.

        slot: int32 [], over all lanes. ids: int32 [N], -1: none. is_output: bool [N].
        """

        def counted(state: StepState, slot, ids, is_output) -> StepState:
            where = jnp.where(ids < 0, self.cfg.vocab_size, ids)
            prompt = state.counts.prompt.at[slot].set(False)
            outputs = state.counts.outputs.at[slot].set(0)
            prompt = prompt.at[slot, where].max(~is_output, mode="drop")
            outputs = outputs.at[slot, where].add(is_output.astype(jnp.int32), mode="drop")
            return state._replace(counts=Counts(prompt, outputs))

        return jax.jit(counted, donate_argnames="state")

    def _step(
        self, params, state: StepState, ids, records, rules: RowRules, inputs=None, *, draws: Draws
    ):
        function = functools.partial(self._on_lane, draws)
        given = params, state, ids, records, rules, inputs
        if self.mesh is None:
            return function(*given)
        devices = self.mesh.devices.flat
        if devices[0].platform == "cpu" and len(devices) > 1:
            function = in_program_order(function)
        states = self._states(state.counts is not None)
        weights = partitions_apart(self.definition.specs, self.parallel)
        partitions = weights, states, self.rows, self.rows, self.rows, self.rows
        outputs = states, PartitionSpec()
        return on_shards(function, self.mesh, partitions, outputs)(*given)

    def _on_lane(
        self,
        draws: Draws,
        params: dict,
        state: StepState,
        ids: jax.Array | None,
        records: jax.Array,
        rules: RowRules,
        inputs: Mapping | None,
    ) -> tuple[StepState, Drawn]:
        model = self.definition.bind(params, self.parallel)
        row = unpacked(records, record_dtype(self.sizes.width))
        ids, new, positions = self._tokens(state, ids, row)
        info = tokens_of(ids.shape, positions, jnp.ones_like(ids))
        # Kernels of training have no mask for the keys of a source that lie in slots.
        kernels = Kernels(attention="xla" if self.cfg.architecture.reads_target else "auto")
        ctx = Context(self.parallel, kernels=kernels)
        info = replace(info, new=new)
        x, _, caches = model.extend(ids, info, ctx, state.caches, inputs or {})
        x = x.reshape(-1, x.shape[-1])
        if new.each is None:
            x = x[jnp.maximum(new.rows.starts[1:] - 1, 0)]
        drawn = draw(model.logits(x, self.parallel), self._draw_rows(state, row, rules), draws)
        slot = jnp.where(row["samples"] == 1, row["slot"], self.sizes.rows)
        last, counts = state.last.at[slot].set(drawn.token), state.counts
        if draws.penalties:
            outputs = counts.outputs.at[slot, drawn.token].add(1)
            counts = replace(counts, outputs=outputs)
        state = StepState(caches, last, counts)
        axes = mesh_axes(self.rows)
        return state, jax.tree.map(lambda x: self.parallel.all_gather(x, axes, 0), drawn)

    def _tokens(
        self, state: StepState, ids: jax.Array | None, row: dict[str, jax.Array]
    ) -> tuple[jax.Array, PagedTokens, jax.Array]:
        """The ids of a step, [R, 1] or [1, T], their places in caches, and their positions."""
        count = len(row["count"])
        if ids is None:
            starts = jnp.arange(count + 1, dtype=jnp.int32)
            ids, each, real = state.last[row["slot"]][:, None], 1, None
        else:
            ends = jnp.cumsum(row["count"], dtype=jnp.int32)
            starts, each = jnp.concatenate([jnp.zeros_like(ends[:1]), ends]), None
            real = ends[-1:]
        rows = PagedRows(row["table"], row["length"], starts)
        of_token, position = tokens_of_rows(rows, ids.size)
        pages, places = places_of_tokens(rows, of_token, position, PAGE)
        new = PagedTokens(rows, row["slot"], pages, places, real, each)
        return ids, new, jnp.maximum(position, 0).reshape(ids.shape)

    def _draw_rows(self, state: StepState, row: dict, rules: RowRules) -> DrawRows:
        settings = {f.name: row[f.name] for f in fields(Sampling)}
        counts = state.counts
        if counts is not None:
            counts = jax.tree.map(lambda x: x[row["slot"]], counts)
        return DrawRows(settings, row["seed"], row["index"], row["length"], counts, rules)

    def _states(self, has_counts: bool) -> StepState:
        """The partitions of a state."""

        def of_cache(spec: CacheSpec) -> PartitionSpec:
            return PartitionSpec(*self.rows, *self._tail(spec))

        counts = Counts(self.rows, self.rows) if has_counts else None
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


def unpacked(records: jax.Array, dtype: np.dtype) -> dict[str, jax.Array]:
    """The fields of records int32 [R, C]: [R] each, and [R, width] of a field of several."""
    found = {}
    for name, (kind, offset) in dtype.fields.items():
        base, shape = kind.subdtype or (kind, ())
        begin = offset // 4
        columns = records[:, begin : begin + (shape[0] if shape else 1)]
        values = jax.lax.bitcast_convert_type(columns, base)
        found[name] = values if shape else values[:, 0]
    return found
