"""Values of a config.json that are not of the kind that belongs there, found and named."""

import contextlib
import copy
import functools
import reprlib
from collections.abc import Callable, Iterator

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, reason

MOST_LAYERS = 100_000
# What reading a value of another kind raises.
WRONG_KIND = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def with_named_values(read: Callable[[dict], ModelConfig], config: dict) -> ModelConfig:
    """The model that `read` makes of a config.json.

    Raises `UserError` naming a value that it cannot read.

    It is the first which, replaced by another, lets `read` come to an end.
    """
    for path in _paths(config):
        count = _value_at(config, path)
        if "layer" in str(path[-1]) and isinstance(count, int) and count > MOST_LAYERS:
            raise UserError(
                f"config.json: {_text_of_key(path)}={count} is above {MOST_LAYERS}; mend it"
            )
    try:
        return read(config)
    except UserError:
        raise
    except WRONG_KIND as e:
        path = next((path for path in _paths(config) if _is_cause(read, config, path)), None)
        if path is None:
            raise UserError(f"config.json cannot be read: {reason(e)}; mend it") from e
        value = reprlib.repr(_value_at(config, path))
        raise UserError(
            f"config.json: {_text_of_key(path)}={value} is not of the kind that belongs there "
            f"({reason(e)}); mend it"
        ) from e


def _text_of_key(path: tuple[str, ...]) -> str:
    return ".".join(map(str, path))  # a dictionary of labels may have numbers as its keys


def _value_at(config: dict, path: tuple[str, ...]) -> object:
    return functools.reduce(dict.__getitem__, path, config)


def _paths(config: dict) -> Iterator[tuple[str, ...]]:
    """The keys of a config.json, those of its parts first."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
        yield (key,)


def _is_cause(read: Callable[[dict], ModelConfig], config: dict, path: tuple[str, ...]) -> bool:
    """Whether a config.json can be read once a key has a value of another kind, or none."""
    changed = copy.deepcopy(config)
    place = _value_at(changed, path[:-1])
    for value in (None, 8, "silu", {}):
        place[path[-1]] = value
        with contextlib.suppress(*WRONG_KIND):  # a `UserError` is a ValueError
            read(changed)
            return True
    return False
