"""The language of `model.layer_pattern`: the kind of each layer, and the stack of its parameters.

``"(LLLLLG)*4,LL"`` is read as letters, one for each layer. Commas are ignored and groups repeated.
A pattern shorter than the model repeats from its start. Layers whose parameters have equal shapes
share one stack, in the order of the model, whatever their window or position encoding. So the place
of a parameter in a checkpoint depends on neither the period of the pattern nor a pipeline.
"""

import re

from mjax.errors import UserError

# Kind of layer -> the stack of its parameters. G: full attention, L: sliding window, N: full
# attention without rotary positions (NoPE), E: full attention and experts.
STACK_OF = {"G": "dense", "L": "dense", "N": "dense", "E": "moe"}
STACKS = frozenset(STACK_OF.values())


def expand(pattern: str, num_layers: int) -> tuple[str, ...]:
    """The kinds of all `num_layers` layers. Raises `UserError` for a malformed pattern."""
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
    repeats = -(-num_layers // len(flat))
    return tuple((flat * repeats)[:num_layers])


def stack_index(kinds: tuple[str, ...]) -> tuple[int, ...]:
    """The row of each layer in the stack of its kind."""
    next_row = dict.fromkeys(STACKS, 0)
    rows = []
    for kind in kinds:
        stack = STACK_OF[kind]
        rows.append(next_row[stack])
        next_row[stack] += 1
    return tuple(rows)
