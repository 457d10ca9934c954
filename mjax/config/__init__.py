"""Typed configuration: the keys (`schema/`), how they are read (`load.py`), rules across them."""

from mjax.config.load import add_config_arguments as add_config_arguments
from mjax.config.load import config_from_args as config_from_args
from mjax.config.load import dump as dump
from mjax.config.load import json_schema as json_schema
from mjax.config.load import load as load
from mjax.config.schema.run import Config as Config
from mjax.config.validate import mesh_sizes as mesh_sizes
from mjax.config.validate import validate as validate
