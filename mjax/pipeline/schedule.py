"""When each chunk runs: tick tables of the phase-split interleaved 1F1B schedule.

In a tick every device runs at most one chunk forward and one backward, in lock step. Micro-batches
pass in groups of pp. Within a group each device takes its chunks in turn, so that a chunk's input
has always just arrived: device s runs unit n of the order at tick n + s, and unit n of the backward
order (chunks reversed) at tick pp * v + n + (pp - 1 - s). Three phases follow: F only, F and B, B
only. Forward and backward take `ticks` ticks each, of which m * v do work:

    ticks = m * v + pp - 1  (+ (v - 1) * (pp - m mod pp) where pp does not divide m)
    bubble = 1 - m * v / ticks = (pp - 1) / (m * v + pp - 1)

v = 1 is plain 1F1B. A residual occupies a slot of the stash from its forward to its backward. Slots
are given by interval coloring, and their number does not depend on m. Follows Megatron-LM (arXiv
2104.04473); the phase split is what makes it three scans without a conditional on the operation.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class UnitTable:
    """The units of one direction: int32 [T, pp], for each tick and device.

    on: whether there is a unit. micro, chunk, slot: its micro-batch, chunk and slot of the stash.
    new: whether its device's unit before it was of another chunk, or there was none.
    """

    on: np.ndarray
    micro: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    new: np.ndarray

    @staticmethod
    def empty(ticks: int, pp: int) -> "UnitTable":
        return UnitTable(*(np.zeros((ticks, pp), np.int32) for _ in range(5)))

    def put(self, tick: int, device: int, micro: int, chunk: int, slot: int) -> None:
        """A unit of `device` in a tick."""
        self.on[tick, device] = 1
        self.micro[tick, device], self.chunk[tick, device] = micro, chunk
        self.slot[tick, device] = slot

    def mark_new(self) -> None:
        """Fill in `new`."""
        for device in range(self.on.shape[1]):
            units = np.flatnonzero(self.on[:, device])
            self.new[units, device] = np.diff(self.chunk[units, device], prepend=-1) != 0


@dataclass(frozen=True)
class Schedule:
    """The units of all ticks.

    Ticks [0, start) are F only, [start, ticks) F and B, [ticks, start + ticks) B only. `slots` is
    the size of the stash.
    """

    pp: int
    v: int
    m: int
    start: int
    ticks: int
    slots: int
    forward: UnitTable
    backward: UnitTable

    @property
    def bubble(self) -> float:
        """The share of the time in which a device waits."""
        return 1 - self.m * self.v / self.ticks


def make_schedule(pp: int, v: int, m: int) -> Schedule:
    """The schedule of m micro-batches on pp devices with v chunks each."""
    order = unit_order(pp, v, m)
    start, ticks = pp * v, max(order) + pp
    forward, backward = (UnitTable.empty(start + ticks, pp) for _ in range(2))
    slots = 0
    for device in range(pp):
        forward_at = {n + device: unit for n, unit in order.items()}
        backward_at = {
            start + n + pp - 1 - device: (micro, v - 1 - chunk)
            for n, (micro, chunk) in order.items()
        }
        free: list[int] = []
        taken: dict[tuple[int, int], int] = {}
        for tick in range(start + ticks):
            if not free:
                free.append(len(taken))
            if unit := forward_at.get(tick):
                taken[unit] = free.pop()
                forward.put(tick, device, *unit, taken[unit])
                slots = max(slots, taken[unit] + 1)
            elif tick < ticks:  # an idle forward writes somewhere harmless
                forward.slot[tick, device] = free[-1]
                slots = max(slots, free[-1] + 1)
            if unit := backward_at.get(tick):
                # It frees its slot after this tick's forward: the two are independent.
                slot = taken.pop(unit)
                backward.put(tick, device, *unit, slot)
                free.append(slot)
        assert not taken, f"units without a backward: {taken}"
    forward.mark_new()
    backward.mark_new()
    return Schedule(pp, v, m, start, ticks, slots, forward, backward)


def unit_order(pp: int, v: int, m: int) -> dict[int, tuple[int, int]]:
    """Unit number -> (micro-batch, chunk) of the circular order; gaps where a group is short."""
    if v == 1:
        return {micro: (micro, 0) for micro in range(m)}
    units = {}
    for micro in range(m):
        group, place = divmod(micro, pp)
        for chunk in range(v):
            units[(group * v + chunk) * pp + place] = micro, chunk
    return units


def timeline(schedule: Schedule, width: int = 90) -> list[str]:
    """A picture, a line a device: 0-9 forward of that micro-batch (mod 10), a-j its backward."""
    forward, backward = schedule.forward, schedule.backward

    def cell(tick: int, device: int) -> str:
        f = str(forward.micro[tick, device] % 10) if forward.on[tick, device] else "."
        b = "abcdefghij"[backward.micro[tick, device] % 10] if backward.on[tick, device] else "."
        if tick < schedule.start:
            return f
        return f + b if tick < schedule.ticks else b

    ticks = range(schedule.start + schedule.ticks)
    lines = ["".join(cell(tick, device) for tick in ticks) for device in range(schedule.pp)]
    cut = (width - 3) // 2
    return [line if len(line) <= width else f"{line[:cut]}...{line[-cut:]}" for line in lines]
