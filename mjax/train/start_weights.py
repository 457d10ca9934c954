"""The weights that a run with adapters starts from: its base as it is stored, and its adapters.

A weight in NF4 is read and rounded before the next one is read. So no device ever holds more than
one of them in the dtype of the computation.
"""

import functools

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.source import arrays
from mjax.errors import UserError
from mjax.interop.partial_load import Fit
from mjax.models.base.adapted import ADAPTER, joined_trees, only_adapters
from mjax.models.base.nf4_base import NF4, codes_of, in_nf4, is_of_nf4, wide_spec
from mjax.models.base.principal import take_principal
from mjax.train.state import StateLayout

Path = tuple[str, ...]
Arrays = dict[Path, jax.Array]


def outside_nf4(tree: dict, specs: dict) -> dict:
    """The entries of a tree like the parameters that are no part of a weight in NF4."""
    codes, flat = codes_of(specs), flatten_dict(tree)
    return unflatten_dict({p: x for p, x in flat.items() if p not in codes and not is_of_nf4(p)})


def read_nf4(found: Fit, before: Arrays, wanted: dict, layout: StateLayout) -> Arrays:
    """Weights in NF4 from fitted weights, and the adapters that took their principal parts.

    `wanted` are canonical shapes with shardings of the parameters. `before` are those of earlier
    sources. Raises `UserError` where no source has a weight whole.
    """
    read = dict(before)
    for path in codes_of(layout.specs):
        if found.shared[path] == found.wanted[path]:
            read |= _read_one(found, path, wanted, layout)
        elif path not in before:
            raise UserError(
                f"lora.base=nf4: the weights to start from do not have {'.'.join(path)} whole, and "
                "drawn weights are not rounded to 4 bits here; use lora.base=compute"
            )
    return read


def _read_one(found: Fit, path: Path, wanted: dict, layout: StateLayout) -> Arrays:
    places, spec = flatten_dict(wanted), codes_of(layout.specs)[path]
    shape, dtype = wide_spec(spec).shape, jnp.dtype(layout.cfg.precision.compute)
    leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=places[path].sharding)
    value = flatten_dict(arrays(found.source, unflatten_dict({path: leaf})))[path]
    value, made = _principal_part(value, path, layout)
    beside = *path[:-1], path[-1] + NF4
    shardings = {p: x.sharding for p, x in places.items() if p == path or p[:-1] == beside}
    program = jax.jit(functools.partial(in_nf4, path=path, spec=spec), out_shardings=shardings)
    return made | jax.block_until_ready(program(value))


def with_adapters(base: dict, read: Arrays, wanted: dict, layout: StateLayout) -> dict:
    """Canonical parameters of a run from its base outside NF4 and what `read_nf4` found."""
    flat, taken = flatten_dict(base), {}
    for path in flat:
        flat[path], made = _principal_part(flat[path], path, layout)
        taken |= made
    base = joined_trees(unflatten_dict(flat), unflatten_dict(read))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, only_adapters(wanted))
    started = jax.jit(layout.start_adapters, out_shardings=shardings)(base)
    places = flatten_dict(shardings)
    taken |= flatten_dict(only_adapters(base))
    taken = {path: jax.device_put(x, places[path]) for path, x in taken.items()}
    return joined_trees(base, started, unflatten_dict(taken))


def _principal_part(value: jax.Array, path: Path, layout: StateLayout) -> tuple[jax.Array, Arrays]:
    """(what a weight keeps, the adapter that took its principal part), if it has such a one."""
    beside, specs = (*path[:-1], path[-1] + ADAPTER), flatten_dict(layout.specs)
    is_asked = layout.cfg.lora.init == "pissa" and specs[path].matmul is not None
    if not is_asked or (*beside, "a") not in specs:
        return value, {}
    value, a, b = take_principal(value, specs[path], specs[*beside, "b"])
    return value, {(*beside, "a"): a, (*beside, "b"): b}
