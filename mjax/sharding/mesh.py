"""The five-axis device mesh (pp, dp, ep, cp, tp), outer to inner, always all five; its processes.

Inner axes are nearest neighbors, so tensor parallelism stays on the fastest links. Megatron's
data-parallel size equals our dp * ep. A run is one process, or one for each node or GPU.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mjax.config.rules.mesh_rules import folds_experts, mesh_sizes
from mjax.config.schema.run import Config, MeshConfig
from mjax.errors import LostProcess, UserError, first_line
from mjax.sharding.collectives import AXES, Parallel
from mjax.sharding.processes.launcher import find_processes, gpus_of_process, launcher_variables


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `devices` (default: all). Raises `UserError` where sizes do not multiply."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(cfg, len(devices))
    grid = np.array(devices).reshape([sizes[axis] for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def tensor_parallel_mesh(devices: int, option: str, stages: int = 1) -> Mesh | None:
    """The mesh of the first devices, so many over tp in each of `stages` over pp; None for one.

    Raises `UserError`, which begins with `option`, where there are not so many.
    """
    have, count = len(jax.devices()), devices * stages
    if min(devices, stages) < 1 or count > have:
        raise UserError(f"{option}: there are {have} devices; give 1 to {have}")
    if count == 1:
        return None
    sizes = MeshConfig(dp=1, tp=devices, pp=stages)
    return make_mesh(sizes, jax.devices()[:count])


def parallel_of(mesh: Mesh) -> Parallel:
    """The static handle of a mesh; axes it lacks have size 1."""
    return Parallel(**{axis: mesh.shape.get(axis, 1) for axis in AXES})


def parallel_of_run(cfg: Config, sizes: Mapping[str, int]) -> Parallel:
    """The static handle of a training run on a mesh of these sizes."""
    axes = {axis: sizes.get(axis, 1) for axis in AXES}
    return Parallel(**axes, folds_experts=folds_experts(cfg.model, cfg.mesh))


def on_shards(function: Callable, mesh: Mesh | AbstractMesh, inputs, outputs) -> Callable:
    """`function` of local shards, manual over all axes of `mesh`, as one of global arrays.

    `inputs` (a tuple, if there are several) and `outputs` are partitions, or prefixes of their
    trees. JAX does not check what is replicated: the gradient rule relies on that.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def local_part(sharding: NamedSharding, length: int) -> slice:
    """The indices of a sharded dimension of `length`, from the first to the last held here."""
    indices = sharding.addressable_devices_indices_map((length,)).values()
    shards = [index[0].indices(length) for index in indices]
    return slice(min(start for start, _, _ in shards), max(stop for _, stop, _ in shards))


def global_array(part: np.ndarray, sharding: NamedSharding, length: int, first: int) -> jax.Array:
    """A global array with `length` rows, sharded; `part` are its rows from `first` on.

    `part` needs to hold the rows of this process's devices only.
    """

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(length)
        return part[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((length, *part.shape[1:]), sharding, shard)


def replicated(mesh: Mesh, value: np.generic | bool) -> jax.Array:
    """A scalar on all devices of `mesh`, laid out as the scalars that a program returns."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(value))


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the other processes of the run, before anything else asks JAX for a device.

    Without arguments the environment decides; a lone process is left as it is. Raises `UserError`
    where something is missing and `LostProcess` where the others cannot be met; JAX ends the
    process when they stay away for five minutes.
    """
    if jax.distributed.is_initialized():
        return
    env = launcher_variables(os.environ, coordinator, num_processes, process_id)
    run = find_processes(env)
    if run is None:
        return
    who = f"process {run.index} of {run.count}, coordinator {run.coordinator}"
    hint = "check that all processes run and reach that address, or set JAX_COORDINATOR_ADDRESS"
    waiting = f"mjax: {who}: still waiting for the others; {hint}"
    # Else JAX takes SIGTERM for itself from here to the first step, and nothing stops the run.
    jax.config.update("jax_enable_preemption_service", False)
    late = threading.Timer(30, lambda: print(waiting, file=sys.stderr, flush=True))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            run.coordinator,
            run.count,
            run.index,
            gpus_of_process(run, env),
            cluster_detection_method="deactivate",
        )
    except RuntimeError as e:
        raise LostProcess(f"{who}: {first_line(e)}; {hint}") from e
    finally:
        late.cancel()
