"""THE table of GPUs: what data sheets say of those that mjax knows.

Sources: NVIDIA's data sheets of the A100, H100, H200, B200, L4, L40S and GH200; nvidia-smi for the
memory in bytes of the H200 (143,771 MiB). Rates are decimal: GB/s are 1e9 bytes a second.
"""

import os
import re
from dataclasses import dataclass, replace

from mjax.errors import UserError

# The share of a device's memory that JAX takes, as the H200s of docs/performance.md reported it.
JAX_FRACTION = 0.92
FRACTION_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


@dataclass(frozen=True)
class Details:
    """The facts of a GPU that a plan for it needs.

    fp8_tflops: dense peak; None: no FP8. memory: bytes. memory_gbs: peak of its memory. link_gbs:
    to other GPUs of its node, each way. node: GPUs of the usual node. capability: compute
    capability. multiprocessors, clock_ghz, l2_bytes, shared_bytes (of a block): for the compiler.
    """

    fp8_tflops: float | None
    memory: int
    memory_gbs: float
    link_gbs: float
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    node: int = 8

    @property
    def usable(self) -> int:
        """Bytes that JAX may use, by the environment's fraction if one is set."""
        fraction = JAX_FRACTION
        for name in FRACTION_VARIABLES:
            text = os.environ.get(name)
            if text:
                fraction = _fraction(name, text)
        return int(self.memory * fraction)


def _fraction(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"environment variable {name}={text!r} is not a number; mend it") from None


@dataclass(frozen=True)
class Chip:
    """A kind of GPU.

    kind: the start of jax's device_kind. bf16_tflops: the dense peak of its tensor cores. name:
    what `--on` calls it; a chip with a name has details.
    """

    kind: str
    bf16_tflops: float
    name: str | None = None
    details: Details | None = None


_A100 = Details(
    fp8_tflops=None,
    memory=85_899_345_920,
    memory_gbs=2039,
    link_gbs=300,
    capability=(8, 0),
    multiprocessors=108,
    clock_ghz=1.41,
    l2_bytes=41_943_040,
    shared_bytes=166_912,
)
_H100 = Details(
    fp8_tflops=1979,
    memory=85_520_809_984,
    memory_gbs=3350,
    link_gbs=450,
    capability=(9, 0),
    multiprocessors=132,
    clock_ghz=1.98,
    l2_bytes=52_428_800,
    shared_bytes=232_448,
)
_H200 = replace(_H100, memory=150_754_820_096, memory_gbs=4800, l2_bytes=62_914_560)
_B200 = Details(
    fp8_tflops=4500,
    memory=192_000_000_000,
    memory_gbs=8000,
    link_gbs=900,
    capability=(10, 0),
    multiprocessors=148,
    clock_ghz=1.965,
    l2_bytes=132_120_576,
    shared_bytes=232_448,
)

# The first whose kind begins a device_kind counts.
CHIPS = (
    Chip("NVIDIA GB300", 2500.0),
    Chip("NVIDIA B300", 2250.0),
    Chip("NVIDIA GB200", 2500.0),
    Chip("NVIDIA B200", 2250.0, "b200", _B200),
    Chip("NVIDIA GH200", 989.0),
    Chip("NVIDIA H200 NVL", 835.0),
    Chip("NVIDIA H200", 989.0, "h200", _H200),
    Chip("NVIDIA H100 PCIe", 756.0),
    Chip("NVIDIA H100 NVL", 835.0),
    Chip("NVIDIA H100", 989.0, "h100", _H100),
    Chip("NVIDIA A100", 312.0, "a100", _A100),
    Chip("NVIDIA L40S", 362.0),
    Chip("NVIDIA L4", 121.0),
)


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of jax's device_kind; None: not known."""
    return next((chip for chip in CHIPS if re.match(rf"{chip.kind}\b", device_kind)), None)


def named_chips() -> dict[str, Chip]:
    """The chips that `--on` knows, by name."""
    return {chip.name: chip for chip in CHIPS if chip.name is not None}
