"""Parameters as generation holds them: in one dtype, and each layer's in arrays of its own.

A step of decoding reads every weight once and computes little, so memory bounds it. XLA copies the
rows of a stack [L, ...] that matmuls read, which doubles the memory traffic. A separate array is
read in place. Invariant: only one parameter is in conversion at a time, so a conversion takes the
memory of the result and of one stack.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mjax.errors import UserError
from mjax.models.runtime.stacks import split_rows
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import weight_partition
from mjax.sharding.spec import ParamSpec, is_spec


def take_apart(specs: dict, params: dict, dtype: jnp.dtype, donate: bool = False) -> dict:
    """Parameters in `dtype` on the devices where they are, stacks [L, ...] as lists of L arrays.

    Parameters of no stack that have the dtype are not copied. A layer's arrays are sharded as the
    stack is, less the axis of layers. `donate` frees each parameter once its copy is made;
    otherwise `params` stay as they are.
    """

    def convert(spec: ParamSpec, old: jax.Array) -> jax.Array | list[jax.Array]:
        wanted = spec.dtype(dtype)
        if not spec.is_stacked and old.dtype == wanted:
            return old
        where = _of_layer(old.sharding) if spec.is_stacked else old.sharding
        function = _cast_rows if spec.is_stacked else _cast
        new = jax.jit(function, static_argnums=1, out_shardings=where)(old, wanted)
        if donate:
            jax.block_until_ready(new)
            old.delete()
        return new

    return jax.tree.map(convert, specs, params, is_leaf=is_spec)


def require_weights(specs: dict, params: dict) -> None:
    """Raise `UserError` for arrays that are not the parameters of a model with these specs."""
    wanted, model = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    if jax.tree.structure(params) != model:
        raise UserError("the weights are not those of this model: other names; give its own")
    for (path, spec), given in zip(wanted, jax.tree.leaves(params), strict=True):
        shape = getattr(given, "shape", None)
        if not isinstance(given, jax.Array) or shape != spec.shape:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise UserError(f"weights: {name} is {type(given).__name__} {shape}, not {spec.shape}")


def partitions_apart(specs: dict, parallel: Parallel) -> dict:
    """The partitions of what `take_apart` gives, as matmuls read it; one for a stack's layers."""

    def of(spec: ParamSpec) -> PartitionSpec:
        if spec.is_stacked:
            spec = replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
        return weight_partition(spec, parallel)

    return jax.tree.map(of, specs, is_leaf=is_spec)


def _cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x.astype(dtype)


def _cast_rows(stack: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    return [row.astype(dtype) for row in split_rows(stack)]


def _of_layer(sharding: Sharding) -> Sharding:
    """The sharding of one layer of a stack."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
