"""Weights that recipes of blocks round: on each device they must be whole blocks."""

import math

from flax.traverse_util import flatten_dict

from mjax.config.schema.run import PrecisionConfig
from mjax.errors import UserError
from mjax.kernels.fp8.recipe import recipe_of
from mjax.sharding.collectives import Parallel, mesh_axes
from mjax.sharding.rules import REPLICABLE, is_partly_read, weight_partition
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec


def require_blocks_of_recipes(specs: dict, parallel: Parallel, precision: PrecisionConfig) -> None:
    """Raise `UserError` for a weight that a device does not have in whole blocks of its recipe.

    Blocks that end within a device's part would be scaled otherwise than on one device.
    """
    recipes = {name: recipe_of(precision, name) for name in precision.fp8_recipes}
    for path, spec in flatten_dict(specs).items():
        recipe = recipes.get(spec.recipe)
        if recipe is None or recipe.scales_tensors or not spec.takes_fp8:
            continue
        sides = sides_on_device(spec, parallel)
        if any(n % recipe.side for n in sides):
            name = ".".join(path)
            raise UserError(
                f"precision.fp8={recipe.name}: a device has matrices [{sides[0]}, {sides[1]}] of "
                f"{name}, which are no whole blocks of {recipe.side}; change mesh.tp or the "
                "model's sizes, or leave it in precision.compute: "
                f"precision.fp8_rules=[[{name}, none]]"
            )


def sides_on_device(spec: ParamSpec, parallel: Parallel) -> tuple[int, int]:
    """The inputs and outputs of each matrix of a weight on one device.

    If it reads a part of the weight, the outputs are those of one head.
    """
    is_part = is_partly_read(spec, parallel)
    cut = (*weight_partition(spec, parallel), *[None] * len(spec.shape))
    sizes = []
    for name, size, entry in zip(spec.axes, spec.shape, cut, strict=False):
        alone = name in ENUMERATING_AXES or (is_part and name in REPLICABLE)
        sizes.append(1 if alone else size // parallel.size(*mesh_axes((entry,))))
    first = spec.lead + spec.inputs
    return math.prod(sizes[:first]), math.prod(sizes[first:])
