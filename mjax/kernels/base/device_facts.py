"""Facts of a GPU that the choice of a kernel depends on: its generation, its memory, Triton."""

import functools
import importlib.util

import jax

BLACKWELL = "10.0", "10.3"  # compute capabilities that multiply scaled blocks by cuDNN


def on_hopper(device: jax.Device | None = None) -> bool:
    """Whether a device, or the default one, is a Hopper GPU, and jax can use Mosaic kernels."""
    return _capability(device) == "9.0"


def on_blackwell(device: jax.Device | None = None) -> bool:
    """Whether a device, or the default one, is a Blackwell GPU, and jax multiplies its blocks."""
    return _capability(device) in BLACKWELL


def _capability(device: jax.Device | None) -> str:
    """The compute capability, or "" of other devices than GPUs and if jax is too old to use it."""
    device = jax.devices()[0] if device is None else device
    return str(getattr(device, "compute_capability", "")) if jax.__version_info__ >= (0, 11) else ""


@functools.cache
def has_triton() -> bool:
    """Whether our Triton kernels can be compiled."""
    return all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))


def rounded_memory(size: int | None) -> int | None:
    """The largest power of two within a number of bytes, None for none: GPUs of a kind differ by a
    few megabytes, and all processes must choose alike."""
    return 1 << size.bit_length() - 1 if size else None
