"""The exchanges of a compiled program: read from its schedule, the text of its optimized HLO.

A collective is hidden if it runs asynchronously and the schedule has a matmul or attention between
its start and its done; otherwise it is exposed. Loops count with their trip counts. Invariant: each
collective of the text is read once; what is called from several places counts for each.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

OPS = "all-gather|all-reduce|reduce-scatter|collective-permute|ragged-all-to-all|all-to-all"
_COLLECTIVE = re.compile(rf"%?([\w.\-]+) = (.*?) ({OPS})(-start|-done)?\((.*)")
_MATMUL = re.compile(r"cublas|gemm|__cudnn|triton|mosaic|\bdot\(|calls=%?\w*dot", re.I)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|branch_computations|true_computation|false_computation)=")
_NAMES = re.compile(r"%([\w.\-]+)")


class Collective(NamedTuple):
    """A collective of a program.

    type: of its largest array. computation: where it stands. axes: of the mesh, those that vary
    within a group. bytes: of all that a group of devices gathers, reduces or passes on, once.
    times: in a run of the program. exposed: whether no matmul runs meanwhile.
    """

    op: str
    type: str
    computation: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    exposed: bool


def read_exchanges(text: str, sizes: dict[str, int]) -> list[Collective]:
    """The exchanges of a program on a mesh of these sizes, in the order of the text."""
    computations = dict(_computations(text))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1]
    times = _times(computations, entry)
    found = []
    for name, lines in computations.items():
        if times[name]:
            found += _exchanges_of(name, lines, sizes, times[name])
    return found


def exchange_lines(exchanges: list[Collective]) -> list[str]:
    """A line for each kind of exchange, the exposed first; what a step moves, MB of 1e6 bytes."""
    moved: Counter = Counter()
    count: Counter = Counter()
    for e in exchanges:
        kind = not e.exposed, "+".join(e.axes) or "?", e.op
        moved[kind] += e.bytes * e.times
        count[kind] += e.times
    lines = []
    for kind in sorted(moved, key=lambda kind: (kind[0], -moved[kind])):
        hidden, axes, op = kind
        how = "hidden under matmuls" if hidden else "exposed"
        heading = "" if lines else "compiled"
        lines.append(
            f"{heading:<11} {how}: {op} over {axes}, {count[kind]:,} a step, "
            f"{moved[kind] / 1e6:,.1f} MB"
        )
    return lines or ["compiled    no exchanges between devices"]


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of every computation."""
    name, lines = "", []
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(?.*\{\s*$", line)
        if start and not line.startswith((" ", "HloModule")):
            name, lines = start[1], []
        elif line.startswith("}"):
            yield name, lines
        else:
            lines.append(line)


def _times(computations: dict[str, list[str]], entry: str) -> Counter:
    """How often a run of the program runs each computation; a branch counts as always taken."""
    times: Counter = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in computations.get(name, ()):
            if " fusion(" in line:
                continue  # it holds no collective
            body = re.search(r"body=%?([\w.\-]+)", line)
            if body:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                visit(body[1], count * int(trips[1]) if trips else count)
            elif not _COLLECTIVE.search(line):
                for called in _called(line):
                    visit(called, count)

    visit(entry, 1)
    return times


def _called(line: str) -> list[str]:
    names = []
    for match in _CALLED.finditer(line):
        rest = line[match.end() :]
        listed = rest[: rest.index("}")] if rest.startswith("{") else rest.split(",")[0]
        names += _NAMES.findall(listed)
    return names


def _exchanges_of(
    name: str, lines: list[str], sizes: dict[str, int], times: int
) -> Iterator[Collective]:
    """The exchanges of a computation, in the order in which they end."""
    started: dict[str, int] = {}
    for at, line in enumerate(lines):
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        own, result, op, phase, operands = match.groups()
        if phase == "-start":
            started[own] = at
            continue
        begin, exposed = at, True
        if phase == "-done":
            begin = started[re.search(r"%?([\w.\-]+)\)", operands)[1]]
            exposed = not any(_MATMUL.search(between) for between in lines[begin + 1 : at])
        axes, group = _group(lines[begin], sizes)
        moved = _bytes(result) * (group if op == "reduce-scatter" else 1)
        yield Collective(op, _first_type(lines[begin]), name, axes, moved, times, exposed)


def _first_type(line: str) -> str:
    """The type of the first array of a collective's result."""
    shape = re.search(r"\w+\[[\d,]*\]", _COLLECTIVE.search(line)[2])
    return shape[0] if shape else ""


def _bytes(types: str) -> int:
    """The bytes of all arrays in the text of a type."""
    total = 0
    for kind, shape in _ARRAY.findall(types):
        bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
        total += math.prod(int(n) for n in shape.split(",") if n) * max(bits // 8, 1)
    return total


def _group(line: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """(axes of the mesh along which a collective exchanges, devices of a group)."""
    named = re.search(r"replica_groups=mesh\[[^\]]*\] ?\{([^}]*)\}", line)
    if named:
        axes = tuple(re.findall(r"'(\w+)'", named[1]))
        return axes, math.prod(sizes.get(axis, 1) for axis in axes)
    groups = _listed_groups(line)
    if not groups:
        return tuple(axis for axis, n in sizes.items() if n > 1), math.prod(sizes.values())
    along = set()
    for group in groups:
        places = np.unravel_index(group, tuple(sizes.values()))
        varies = (axis for axis, at in zip(sizes, places, strict=True) if len(set(at)) > 1)
        along |= set(varies)
    return tuple(axis for axis in sizes if axis in along), len(groups[0])


def _listed_groups(line: str) -> list[list[int]]:
    """The groups, or the pairs of a permute, that a line lists by number of device."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    if listed:
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        return []
    shape, dims, order = ([int(n) for n in g.split(",")] if g else [] for g in iota.groups())
    numbers = np.arange(math.prod(dims)).reshape(dims)
    numbers = numbers.transpose(order) if order else numbers
    return numbers.reshape(shape).tolist()
