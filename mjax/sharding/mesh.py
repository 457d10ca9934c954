"""The five-axis device mesh (pp, dp, ep, cp, tp), outer to inner, always all five.

Inner axes are nearest neighbours, so tensor parallelism stays on the fastest links. Megatron's
data-parallel size equals our dp * ep.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mjax.config.schema import MeshConfig
from mjax.sharding.collectives import AXES, Parallel


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of `devices` (default: all). Raises `UserError` where the sizes do not multiply."""
    from mjax.config.validate import mesh_sizes

    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(cfg, len(devices))
    grid = np.array(devices).reshape([sizes[a] for a in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parallel_of(mesh: Mesh) -> Parallel:
    """The static handle of a mesh; axes it lacks have size 1."""
    return Parallel(**{a: mesh.shape.get(a, 1) for a in AXES})
