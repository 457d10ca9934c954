"""Errors as OpenAI writes them: {"error": {"message", "type", "param", "code"}} and a status."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException

from mjax.errors import UserError

_SOURCES = re.compile(r"^(?:(?:SamplingParams|Structured|sampling): )+")
_FIELD_NAME = re.compile(r"[a-z_]+(?=(\.\w+)*[:=])|[a-z_]+_[a-z_]+\b|(stop|structured|n)\b")
# Members of unions and validators, which pydantic puts among the names of fields.
_NO_FIELD = re.compile(r"\W|^(str|int|bool|float|dict|list|[A-Z]\w*)$")


class ApiError(HTTPException):
    """An error of a status, with the field that caused it and a code that programs read."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        said = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


def error_of_user(error: UserError, param: str | None = None) -> ApiError:
    """Status 400 for what the engine refuses, which begins with the name of a field."""
    message = " ".join(_SOURCES.sub("", str(error)).split())
    found = _FIELD_NAME.match(message)
    return ApiError(400, message, param or (found[0] if found else None))


def error_of_fields(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Status 400 for the first of the mistakes that pydantic found in a body."""
    first = errors[0]
    names = [str(part) for part in first["loc"] if part != "body"]
    names = [name for name in names if not _NO_FIELD.search(name)] or None
    param = ".".join(names)[:200] if names else None
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    if names is None and (named := _FIELD_NAME.match(message)):
        param = named[0]
    if first["type"] == "extra_forbidden":
        message = "there is no such field"
    elif first["type"] == "missing":
        message = "it is missing" if names else "give a JSON object"
    elif names and first["type"] != "value_error":
        message = f"{message}, not {reprlib.repr(first['input'])}"
    return ApiError(400, f"{param}: {message}" if names else message, param)
