"""Calls of tools that a request demands: the JSON schema of their text."""

from collections.abc import Sequence
from typing import Any

from mjax.errors import UserError
from mjax.serve.parsers.reader import Delta, ToolDelta
from mjax.serve.protocol.chat_request import Tool

_DEFINITIONS = "$defs", "definitions"


def schema_of_calls(tools: Sequence[Tool], name: str, several: bool) -> dict[str, Any]:
    """The schema of the arguments of the tool `name`; of a list of calls if that is empty.

    `several`: whether the list may have more than one call. Raises `UserError` for definitions of
    two tools that differ under one name.
    """
    if name:
        (tool,) = [tool for tool in tools if tool.function.name == name]
        return tool.function.parameters or {"type": "object"}
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        own = dict(tool.function.parameters or {"type": "object"})
        for names in _DEFINITIONS:
            for key, schema in dict(own.pop(names, None) or {}).items():
                if shared.setdefault(names, {}).setdefault(key, schema) != schema:
                    raise UserError(f"tools: two of them define {key} in {names}; rename one")
        fields = {"name": {"const": tool.function.name}, "arguments": own}
        call = {"type": "object", "properties": fields, "required": [*fields]}
        calls.append(call | {"additionalProperties": False})
    most = {} if several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | most | shared


class NamedCall:
    """Reads the arguments of one call."""

    def __init__(self, name: str):
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        """The call that a part of the text adds to."""
        name, self._name = self._name, None
        if not text and name is None:
            return Delta()
        return Delta(tool_calls=(ToolDelta(0, name, text),))

    def close(self) -> Delta:
        """Nothing: no text is held back."""
        return Delta()
