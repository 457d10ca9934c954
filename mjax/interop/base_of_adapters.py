"""The weights that a run with adapters starts from: its base as it is stored, and its adapters.

A weight in NF4 is read and rounded before the next one is read. So no device ever holds more than
one of them in the dtype of the computation.
"""

import functools

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.source import arrays
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

Path = tuple[str, ...]
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
                f"lora.base=nf4: the weights to start from do not have {'.'.join(path)} whole, and "
                "drawn weights are not rounded to 4 bits here; use lora.base=compute"
            )
    return read


def _read_one(found: Fit, path: Path, places: dict, specs: dict, cfg: Config) -> Arrays:
    spec = codes_of(specs)[path]
    leaf = jax.ShapeDtypeStruct(
        wide_spec(spec).shape,
        jnp.dtype(cfg.precision.compute),
        sharding=places[path].sharding,
    )
    loaded = arrays(found.source, unflatten_dict({path: leaf}))
    value, adapter = _principal_part(flatten_dict(loaded)[path], path, specs, cfg)
    shardings = {}
    for other, place in places.items():
        if other == path or other[:-1] == beside(path):
            shardings[other] = place.sharding
    rounding = functools.partial(round_weight, path=path, spec=spec)
    rounded = jax.jit(rounding, out_shardings=shardings)(value)
    return adapter | jax.block_until_ready(rounded)


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
