"""Dotted names of config keys: one of `ModelConfig` is "hidden_size" or "attention.head_dim"."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError

GroupT = TypeVar("GroupT", bound=BaseModel)


def is_group(kind: object) -> bool:
    """Whether a type is that of a group of keys."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def leaf_keys(group: Any) -> dict[str, FieldInfo]:
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
    """The model of nested values, as `checked` gives it."""
    return checked(ModelConfig, values, message)


def checked(kind: type[GroupT], values: Mapping[str, Any], message: str) -> GroupT:
    """Nested values as a group. Raises `UserError` where one is wrong.

    {key}, {value} and {why} in its message are what is wrong first.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        key, value = ".".join(map(str, first["loc"])), repr(first["input"])
        for name, text in (("{key}", key), ("{value}", value), ("{why}", first["msg"])):
            message = message.replace(name, text)
        raise UserError(message) from None
