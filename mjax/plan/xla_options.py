"""Compiler options that XLA for GPUs does not choose by itself. Their one home.

They are given to each compilation (`jax.jit(compiler_options=)`), never to XLA_FLAGS: there a name
that a jaxlib does not know ends the process, here it is an error that `accepted` turns into an
answer. So every option is tried on a trivial program first.
"""

import functools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mjax.errors import UserError
from mjax.kernels import choose
from mjax.kernels.base.chooser import CHANNELS_ROWS
from mjax.models.runtime.execution import Execution
from mjax.plan.absent_devices import StandIn
from mjax.plan.execution import DeviceFacts

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
# hide are all_to_alls too (`Parallel.all_gather_by_copies`).
EXCHANGES = (("xla_gpu_use_memcpy_local_p2p", True),)
# XLA's own kernels for 8-bit matmuls reach a fraction of cuBLASLt's speed. Those for bf16 win alone
# and lose within a step of one GPU: CLIP takes 136.5 ms with them and 135.2 without, LLaVA 88.2 and
# 86.5, Llama's layers 1,711 and 1,701, Mixtral's 508 and 506 (docs/lab/2026-11-26-norms.md). To try
# them takes a fifth to a half of the time to compile. Over several GPUs some exchanges of tp and
# ZeRO-3 would hide under no matmul.
MOST_FEW_TOKENS = 256  # rows of a step of decoding
CUBLAS = (("xla_gpu_enable_triton_gemm", False),)
# XLA merges matmuls of one input, and what reads keys and values where their matmul put them would
# find them in a slice of q, k and v. ViT-L: 100.7 ms a step, 103.5 merged.
UNMERGED = (("xla_gpu_dot_merger_threshold_mb", 0),)
# No atomic sums (scatters are sorted first), cuDNN's deterministic backward of attention, and no
# kernel chosen by a measurement. Without measurements XLA's own matmul kernels have no tile size.
# Command buffers are off out of caution (docs/train/debugging.md); their cost was not measured.
# Programs that draw keep them: only within a CUDA graph does the device take branches by itself.
ORDERED = (("xla_gpu_deterministic_ops", True), *CUBLAS)
DETERMINISTIC = (*ORDERED, ("xla_gpu_enable_command_buffer", ""))


def compiler_options(
    execution: Execution,
    tp_overlaps: bool,
    devices: Sequence[jax.Device],
    deterministic: bool = False,
    reads_pairs: bool = False,
    reads_images: bool = False,
) -> dict[str, str | bool]:
    """The XLA options of a program.

    `tp_overlaps`: whether tp's exchanges run under matmuls.
    `deterministic`: whether sums and choices of kernels are to be the same each time.
    `reads_pairs`: whether some attention reads keys and values as one array.
    `reads_images`: whether the model has a tower of images.
    Raises `UserError` where the compiler does not know how.
    """
    if devices[0].platform == "cpu":
        return {}
    if deterministic:
        _require_deterministic("run.deterministic or batch_invariant", devices[0])
    zero3 = execution.gather == "layer" and not execution.overlap
    loop = execution.unroll == 1 and not (execution.pipelined or execution.offload)
    wanted = {
        DETERMINISTIC: deterministic,
        CUBLAS: execution.recipe is not None or reads_images or len(devices) == 1,
        UNMERGED: reads_pairs,
        COPIES: tp_overlaps and can_copy(devices),
        EXCHANGES: execution.overlap,
        BESIDE: zero3,
        PREFETCH: zero3 and loop,
    }
    good = [options for options, on in wanted.items() if on and accepted(options, devices[0])]
    return {name: value for options in good for name, value in options}


def serving_options(
    tokens: int, in_8_bits: bool, device: jax.Device, invariant: bool = False
) -> dict[str, str | bool]:
    """The XLA options of an engine's programs for so many tokens, 0 for those that draw.

    `in_8_bits`: whether the weights of layers are.
    `invariant`: its bits are those of a trainer, so no kernel is chosen by a measurement in either.
    XLA's own kernels read weights for few tokens faster than cuBLAS: Llama-3-8B takes 4.5 ms a
    token with them and 6.8 without. For many tokens they win nothing and are slow to try.
    Raises `UserError` where the compiler does not know how to be invariant.
    """
    if device.platform == "cpu":
        return {}
    if invariant:
        _require_deterministic("batch_invariant", device)
        return dict(DETERMINISTIC if tokens else ORDERED)
    few = CHANNELS_ROWS if in_8_bits else MOST_FEW_TOKENS
    return dict(CUBLAS) if tokens > few and accepted(CUBLAS, device) else {}


def _require_deterministic(key: str, device: jax.Device) -> None:
    """Raise `UserError` where the compiler knows no options for what `key` asks."""
    if not accepted(DETERMINISTIC, device):
        names = " and ".join(name for name, _ in DETERMINISTIC)
        raise UserError(f"{key}: this jaxlib lacks {names}; use another or set it false")


def fix_reduction_order() -> None:
    """Let NCCL sum over GPUs in one order, if the environment does not say how.

    Call it before the first collective. Switches that sum (NVLS) promise no order.
    """
    os.environ.setdefault("NCCL_ALGO", "Ring")


def device_facts(devices: Sequence[jax.Device]) -> DeviceFacts:
    """The facts of devices that `decide_execution` reads."""
    on_cpu = devices[0].platform == "cpu"
    return DeviceFacts(
        on_cpu=on_cpu,
        updates_rows=on_cpu or choose("adam_row", "float32", ()).name != "xla",
        copies_permutes=can_copy(devices, COPIES),
        copies_exchanges=can_copy(devices, EXCHANGES),
    )


def can_copy(devices: Sequence[jax.Device], options: tuple = COPIES) -> bool:
    """Whether GPUs can write into each other's memory: those of one process, by this jaxlib."""
    local = len({d.process_index for d in devices}) == 1
    return devices[0].platform != "cpu" and local and accepted(options, devices[0])


@functools.cache
def accepted(options: tuple[tuple[str, str | bool], ...], device: jax.Device) -> bool:
    """Whether the compiler for `device` knows `options`; without one, yes, as CUDA's wheels do."""
    if isinstance(device, StandIn):
        return True
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative).lower(x).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            return False
        raise
    return True
