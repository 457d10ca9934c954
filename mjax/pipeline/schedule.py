"""When each chunk runs: tick tables of the phase-split interleaved 1F1B schedule.

In a tick every device runs at most one chunk forward and one backward, in lock step. Micro-batches
pass in groups of pp; within a group each device takes its chunks in turn, so that a chunk's input
has always just arrived: device s runs unit n of the order at tick n + s, and unit n of the backward
order (chunks reversed) at tick pp * v + n + (pp - 1 - s). Three phases follow: F only, F and B, B
only. Forward and backward take `ticks` ticks each, of which m * v do work:

    ticks = m * v + pp - 1  (+ (v - 1) * (pp - m mod pp) where pp does not divide m)
    bubble = 1 - m * v / ticks = (pp - 1) / (m * v + pp - 1)

v = 1 is plain 1F1B. A residual occupies a slot from its forward to its backward; slots are given
by interval colouring, and their number does not depend on m. Follows Megatron-LM (arXiv
2104.04473); the phase split is what makes it three scans without a conditional on the operation.
"""

from dataclasses import dataclass

import numpy as np

FIELDS = ("on", "micro", "chunk", "slot")


@dataclass(frozen=True)
class Schedule:
    """Tables int32 [T, pp]; `f_*` of the forward unit of a tick, `b_*` of the backward one.

    `on`: whether there is a unit; `micro`, `chunk`, `slot`: its micro-batch, chunk and stash slot;
    `new`: whether its device's unit before it was of another chunk, or there was none.
    Ticks [0, start) are F only, [start, ticks) F and B, [ticks, T) B only.
    """

    pp: int
    v: int
    m: int
    start: int
    ticks: int
    slots: int
    tables: dict[str, np.ndarray]

    @property
    def bubble(self) -> float:
        """Share of the time in which a device waits."""
        return 1 - self.m * self.v / self.ticks

    def rows(self, first: int, last: int) -> dict[str, np.ndarray]:
        return {name: table[first:last] for name, table in self.tables.items()}


def make_schedule(pp: int, v: int, m: int) -> Schedule:
    """The schedule of m micro-batches on pp devices with v chunks each."""
    order = _order(pp, v, m)
    start = pp * v
    ticks = max(order) + pp
    names = [f"{direction}_{field}" for direction in "fb" for field in FIELDS]
    tables = {name: np.zeros((start + ticks, pp), np.int32) for name in names}

    slots = 0
    for s in range(pp):
        forward = {n + s: unit for n, unit in order.items()}
        backward = {start + n + pp - 1 - s: (i, v - 1 - c) for n, (i, c) in order.items()}
        free: list[int] = []
        taken: dict[tuple[int, int], int] = {}
        for t in range(start + ticks):
            if not free:
                free.append(len(taken))
            if t in forward:
                taken[forward[t]] = free.pop()
                _put(tables, "f", t, s, *forward[t], taken[forward[t]])
                slots = max(slots, taken[forward[t]] + 1)
            elif t < ticks:  # an idle forward writes somewhere harmless
                tables["f_slot"][t, s] = free[-1]
                slots = max(slots, free[-1] + 1)
            if t in backward:  # frees its slot after this tick's forward: the two are independent
                slot = taken.pop(backward[t])
                _put(tables, "b", t, s, *backward[t], slot)
                free.append(slot)
        assert not taken, f"units without a backward: {taken}"
    for x in "fb":
        tables[x + "_new"] = _changes(tables[x + "_on"], tables[x + "_chunk"])
    return Schedule(pp, v, m, start, ticks, slots, tables)


def _put(tables: dict, direction: str, t: int, s: int, *values: int) -> None:
    for field, value in zip(FIELDS, (1, *values), strict=True):
        tables[f"{direction}_{field}"][t, s] = value


def _changes(on: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Where, int32 [T, pp], a device's chunk is not that of its last unit."""
    out = np.zeros_like(on)
    for s in range(on.shape[1]):
        units = np.flatnonzero(on[:, s])
        out[units, s] = np.diff(chunk[units, s], prepend=-1) != 0
    return out


def _order(pp: int, v: int, m: int) -> dict[int, tuple[int, int]]:
    """Unit number -> (micro-batch, chunk) of the circular order; gaps where a group is short."""
    if v == 1:
        return {i: (i, 0) for i in range(m)}
    units = {}
    for i in range(m):
        group, place = divmod(i, pp)
        for c in range(v):
            units[(group * v + c) * pp + place] = (i, c)
    return units


def timeline(schedule: Schedule, width: int = 90) -> list[str]:
    """A picture, a line a device: 0-9 forward of that micro-batch (mod 10), a-j its backward."""
    t = schedule.tables

    def cell(tick: int, s: int) -> str:
        f = str(t["f_micro"][tick, s] % 10) if t["f_on"][tick, s] else "."
        b = "abcdefghij"[t["b_micro"][tick, s] % 10] if t["b_on"][tick, s] else "."
        if tick < schedule.start:
            return f
        return f + b if tick < schedule.ticks else b

    total = schedule.start + schedule.ticks
    lines = ["".join(cell(k, s) for k in range(total)) for s in range(schedule.pp)]
    cut = (width - 3) // 2
    return [x if len(x) <= width else f"{x[:cut]}...{x[-cut:]}" for x in lines]
