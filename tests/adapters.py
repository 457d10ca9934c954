"""Random adapters of any model, in mjax's layout."""

from collections.abc import Callable

import numpy as np

from mjax.checkpoint.base.source import flat
from mjax.checkpoint.merged import Adapters, part_path, part_shapes
from mjax.sharding.spec import ParamSpec


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
