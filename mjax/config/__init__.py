"""Typed configuration: what may be set (`schema.py`), how (`load.py`), what is illegal."""

from mjax.config.load import (
    add_config_arguments,
    config_from_args,
    dump,
    json_schema,
    load,
)
from mjax.config.schema import Config
from mjax.config.validate import mesh_sizes, validate

__all__ = [
    "Config",
    "add_config_arguments",
    "config_from_args",
    "dump",
    "json_schema",
    "load",
    "mesh_sizes",
    "validate",
]
