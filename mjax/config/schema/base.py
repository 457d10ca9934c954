"""The base of all groups of the config."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Group(BaseModel):
    """Base of all groups: frozen, strict about keys and types. A text below a key describes it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Name what differs from the defaults: all keys would fill a page of a notebook."""
        fields = type(self).model_fields
        return [(k, v) for k, v in super().__repr_args__() if k and v != fields[k].default]
