"""The pipeline's three scans, inside the train step's one manual region.

Every device runs the same program: in each tick (`schedule.py`) it applies one chunk forward and
one backward and hands the results to its neighbours. The forward is an explicit `jax.vjp` whose
residuals wait in a ring buffer until the backward; residuals that are the chunk's weights or facts
of its micro-batch are not kept but put back. So memory does not grow with the number of
micro-batches. The first stage embeds, the last makes the loss and its cotangent, both under
`lax.cond`, so that no other stage waits for them; a predicate depends on the pp index and the tick
alone, hence collectives over the other axes may stand in its branches. Embedding, final norm and
head are replicated over pp: the gradient rule sums their parts, tied or not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.config.pattern import STACK_OF, runs, stretches
from mjax.config.pipeline_layout import EMPTY
from mjax.config.remat import remat_policies
from mjax.models.decoder import Decoder, rows_of, scan_body
from mjax.models.params import split
from mjax.models.remat import all_but_views
from mjax.models.remat import remat as rematerialised
from mjax.pipeline.layout import Layout
from mjax.pipeline.schedule import Schedule, make_schedule
from mjax.pipeline.stash import Plan, one_of, put_together, take_apart

if TYPE_CHECKING:
    from mjax.train.step import Batch, Program


class Part(NamedTuple):
    """Slots of a chunk that one scan applies: `repeats` times the blocks `kinds`, which keep what
    `remat` says.

    With `varies` they are of different kinds, or unused, in different chunks: `kinds` then lists
    the choices, and a slot's code picks one.
    """

    first: int
    kinds: tuple[str, ...]
    repeats: int
    varies: bool
    remat: str


def parts_of(layout: Layout, remat: str) -> tuple[Part, ...]:
    """The scans of a chunk, whose slots train.remat counts as it does layers elsewhere. Slots of
    one kind everywhere are grouped as in an unpiped model."""
    slots, choices = layout.slot_kinds(), (EMPTY, *sorted(set(layout.kinds)))
    kept = remat_policies(remat, len(slots), "layers in a pipeline stage")
    ways = tuple((len(kinds) > 1, policy) for kinds, policy in zip(slots, kept, strict=True))
    parts: list[Part] = []
    for at, end in stretches(ways):
        varies, policy = ways[at]
        if varies:
            parts.append(Part(at, choices, end - at, True, policy))
        else:
            same = runs(tuple(kind for (kind,) in slots[at:end]), at)
            parts += [Part(run.first, run.kinds, run.repeats, False, policy) for run in same]
    return tuple(parts)


@dataclass(frozen=True)
class Chunks:
    """What a device needs to apply any of its chunks to any micro-batch."""

    program: "Program"
    layout: Layout
    weights: dict  # local; stacks are [v * slots, ...]
    scales: dict  # of FP8, {stack: {name: [v * slots, 3]}}
    rounded: dict  # weights of FP8, likewise
    micro_batches: "Batch"
    key: jax.Array | None
    train: bool

    @property
    def stacks(self) -> tuple[str, ...]:
        return self.layout.stacks

    @property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.layout, self.program.context(self.train).remat)

    @property
    def outer(self) -> dict:
        """Weights outside the stacks: embedding, final norm, head."""
        return {k: w for k, w in self.weights.items() if k not in self.stacks}

    def model(self, outer: dict) -> Decoder:
        return self.program.definition.bind({**self.weights, **outer})

    @property
    def inner(self) -> dict:
        """The stacks and their FP8 scales, [v * slots, ...]."""
        return {name: (self.weights[name], self.scales.get(name, {})) for name in self.stacks}

    def of_chunk(self, chunk: jax.Array) -> tuple[dict, dict]:
        """`inner` and the rounded weights of a chunk, [slots, ...] as a list of its slots: each is
        then an array of its own, where of a stack XLA would copy the matmuls' operands."""
        rounded = {name: self.rounded.get(name, {}) for name in self.stacks}
        at = lambda w, i: lax.dynamic_index_in_dim(w, i, 0, keepdims=False)  # noqa: E731
        slots = lambda w: [at(w, i) for i in self.places(w, chunk)]  # noqa: E731
        return jax.tree.map(slots, (self.inner, rounded))

    def places(self, stack: jax.Array, chunk: jax.Array) -> list[jax.Array | int]:
        """The rows of a stack that are a chunk's."""
        slots = len(stack) // self.layout.v
        first = 0 if self.layout.v == 1 else chunk * slots
        return [first + i for i in range(slots)]

    def micro(self, i: jax.Array) -> "Batch":
        return {k: _at(a, i) for k, a in self.micro_batches.items()}

    def facts(self, micro: "Batch", chunk: jax.Array) -> dict:
        """What a chunk's blocks read besides weights and activations; made again for a backward."""
        layers = self.layout.table()
        codes = np.asarray([EMPTY, *sorted(set(self.layout.kinds))])
        kinds = np.asarray([*self.layout.kinds, EMPTY])[layers]  # -1 is the last: EMPTY
        here = lambda table: jnp.asarray(table, jnp.int32)[lax.axis_index("pp"), chunk]  # noqa: E731
        info = self.program.tokens(micro, self.key)
        return {
            "info": info,
            "rope": self.model(self.outer).rope(info, self.program.context(self.train)),
            "layers": here(np.maximum(layers, 0)),
            "codes": here(np.searchsorted(codes, kinds)),
        }

    def cut(self, weights: dict) -> list[dict]:
        """A chunk's stacks [slots, ...] -> rows for the scan of each part."""
        out, seen = [], dict.fromkeys(self.stacks, 0)
        for part in self.parts:
            kinds = part.kinds[1:2] if part.varies else part.kinds  # a choice is of one stack
            rows = {}
            for name in sorted({STACK_OF[kind] for kind in kinds}):
                own = sum(STACK_OF[kind] == name for kind in kinds)
                take = rows_of(seen[name], part.repeats, own)
                rows[name] = jax.tree.map(take, weights[name])
                seen[name] += part.repeats * own
            out.append(rows)
        return out

    def joined(self, rows: list[dict]) -> dict:
        """The inverse of `cut`."""
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
        of = {name: [r[name] for r in rows if name in r] for name in self.stacks}
        join = lambda *parts: jnp.concatenate([flat(a) for a in parts])  # noqa: E731
        return {name: jax.tree.map(join, *parts) for name, parts in of.items()}

    def apply(self, rows: list[dict], facts: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, S/tp, D] through one chunk; also this device's share of its auxiliary losses."""
        ctx = self.program.context(self.train)
        model = self.model(self.outer)
        definitions = {name: split(getattr(model, name))[0] for name in self.stacks}
        shared = definitions, facts["rope"], facts["info"], ctx
        carry = x, jnp.float32(0)
        for part, own, bits in zip(self.parts, rows, facts["rounded"], strict=True):
            own = {name: (*pair, bits[name], {}) for name, pair in own.items()}
            period = 1 if part.varies else len(part.kinds)
            cut = rows_of(part.first, part.repeats, period)
            xs = own, cut(facts["layers"]), cut(facts["codes"])
            keep = functools.partial(self._keep, policy=part.remat)
            if part.varies:
                body = functools.partial(_one_slot, part, keep, *shared)
            else:
                body = keep(functools.partial(_one_period, part, *shared))
            unroll = min(ctx.unroll or part.repeats, part.repeats)
            carry, _ = lax.scan(body, carry, xs, unroll=unroll)
        return carry

    def _keep(self, body: Callable, policy: str) -> Callable:
        if not self.train or policy != "none":
            return rematerialised(body, policy)
        return all_but_views(body)  # others would copy weights into the stash

    def embed(self, outer: dict, micro: "Batch") -> jax.Array:
        info, ctx = self.program.tokens(micro, self.key), self.program.context(self.train)
        return self.model(outer).embed(micro["tokens"], info, ctx)

    def nll(self, outer: dict, x: jax.Array, micro: "Batch") -> jax.Array:
        """Sum of masked nll, equal on all tp devices."""
        ctx, chunk = self.program.context(self.train), self.program.cfg.train.loss_chunk
        return self.model(outer).head_loss(x, micro, ctx, chunk)


