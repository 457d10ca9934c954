"""What a layer is: the layer-pattern string, expanded to block kinds and grouped into scans.

``"(LLLLLG)*4,LL"`` is read as letters (one block each), commas ignored, groups repeated; a pattern
shorter than the depth repeats from its start. Blocks whose parameters have equal shapes share one
stack in global layer order, whatever their window or position encoding: a parameter's place in a
checkpoint depends on neither the period of the pattern nor a pipeline. Invariant: `runs` covers
every layer exactly once, in order.
"""

import re
from dataclasses import dataclass

from mjax.errors import UserError

# Kind of block -> the stack its parameters live in. G: full attention, L: sliding window, N: full
# attention without rotary positions (NoPE), E: full attention and experts.
STACK_OF = {"G": "dense", "L": "dense", "N": "dense", "E": "moe"}
STACKS = frozenset(STACK_OF.values())


@dataclass(frozen=True)
class Run:
    """`repeats` equal groups of blocks: one scan whose body is `kinds`, starting at `first`."""

    first: int
    kinds: tuple[str, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.kinds) * self.repeats


def expand(pattern: str, num_layers: int) -> tuple[str, ...]:
    """Kinds of all `num_layers` blocks. Raises `UserError` for a malformed pattern."""
    flat = re.sub(r"[\s,]", "", pattern)
    group = re.compile(r"\(([A-Z]+)\)\*(\d+)|([A-Z])\*(\d+)|\(([A-Z]+)\)(?!\*)")
    while group.search(flat):
        flat = group.sub(lambda m: (m[1] or m[3] or m[5]) * int(m[2] or m[4] or 1), flat)
    unknown = sorted(set(flat) - set(STACK_OF))
    if not flat or unknown:
        what = f"has no block called {unknown[0]!r}" if unknown else "is empty"
        raise UserError(
            f"model.layer_pattern={pattern!r} {what}; use letters of {'/'.join(STACK_OF)}, "
            "groups and repeats as in '(LLLLLG)*4,LL'"
        )
    if len(flat) > num_layers:
        raise UserError(
            f"model.layer_pattern={pattern!r} names {len(flat)} blocks but "
            f"model.num_hidden_layers={num_layers}; make them agree"
        )
    return tuple((flat * -(-num_layers // len(flat)))[:num_layers])


def runs(kinds: tuple[str, ...], first: int = 0) -> tuple[Run, ...]:
    """Group consecutive blocks into the fewest scans: at each point the period that covers most."""
    out: list[Run] = []
    at = 0
    while at < len(kinds):
        best = Run(first + at, kinds[at : at + 1], 1)
        for period in range(1, (len(kinds) - at) // 2 + 1):
            unit, n = kinds[at : at + period], 1
            while kinds[at + n * period : at + (n + 1) * period] == unit:
                n += 1
            if n > 1 and n * period > best.layers:
                best = Run(first + at, unit, n)
        out.append(best)
        at += best.layers
    return tuple(out)


def stretches(ways: tuple) -> list[tuple[int, int]]:
    """[first, last) of each stretch of equal neighbours."""
    ends = [i for i in range(1, len(ways)) if ways[i] != ways[i - 1]]
    return list(zip([0, *ends], [*ends, len(ways)], strict=True))


def stack_index(kinds: tuple[str, ...]) -> tuple[int, ...]:
    """For each layer, its row in the stack of its kind."""
    seen: dict[str, int] = {}
    rows = []
    for kind in kinds:
        rows.append(seen.get(STACK_OF[kind], 0))
        seen[STACK_OF[kind]] = rows[-1] + 1
    return tuple(rows)
