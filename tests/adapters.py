"""Random adapters of any model, in mjax's layout."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.base.source import flat
from mjax.checkpoint.merged import Adapters
from mjax.models.base.adapted import join_adapters, part_path, part_shapes
from mjax.models.base.weight import WeightOrArray, is_weight, value_with_adapter
from mjax.sharding.spec import ParamSpec, is_spec


def of_matmuls(spec: ParamSpec) -> bool:
    return spec.matmul is not None


def drawn_adapters(
    specs: dict,
    targets: Callable[[ParamSpec], bool] = of_matmuls,
    rank: int = 4,
    scale: float = 2.0,
    dora: bool = False,
    **others: object,
) -> Adapters:
    """Adapters of the weights that `targets` picks; every number of them is drawn."""
    rng, arrays, scales = np.random.default_rng(0), {}, {}
    for path, spec in flat(specs).items():
        if not targets(spec):
            continue
        scales[path] = scale
        for name, shape in part_shapes(spec, rank).items():
            values = rng.normal(0.0, 0.15, shape).astype(np.float32)
            if name != "magnitude":
                arrays[part_path(path, name)] = values
            elif dora:
                arrays[part_path(path, name)] = 1.0 + np.abs(values)
    return Adapters(arrays, scales, **others)


def adapted_values(params: dict, specs: dict) -> dict:
    """Canonical parameters with adapters -> those of the model without, each adapter added.

    Weights in NF4 become fp32.
    """
    weights, declared = join_adapters(params, specs)

    def value(spec: ParamSpec, entry: WeightOrArray) -> jax.Array:
        if not is_weight(entry):
            return entry
        of_each = functools.partial(value_with_adapter, dtype=jnp.dtype(jnp.float32))
        for _ in range(spec.lead):
            of_each = jax.vmap(of_each)
        return of_each(entry)

    return jax.tree.map(value, declared, weights, is_leaf=is_spec)