def _one_period(part: Part, definitions, rope, info, ctx, carry, xs):
    weights, layers, _ = xs
    return scan_body(definitions, part.kinds, rope, info, ctx, carry, (weights, layers, None))


def _one_slot(part: Part, keep: Callable, definitions, rope, info, ctx, carry, xs):
    """A block of the kind that the slot's code chooses, or none."""
    stacks, layers, codes = xs

    def block(kind: str) -> Callable:
        def apply(carry, weights, facts):
            more, layers, rope, info = facts
            own = {name: (*pair, *more[name]) for name, pair in weights.items()}
            xs = own, layers, None
            return scan_body(definitions, (kind,), rope, info, ctx, carry, xs)[0]

        return keep(apply)

    choices = [(lambda x, *_: x) if kind == EMPTY else block(kind) for kind in part.kinds]
    weights = {name: own[:2] for name, own in stacks.items()}
    facts = {name: own[2:] for name, own in stacks.items()}, layers, rope, info
    return one_of(choices)(codes[0], carry, weights, facts), None


# ---- the scans -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """One device's ticks. A state is {y, d, stash, losses, outer, inner, held_f, held_b}: the
    activation and the cotangent that came in, kept residuals, loss shares, gradients outside and of
    the stacks, weights of the chunk that runs forward and of that which runs backward (v > 1)."""

    chunks: Chunks
    schedule: Schedule
    scale: dict[str, jax.Array]  # of the sums {loss, aux_loss} in the loss

    @property
    def ring(self) -> list[tuple[int, int]]:
        n = self.chunks.layout.pp
        return [(i, (i + 1) % n) for i in range(n)]

    def ends(self, row: dict, direction: str) -> tuple[jax.Array, jax.Array]:
        """(the unit is a micro-batch's first chunk, its last), false for an idle tick."""
        s, chunk, on = lax.axis_index("pp"), row[direction + "_chunk"], row[direction + "_on"] == 1
        layout = self.chunks.layout
        first, last = (s == 0) & (chunk == 0), (s == layout.pp - 1) & (chunk == layout.v - 1)
        return first & on, last & on

    def held(self, row: dict, direction: str, state: dict) -> tuple[dict, dict]:
        """What `Chunks.of_chunk` says of a unit's chunk. A device runs a chunk for pp micro-batches
        before it changes to the next, and copies its weights out of the stacks only then."""
        new = lambda: self.chunks.of_chunk(row[direction + "_chunk"])  # noqa: E731
        if self.chunks.layout.v == 1:
            return new()
        return lax.cond(row[direction + "_new"] == 1, new, lambda: state["held_" + direction])

    def holding(self, direction: str, held: tuple) -> dict:
        """Its part of a state."""
        return {} if self.chunks.layout.v == 1 else {"held_" + direction: held}

    def inputs(self, row: dict, direction: str, held: tuple) -> tuple["Batch", list[dict], dict]:
        """Micro-batch, rows of weights and facts of a unit."""
        micro = self.chunks.micro(row[direction + "_micro"])
        stacked = jax.tree.map(jnp.stack, held, is_leaf=lambda x: isinstance(x, list))
        rows, rounded = map(self.chunks.cut, stacked)
        facts = self.chunks.facts(micro, row[direction + "_chunk"])
        return micro, rows, {**facts, "rounded": rounded}

    def enter(self, row: dict, micro: "Batch", y: jax.Array) -> jax.Array:
        embed = lambda: self.chunks.embed(self.chunks.outer, micro).astype(y.dtype)  # noqa: E731
        return lax.cond(self.ends(row, "f")[0], embed, lambda: y)

    def linearise(self, rows: list[dict], facts: dict, x: jax.Array):
        """(y, aux), plan and kept residuals of one chunk."""
        out, vjp = jax.vjp(lambda rows, x: self.chunks.apply(rows, facts, x), rows, x)
        return out, *take_apart(vjp, jax.tree.leaves((rows, facts)))

    def probe(self) -> tuple[jax.ShapeDtypeStruct, list[jax.ShapeDtypeStruct], Plan]:
        """Shapes of an activation and of what is kept of a chunk; how to find it again."""
        plans = []

        def trace(row):
            micro, rows, facts = self.inputs(row, "f", self.chunks.of_chunk(row["f_chunk"]))
            x = self.chunks.embed(self.chunks.outer, micro)
            _, plan, kept = self.linearise(rows, facts, x)
            plans.append(plan)
            return x, kept

        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return *jax.eval_shape(trace, dict.fromkeys(self.schedule.tables, scalar)), plans[0]

    def forward(self, plan: Plan, row: dict, state: dict) -> dict:
        held = self.held(row, "f", state)
        micro, rows, facts = self.inputs(row, "f", held)
        x = self.enter(row, micro, state["y"])
        (y, aux), own, kept = self.linearise(rows, facts, x)
        assert own.places == plan.places, "a chunk was traced differently"
        slot = row["f_slot"]
        stash = [
            lax.dynamic_update_index_in_dim(b, k, slot, 0)
            for b, k in zip(state["stash"], kept, strict=True)
        ]
        _, last = self.ends(row, "f")

        def loss(outer_grads):
            share = lambda outer, y: self.chunks.nll(outer, y, micro) * self.scale["loss"]  # noqa: E731
            value, (g, d) = jax.value_and_grad(share, (0, 1))(self.chunks.outer, y)
            return value, d, _add(outer_grads, g)

        idle = lambda outer_grads: (jnp.float32(0), jnp.zeros_like(y), outer_grads)  # noqa: E731
        value, d, outer = lax.cond(last, loss, idle, state["outer"])
        aux = jnp.where(row["f_on"] == 1, aux, 0) * self.scale["aux_loss"]
        losses = _add(state["losses"], {"loss": value, "aux_loss": aux})
        d = jnp.where(last, d, state["d"])
        y = lax.ppermute(y, "pp", self.ring)
        out = {"y": y, "d": d, "stash": stash, "losses": losses, "outer": outer}
        return {**state, **out, **self.holding("f", held)}

    def backward(self, plan: Plan, row: dict, state: dict) -> dict:
        held = self.held(row, "b", state)
        micro, rows, facts = self.inputs(row, "b", held)
        kept = [_at(b, row["b_slot"]) for b in state["stash"]]
        vjp = put_together(plan, jax.tree.leaves((rows, facts)), kept)
        d_rows, d_x = vjp((state["d"], self.scale["aux_loss"]))
        chunk, on = row["b_chunk"], row["b_on"] == 1
        d_weights = self.chunks.joined(d_rows)

        def accumulate(add, total, more):  # slot by slot, in place
            for i, g in zip(self.chunks.places(total, chunk), more, strict=True):
                own = lax.dynamic_index_in_dim(total, i, 0, keepdims=False)
                own = add(own, jnp.where(on, g, 0).astype(total.dtype))
                total = lax.dynamic_update_index_in_dim(total, own, i, 0)
            return total

        def stack(total, more):  # gradients of weights, maxima in place of those of FP8 scales
            adds = jnp.add, jnp.maximum
            return tuple(
                jax.tree.map(functools.partial(accumulate, add), a, b)
                for add, a, b in zip(adds, total, more, strict=True)
            )

        def embedding(outer_grads):
            _, embed_vjp = jax.vjp(lambda o: self.chunks.embed(o, micro), self.chunks.outer)
            return _add(outer_grads, embed_vjp(d_x)[0])

        first, _ = self.ends(row, "b")
        outer = lax.cond(first, embedding, lambda g: g, state["outer"])
        inner = {name: stack(total, d_weights[name]) for name, total in state["inner"].items()}
        d = lax.ppermute(d_x, "pp", [(b, a) for a, b in self.ring])
        return {**state, "d": d, "outer": outer, "inner": inner, **self.holding("b", held)}

    def both(self, plan: Plan, row: dict, state: dict) -> dict:
        """One unit backward and one forward, independent of each other."""
        state = self.backward(plan, row, state)
        return self.forward(plan, row, state)

    def scan(self, tick: Callable, state: dict, first: int, last: int) -> dict:
        """`tick(row, state)` over ticks [first, last)."""
        tables = {k: jnp.asarray(t) for k, t in self.schedule.rows(first, last).items()}
        mine = lambda row: {k: a[lax.axis_index("pp")] for k, a in row.items()}  # noqa: E731
        return lax.scan(lambda state, row: (tick(mine(row), state), None), state, tables)[0]


def pipeline_gradients(
    program: "Program",
    weights: dict,
    of_fp8: tuple[dict, dict],
    micro_batches: "Batch",
    key: jax.Array,
    count: jax.Array,
    sequences: int,
) -> tuple[dict[str, jax.Array], dict, dict]:
    """(this device's shares of {loss, aux_loss}, gradients of its share in grad_accum, maxima that
    FP8 saw).

    `weights` and (scales, rounded weights) of FP8 are local, in storage order; `micro_batches`
    [m, ...] are equal over pp; `count` and `sequences` are the denominators of the global batch.
    """
    chunks = _chunks(program, weights, of_fp8, micro_batches, key, True)
    schedule = _schedule(chunks)
    nll = 1 / jnp.maximum(count, 1) / program.parallel.tp  # the loss is made on each tp device
    device = Device(chunks, schedule, {"loss": nll, "aux_loss": jnp.float32(1 / sequences)})
    x, kept, plan = device.probe()
    # Until its first unit a device holds real weights: zeros as scales of FP8 make NaN.
    held = lambda chunk: chunks.of_chunk(jnp.int32(chunk))  # noqa: E731
    accum = jnp.dtype(program.cfg.precision.grad_accum)
    zeros = lambda tree: jax.tree.map(lambda w: jnp.zeros(w.shape, accum), tree)  # noqa: E731
    state = {
        "y": jnp.zeros(x.shape, x.dtype),
        "d": jnp.zeros(x.shape, x.dtype),
        "stash": [jnp.zeros((schedule.slots, *k.shape), k.dtype) for k in kept],
        "losses": {"loss": jnp.float32(0), "aux_loss": jnp.float32(0)},
        "outer": zeros(chunks.outer),
        "inner": zeros(chunks.inner),
        **device.holding("f", held(0)),
        **device.holding("b", held(chunks.layout.v - 1)),
    }
    forward, both, backward = (
        functools.partial(f, plan) for f in (device.forward, device.both, device.backward)
    )
    start, ticks = schedule.start, schedule.ticks
    state = device.scan(forward, state, 0, start)
    state = device.scan(both, state, start, ticks)
    state = device.scan(backward, state, ticks, start + ticks)
    grads, seen = ({name: pair[i] for name, pair in state["inner"].items()} for i in (0, 1))
    return state["losses"], {**state["outer"], **grads}, {s: x for s, x in seen.items() if x}


def pipeline_nll(
    program: "Program", weights: dict, of_fp8: tuple[dict, dict], micro_batches: "Batch"
) -> jax.Array:
    """This device's part of the sum of masked nll, without gradients or dropout; equal over tp."""
    chunks = _chunks(program, weights, of_fp8, micro_batches, None, False)
    device = Device(chunks, _schedule(chunks), {})

    def tick(row, state):
        held = device.held(row, "f", state)
        micro, rows, facts = device.inputs(row, "f", held)
        y, _ = chunks.apply(rows, facts, device.enter(row, micro, state["y"]))
        nll = lambda: chunks.nll(chunks.outer, y, micro)  # noqa: E731
        more = lax.cond(device.ends(row, "f")[1], nll, lambda: jnp.float32(0))
        y = lax.ppermute(y, "pp", device.ring)
        return {"y": y, "nll": state["nll"] + more, **device.holding("f", held)}

    x = jax.eval_shape(chunks.embed, chunks.outer, chunks.micro(0))
    held = device.holding("f", chunks.of_chunk(jnp.int32(0)))
    state = {"y": jnp.zeros(x.shape, x.dtype), "nll": jnp.float32(0), **held}
    return device.scan(tick, state, 0, device.schedule.ticks)["nll"]


def _chunks(program, weights, of_fp8, micro_batches, key, train) -> Chunks:
    return Chunks(program, program.layout, weights, *of_fp8, micro_batches, key, train)


def _schedule(chunks: Chunks) -> Schedule:
    m = len(chunks.micro_batches["tokens"])
    return make_schedule(chunks.layout.pp, chunks.layout.v, m)


def _at(a: jax.Array, i: jax.Array | int) -> jax.Array:
    return a[0] if a.shape[0] == 1 else lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _add(total: dict, more: dict) -> dict:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
