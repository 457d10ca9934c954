"""Dotted names of config keys, and THE table of the keys that have moved into groups.

A key of `ModelConfig` is "hidden_size" or "attention.head_dim". Files, overrides and checkpoints
from before the groups have `head_dim` beside `hidden_size`; `move_keys` puts it where it is now.
"""

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mjax.config.model_schema import LayerSizes, ModelConfig
from mjax.errors import UserError

# The groups of a model whose keys once stood outside them.
_ONCE_FLAT = ("attention", "rope", "moe")
_NAMED = 3  # keys of a group that a line names before it only counts


def is_group(kind: object) -> bool:
    """Whether a type is that of a group of keys."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def leaf_keys(group: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a group and of the groups in it, by their dotted names.

    An optional group, such as rope_scaling, is one key.
    """
    found = {}
    for name, field in group.model_fields.items():
        if not is_group(field.annotation):
            found[name] = field
            continue
        for key, leaf in leaf_keys(field.annotation).items():
            found[f"{name}.{key}"] = leaf
    return found


def value_of(group: BaseModel, key: str) -> Any:
    """The value of a dotted key of a group."""
    return reduce(getattr, key.split("."), group)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return tree


def model_of(values: Mapping[str, Any], message: str) -> ModelConfig:
    """The model of nested values. Raises `UserError` where one is wrong.

    {key}, {value} and {why} in its message are what is wrong first.
    """
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        key, value = ".".join(map(str, first["loc"])), repr(first["input"])
        for name, text in (("{key}", key), ("{value}", value), ("{why}", first["msg"])):
            message = message.replace(name, text)
        raise UserError(message) from None


def _moved(group: type[BaseModel]) -> dict[str, str]:
    """The name of each key that once stood in `group` itself, and the group in it that has it."""
    fields = group.model_fields
    homes = {home: fields[home].annotation for home in _ONCE_FLAT if home in fields}
    return {name: home for home, kind in homes.items() for name in kind.model_fields}


# THE table of moved keys, from the schema: in `model`, and in the entries of `model.layer_sizes`.
MOVED = {group: _moved(group) for group in (ModelConfig, LayerSizes)}


def move_keys(config: dict[str, Any], source: str) -> dict[str, str]:
    """Move the keys of a config tree, which is changed, to their places of today.

    Returns the old dotted name of each that has moved, and its new one. Raises `UserError` where a
    key is given in both places with different values; `source` says where the tree is from.
    """
    model = config.get("model")
    if not isinstance(model, dict):
        return {}
    moves = _move(model, ModelConfig, "model", source)
    sizes = model.get("layer_sizes")
    for i, entry in enumerate(sizes if isinstance(sizes, list) else []):
        if isinstance(entry, dict):
            moves |= _move(entry, LayerSizes, f"model.layer_sizes[{i}]", source)
    return moves


def _move(values: dict, group: type[BaseModel], prefix: str, source: str) -> dict[str, str]:
    moves = {}
    for name, home in MOVED[group].items():
        inside = values.get(home, {})
        if name not in values or not isinstance(inside, dict):
            continue
        old = f"{prefix}.{name}"
        moves[old] = f"{prefix}.{home}.{name}"
        given = values.pop(name)
        there = inside.get(name, given)
        values[home] = {**inside, name: _merged(given, there, old, moves[old], source)}
    return moves


def _merged(old: Any, new: Any, before: str, now: str, source: str) -> Any:
    """The values of a key in its old and its new place, as one.

    Raises `UserError` where they differ.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        merged = old | new
        for key in old.keys() & new.keys():
            merged[key] = _merged(old[key], new[key], f"{before}.{key}", f"{now}.{key}", source)
        return merged
    if old != new:
        raise UserError(
            f"{source}: {before}={old!r} and {now}={new!r} are the same key; keep the second"
        )
    return new


def describe_moves(moves: Mapping[str, str]) -> str:
    """One line that says where keys went: 'model.rope_theta is now model.rope.rope_theta'."""
    homes: dict[tuple[str, str], list[str]] = {}
    whole_lists = {re.sub(r"\[\d+\]", "", old): new for old, new in moves.items()}
    for old, new in whole_lists.items():
        group, _, name = old.rpartition(".")
        home = re.sub(r"\[\d+\]", "", new).rpartition(".")[0]
        homes.setdefault((group, home), []).append(name)
    parts = []
    for (group, home), names in homes.items():
        if len(names) == 1:
            parts.append(f"{group}.{names[0]} is now {home}.{names[0]}")
            continue
        if len(names) > _NAMED:
            names = [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} more"]
        *most, last = names
        parts.append(f"{group}.{', '.join(most)} and {last} are now in {home}")
    return "; ".join(parts)
