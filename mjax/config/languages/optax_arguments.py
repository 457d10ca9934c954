"""Functions of optax by name, and the arguments that a config may give them.

`optimizer.name: optax.lion` names a function, `optimizer.args` its arguments. Learning rate, weight
decay, their masks and the dtypes of moments have keys of their own, so they are not among them.
Invariant: only signatures are read here. Nothing is called, for this runs before JAX knows its
devices.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, Union, get_args, get_origin

PREFIX = "optax."

# Arguments that mjax sets itself, and the keys that stand for them.
OWN_KEYS = {
    "learning_rate": "schedule.lr",
    "weight_decay": "optimizer.weight_decay",
    "mask": "optimizer.weight_decay_roles",
    "weight_decay_mask": "optimizer.weight_decay_roles",
    "mu_dtype": "optimizer.mu_dtype",
    "accumulator_dtype": "optimizer.mu_dtype",
}

Value = bool | int | float | str | None
WORDS = {bool: "true or false", str: "text", float: "a number", int: "a whole number"}
WORDS |= {types.NoneType: "null"}


class Argument(NamedTuple):
    """An argument of an optax function.

    types: of the values that it takes; empty: none that a config can hold. required: it has no
    default.
    """

    types: tuple[type, ...]
    required: bool

    def takes(self, value: Value) -> bool:
        return type(value) in self.types

    @property
    def expected(self) -> str:
        """The values that the argument takes, in words."""
        if not self.types:
            return "left out: it takes what no config can hold"
        implied = {int} if float in self.types else set()
        return " or ".join(WORDS[kind] for kind in WORDS if kind in {*self.types} - implied)


def optax_function(name: str) -> Callable | None:
    """The function called `name`, as in "optax.lion"; None where it makes no transformation."""
    if not name.startswith(PREFIX):
        return None
    import optax  # here, because it takes long and few configs name it

    found: Any = optax
    for part in name.removeprefix(PREFIX).split("."):
        found = getattr(found, part, None)
    signature = _signature(found)
    if signature is None:
        return None
    returned = signature.return_annotation
    if not isinstance(returned, type) or not issubclass(returned, optax.GradientTransformation):
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return None if inspect.Parameter.VAR_POSITIONAL in kinds else found


def optax_names() -> list[str]:
    """The functions of optax itself that make a transformation."""
    import optax

    names = [PREFIX + name for name in vars(optax) if not name.startswith("_")]
    return [name for name in names if optax_function(name) is not None]


def optax_arguments(name: str) -> dict[str, Argument]:
    """The arguments of the optax function `name` by name, without those that mjax sets itself."""
    signature = _signature(optax_function(name))
    assert signature is not None, name
    found = {}
    for argument, parameter in signature.parameters.items():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD or own_key(argument):
            continue
        required = parameter.default is inspect.Parameter.empty
        found[argument] = Argument(_value_types(parameter), required)
    return found


def own_key(argument: str) -> str | None:
    """The config key that stands for an argument, or None."""
    if "dtype" in argument:
        return OWN_KEYS.get(argument, "optimizer.mu_dtype")
    return OWN_KEYS.get(argument)


def _signature(function: object) -> inspect.Signature | None:
    if not callable(function) or isinstance(function, type):
        return None
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError):  # annotations that name what is not there
        return None


def _value_types(parameter: inspect.Parameter) -> tuple[type, ...]:
    """The types of the values that a config may give a parameter."""
    if parameter.annotation is inspect.Parameter.empty:
        members = {type(parameter.default)}
    else:
        members = _members(parameter.annotation)
    if float in members:  # arrays too: an annotation of those allows bool, int, float, complex
        found: list[type] = [int, float]
    else:
        found = [kind for kind in (int, bool, str) if kind in members]
    if found and types.NoneType in members:
        found.append(types.NoneType)
    return tuple(found)


def _members(annotation: object) -> set:
    """The members of a union, or the annotation itself."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return {annotation}
    return set().union(*map(_members, get_args(annotation)))
