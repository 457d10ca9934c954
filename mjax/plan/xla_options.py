"""Compiler options that XLA for GPUs does not choose by itself. Their one home.

They are given to each compilation (`jax.jit(compiler_options=)`), never to XLA_FLAGS: there a name
that a jaxlib does not know ends the process, here it is an error that `accepted` turns into an
answer. So every option is tried on a trivial program first.
"""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mjax.config.mesh_rules import mesh_sizes
from mjax.config.schema import Config, MeshConfig
from mjax.errors import UserError
from mjax.models.tp_overlap import MIN_ROWS

log = logging.getLogger(__name__)

# ppermute as a copy by the source's copy engine: on four H200s 360 GB/s and no multiprocessor taken
# from matmuls, where NCCL's kernels make 80. One at a time may run beside another collective.
COPIES = (
    ("xla_gpu_collective_permute_mode", "COLLECTIVES_PEER_MEMORY"),
    ("xla_gpu_experimental_parallel_collective_overlap_limit", 2),
)
# ZeRO-3: gathers of weights run beside reductions of gradients ..
BESIDE = (("xla_gpu_experimental_parallel_collective_overlap_limit", 2),)
# .. and the body of a loop over layers gathers the next one's weights while it uses the present
# one's. Where layers are unrolled, starting early only costs memory.
PREFETCH = (
    ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON"),
    ("xla_gpu_experimental_collective_start_as_early_as_possible", True),
    ("xla_gpu_experimental_parallel_collective_overlap_limit", 8),
)
# all_to_all likewise: beside matmuls NCCL's kernels cost more than they hide. ZeRO's gathers that
# hide are all_to_alls too (`Parallel.spread`).
EXCHANGES = (("xla_gpu_use_memcpy_local_p2p", True),)
# XLA's own kernels for 8-bit matmuls reach a fraction of cuBLASLt's speed.
CUBLAS = (("xla_gpu_enable_triton_gemm", False),)


def compiler_options(
    cfg: Config, devices: Sequence[jax.Device], overlaps: bool, hides: bool
) -> dict[str, str | bool]:
    """What programs of `cfg` are compiled with on `devices`; `overlaps`: tp's exchanges run under
    matmuls; `hides`: ZeRO's do."""
    if devices[0].platform == "cpu":
        return {}
    wanted = {
        CUBLAS: cfg.precision.fp8 != "none",
        COPIES: overlaps and can_copy(devices),
        EXCHANGES: hides,
        BESIDE: cfg.mesh.zero == 3,
        PREFETCH: cfg.mesh.zero == 3 and cfg.mesh.pp == 1 and cfg.train.unroll == 1,
    }
    good = [options for options, on in wanted.items() if on and accepted(options, devices[0])]
    return {name: value for options in good for name, value in options}


def overlap_rows(
    mesh: MeshConfig, devices: Sequence[jax.Device], uniform: bool = True
) -> int | None:
    """Tokens in a tp shard from which on exchanges overlap matmuls; None: never. They are permutes,
    which wait for all devices: not `uniform`, where only some devices run a layer, rules them out.
    """
    if mesh.tp == 1 or mesh.tp_overlap == "never":
        return None
    if mesh.tp_overlap == "always":
        if not uniform:
            raise UserError(
                "mesh.tp_overlap=always needs stages of equal layers, but those of mesh.pp differ "
                "in number or kind; set mesh.tp_overlap=auto"
            )
        return 0
    power_of_two = mesh.tp & (mesh.tp - 1) == 0
    if power_of_two and uniform and can_copy(devices):
        return MIN_ROWS
    if devices[0].platform != "cpu":
        log.warning(
            "mesh.tp=%d: exchanges run between the matmuls, not under them (slower): that needs a "
            "power of two, equal stages, one process and a jaxlib with peer-memory permutes",
            mesh.tp,
        )
    return None


def hides(cfg: Config, devices: Sequence[jax.Device], unroll: int) -> bool:
    """Whether ZeRO-1 and 2 exchange what matmuls read, and its gradients, layer by layer under the
    others' matmuls: where unrolled layers keep all of the only micro-batch (of several most run
    without any exchange) and GPUs can copy."""
    mesh, train, sizes = cfg.mesh, cfg.train, mesh_sizes(cfg.mesh, len(devices))
    alone = train.global_batch_size <= train.micro_batch_size * sizes["dp"] * sizes["ep"]
    kept = train.remat == "none" and mesh.pp == 1 and unroll == 0
    possible = devices[0].platform == "cpu" or can_copy(devices, EXCHANGES)
    return mesh.zero in (1, 2) and alone and kept and possible


def can_copy(devices: Sequence[jax.Device], options: tuple = COPIES) -> bool:
    """Whether GPUs can write into each other's memory: those of one process, by this jaxlib."""
    local = len({d.process_index for d in devices}) == 1
    return devices[0].platform != "cpu" and local and accepted(options, devices[0])


@functools.cache
def accepted(options: tuple[tuple[str, str | bool], ...], device: jax.Device) -> bool:
    """Whether the compiler for `device` knows `options`."""
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative).lower(x).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            return False
        raise
    return True
