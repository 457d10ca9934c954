"""The key of a config.json whose value is of another kind than a reader takes, in one line."""

import contextlib
import copy
import functools
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from mjax.errors import UserError, reason

MOST_LAYERS = 100_000
# What reading a value of another kind raises.
WRONG_KIND = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def named_faults(read: Callable[[dict], Any], config: dict) -> Any:
    """What `read` makes of a config.json. Raises `UserError` for a value of another kind."""
    for path in _paths(config):
        value = functools.reduce(dict.__getitem__, path, config)
        if "layer" in path[-1] and isinstance(value, int) and value > MOST_LAYERS:
            raise UserError(
                f"config.json: {'.'.join(path)}={value} is above {MOST_LAYERS}; mend it"
            )
    try:
        return read(config)
    except UserError:
        raise
    except WRONG_KIND as e:
        path = next((path for path in _paths(config) if _is_cause(read, config, path)), None)
        if path is None:
            raise UserError(f"config.json cannot be read: {reason(e)}; mend it") from e
        value = functools.reduce(dict.__getitem__, path, config)
        raise UserError(
            f"config.json: {'.'.join(path)}={reprlib.repr(value)} is not of the kind that belongs "
            f"there ({reason(e)}); mend it"
        ) from e


def _paths(config: dict) -> Iterator[tuple[str, ...]]:
    """The keys of a config.json, those of its parts first."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
        yield (key,)


def _is_cause(read: Callable[[dict], Any], config: dict, path: tuple[str, ...]) -> bool:
    """Whether a config.json can be read once a key has a value of another kind, or none."""
    changed = copy.deepcopy(config)
    place = functools.reduce(dict.__getitem__, path[:-1], changed)
    for value in (None, 8, "silu", {}):
        place[path[-1]] = value
        with contextlib.suppress(*WRONG_KIND):  # a `UserError` is a ValueError
            read(changed)
            return True
    return False
