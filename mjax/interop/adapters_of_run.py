"""The adapters of a run beside its base: apart from it, and as a run begins, as PEFT draws them."""

import functools
import math

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.kernels.nf4.parameters import value_of_base
from mjax.models.base.adapted import adapter_sides, base_of, is_of_adapter
from mjax.models.base.adapter import lengths
from mjax.sharding.spec import ParamSpec


def only_adapters(tree: dict) -> dict:
    """The entries of a tree like the parameters that are parts of adapters."""
    flat = flatten_dict(tree)
    return unflatten_dict({path: entry for path, entry in flat.items() if is_of_adapter(path)})


def without_adapters(tree: dict) -> dict:
    """The other entries."""
    flat = flatten_dict(tree)
    return unflatten_dict({path: entry for path, entry in flat.items() if not is_of_adapter(path)})


def joined_trees(*trees: dict) -> dict:
    """One tree of the entries of several; a later one goes before an earlier one."""
    entries: dict = {}
    for tree in trees:
        entries |= flatten_dict(tree)
    return unflatten_dict(entries)


def start_adapters(base: dict, specs: dict, key: jax.Array, init: str = "zero") -> dict:
    """Adapters before the first step, fp32, beside canonical parameters `base`; to be traced.

    `specs` declare both. They start as PEFT's: a is uniform within 1/sqrt(inputs), b is zero, and a
    length is that of the base. With the `init` "gaussian" a is normal with deviation 1/r. For a
    table [V, D] a is zero. b is then normal for an embedding, and uniform within 1/sqrt(D) for a
    head.
    """
    params, declared, started = flatten_dict(base), flatten_dict(specs), {}
    adapters = sorted(path for path in declared if is_of_adapter(path))
    for number, path in enumerate(adapters):
        spec, of_base = declared[path], declared[base_of(path)]
        drawn = "a" if of_base.matmul else "b"
        if path[-1] == "magnitude":
            of_each = functools.partial(lengths, inputs=of_base.inputs)
            for _ in range(of_base.lead):
                of_each = jax.vmap(of_each)
            value = value_of_base(params, base_of(path), of_base)
            started[path] = of_each(value)
        elif path[-1] == drawn:
            own = jax.random.fold_in(key, number)
            if init == "gaussian" and of_base.matmul:
                started[path] = jax.random.normal(own, spec.shape) / spec.shape[-1]
            else:
                started[path] = _first_values(own, spec, of_base)
        else:
            started[path] = jnp.zeros(spec.shape, jnp.float32)
    return unflatten_dict(started)


def _first_values(key: jax.Array, spec: ParamSpec, of_base: ParamSpec) -> jax.Array:
    """The matrix of an adapter that does not start at zero."""
    if of_base.role == "embedding":
        return jax.random.normal(key, spec.shape)
    _, inputs, outputs = spec.matrix_view()
    summed = inputs if of_base.matmul else outputs
    limit = math.prod(spec.shape[i] for i in summed) ** -0.5
    return jax.random.uniform(key, spec.shape, minval=-limit, maxval=limit)


def wide_adapters(specs: dict) -> list[str]:
    """A line on adapters with a rank that their weights cannot have, if there are such."""
    flat, found = flatten_dict(specs), []
    for path, spec in flat.items():
        if is_of_adapter(path) and path[-1] == "a":
            sides = adapter_sides(spec, flat[*path[:-1], "b"])
            if spec.shape[-1] > min(sides):
                name = ".".join(base_of(path))
                found.append(f"{name} ({sides[0]} x {sides[1]}) can have {min(sides)} at most")
    return [f"WARNING: lora.rank: {found[0]}; lower it in lora.rank_pattern"] if found else []
