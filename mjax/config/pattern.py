"""The layer-pattern string: which kind each layer is, and where its parameters are stacked.

``"(LLLLLG)*4,LL"`` is read as letters (one block each), commas ignored, groups repeated; a pattern
shorter than the depth repeats from its start. Blocks whose parameters have equal shapes share one
stack in global layer order, whatever their window or position encoding: a parameter's place in a
checkpoint depends on neither the period of the pattern nor a pipeline.
"""

import re

from mjax.errors import UserError

# Kind of block -> the stack its parameters live in. G: full attention, L: sliding window, N: full
# attention without rotary positions (NoPE), E: full attention and experts.
STACK_OF = {"G": "dense", "L": "dense", "N": "dense", "E": "moe"}
STACKS = frozenset(STACK_OF.values())


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


def stack_index(kinds: tuple[str, ...]) -> tuple[int, ...]:
    """For each layer, its row in the stack of its kind."""
    seen: dict[str, int] = {}
    rows = []
    for kind in kinds:
        rows.append(seen.get(STACK_OF[kind], 0))
        seen[STACK_OF[kind]] = rows[-1] + 1
    return tuple(rows)
