"""The weights that a run with adapters starts from: its base as it is stored, and its adapters.

A weight in NF4 is read and rounded a few layers at a time. So a device never holds more than these
in the dtype of the computation.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.source import THREADS, Index, Path, Source, arrays, run_all
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.interop.adapters_of_run import (
    joined_trees,
    only_adapters,
    start_adapters,
    without_adapters,
)
from mjax.interop.partial_load import Fit
from mjax.interop.principal import take_principal
from mjax.kernels.nf4.parameters import beside, codes_of, is_magnitude, round_weight, wide_spec
from mjax.models.base.adapted import part_path

Arrays = dict[Path, jax.Array]


def outside_nf4(tree: dict, specs: dict) -> dict:
    """The entries of a tree like the parameters that are no part of a weight in NF4."""
    codes, kept = codes_of(specs), {}
    for path, entry in flatten_dict(tree).items():
        if path not in codes and not is_magnitude(path):
            kept[path] = entry
    return unflatten_dict(kept)


def read_nf4(found: Fit, before: Arrays, wanted: dict, specs: dict, cfg: Config) -> Arrays:
    """Weights in NF4 from fitted weights, and the adapters that took their principal parts.

    `wanted` are canonical shapes with shardings of the parameters, which `specs` declare. `before`
    are those of earlier sources. Raises `UserError` where no source has a weight whole.
    """
    read, places = dict(before), flatten_dict(wanted)
    for path in codes_of(specs):
        if found.shared[path] == found.wanted[path]:
            read |= _read_one(found, path, places, specs, cfg)
        elif path not in before:
            raise UserError(
                f"lora.base=nf4: {found.source.name} do not have {'.'.join(path)} whole, and drawn "
                "weights are not rounded to 4 bits here; use lora.base=compute"
            )
    return read


def _read_one(found: Fit, path: Path, places: dict, specs: dict, cfg: Config) -> Arrays:
    """A weight in NF4 and the adapter that took its principal part.

    Layers are read and rounded a few at a time, unless devices hold different ones.
    """
    spec, sharding = codes_of(specs)[path], places[path].sharding
    shape, dtype = wide_spec(spec).shape, jnp.dtype(cfg.precision.compute)
    of_layers = {}
    for other, place in places.items():
        if other == path or other[:-1] == beside(path):
            of_layers[other] = place.sharding
    rounding = functools.partial(round_weight, path=path, spec=spec)
    round_in_place = jax.jit(rounding, out_shardings=of_layers)

    def read(first: int, count: int) -> jax.Array:
        leaf = jax.ShapeDtypeStruct((count, *shape[1:]), dtype, sharding=sharding)
        loaded = arrays(_from_layer(found.source, first), unflatten_dict({path: leaf}))
        return flatten_dict(loaded)[path]

    def rounded(value: jax.Array) -> Arrays:
        value, adapter = _principal_part(value, path, specs, cfg)
        return adapter | jax.block_until_ready(round_in_place(value))

    if not spec.lead or sharding.shard_shape(shape)[0] != shape[0]:
        return rounded(read(0, shape[0]))
    parts = []
    for first in range(0, shape[0], THREADS):
        layers = range(first, min(first + THREADS, shape[0]))
        values = run_all([functools.partial(read, layer, 1) for layer in layers])
        while values:
            parts.append(rounded(values.pop(0)))
    return {name: _stack_again([part[name] for part in parts]) for name in parts[0]}


def _from_layer(source: Source, first: int) -> Source:
    """A source whose stacks begin at a layer."""

    def read(path: Path, index: Index) -> np.ndarray:
        rows = slice(index[0].start + first, index[0].stop + first)
        return source.read(path, (rows, *index[1:]))

    return replace(source, read=read)


def _stack_again(layers: list[jax.Array]) -> jax.Array:
    """Stacks [1, ..] as one, with their sharding."""
    return jax.jit(jnp.concatenate, out_shardings=layers[0].sharding)(layers)


def whole_base(base: dict, in_nf4: Arrays, specs: dict, cfg: Config) -> tuple[dict, Arrays]:
    """(canonical parameters of a base, the adapters that took their principal parts, by path).

    `base` are those outside NF4, `in_nf4` is what `read_nf4` found.
    """
    plain, taken = flatten_dict(base), {}
    for path in plain:
        plain[path], adapter = _principal_part(plain[path], path, specs, cfg)
        taken |= adapter
    joined = joined_trees(unflatten_dict(plain), unflatten_dict(in_nf4))
    taken |= flatten_dict(only_adapters(joined))
    return without_adapters(joined), taken


def with_adapters(base: dict, taken: Arrays, wanted: dict, specs: dict, cfg: Config) -> dict:
    """A base with the adapters that a run begins with: those of `whole_base`, and new ones.

    `wanted` are canonical shapes with shardings of the parameters, which `specs` declare.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, only_adapters(wanted))
    start = functools.partial(
        start_adapters,
        specs=specs,
        key=jax.random.key(cfg.run.seed),
        init=cfg.lora.init,
    )
    started = flatten_dict(jax.jit(start, out_shardings=shardings)(base))
    for path, adapter in taken.items():
        started[path] = jax.device_put(adapter, started[path].sharding)
    return joined_trees(base, unflatten_dict(started))


def _principal_part(
    value: jax.Array, path: Path, specs: dict, cfg: Config
) -> tuple[jax.Array, Arrays]:
    """(what a weight keeps, the adapter that took its principal part), if it has such a one."""
    declared = flatten_dict(specs)
    a, b = (part_path(path, name) for name in "ab")
    if cfg.lora.init != "pissa" or a not in declared:
        return value, {}
    if declared[path].matmul is None:
        return value, {}
    rest, of_a, of_b = take_principal(value, declared[path], declared[b])
    return rest, {a: of_a, b: of_b}
