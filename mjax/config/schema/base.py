"""The base of all groups of the config."""

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
