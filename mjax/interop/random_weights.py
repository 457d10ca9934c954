"""Random weights in place of a model's own, for benchmarks: vLLM's load format "dummy"."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mjax.checkpoint.base.companion_files import tokenizer_dir
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.pretrained import Pretrained, from_pretrained, placed_params
from mjax.interop.sources import config_in
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec, is_spec


def loader_of(load_format: str) -> Callable[..., Pretrained]:
    """`from_pretrained` for auto, `with_random_weights` for dummy."""
    loaders = {"auto": from_pretrained, "dummy": with_random_weights}
    if load_format not in loaders:
        raise UserError(f"load_format={load_format!r}: give {' or '.join(loaders)}")
    return loaders[load_format]


def with_random_weights(
    path: str | Path, mesh: Mesh | None = None, dtype: str = "float32", *, apart: bool = False
) -> Pretrained:
    """The model of `path` with random weights: only its config is read.

    `path`: as for `from_pretrained`, but files of weights may be missing, or a config file.
    """
    cfg = config_in(path)
    params = random_params(cfg, dtype, mesh, apart=apart)
    return Pretrained(cfg, definition_of(cfg), params, mesh, tokenizer_dir(path))


def random_params(
    cfg: ModelConfig, dtype: str = "float32", mesh: Mesh | None = None, *, apart: bool = False
) -> dict:
    """Normal parameters, gains of norms 1, each drawn where it lies; `apart`: layers in lists."""
    definition = definition_of(cfg)

    def drawn(spec: ParamSpec, key: jax.Array, like: object) -> object:
        if isinstance(like, list):
            keys = jax.random.split(key, len(like))
            return [drawn(spec, *of_layer) for of_layer in zip(keys, like, strict=True)]
        deviation = None if spec.role == "norm" else cfg.initializer_range
        return _drawing(like, deviation)(key)

    places = placed_params(definition, dtype, mesh, apart)
    leaves, tree = jax.tree.flatten(definition.specs, is_leaf=is_spec)
    keys = list(jax.random.split(jax.random.key(0), len(leaves)))
    of_each = jax.tree.unflatten(tree, keys)
    return jax.tree.map(drawn, definition.specs, of_each, places, is_leaf=is_spec)


@cache
def _drawing(like: jax.ShapeDtypeStruct, deviation: float | None) -> Callable:
    """A program that draws an array, the same for all layers; without a deviation it is of ones."""

    def draw(key: jax.Array) -> jax.Array:
        if deviation is None:
            return jnp.ones(like.shape, like.dtype)
        return deviation * jax.random.normal(key, like.shape, like.dtype)

    return jax.jit(draw, out_shardings=like.sharding)
