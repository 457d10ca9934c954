"""Fake CPU devices, on which laws are proved: what XLA must be told before JAX starts.

Shapes there are tiny, so compiling is most of the time. Nothing here needs jax.
"""

from importlib.metadata import version

_FUSION_EMITTERS = "xla_cpu_use_fusion_emitters"  # they double the time to compile
_WITHOUT_EMITTERS = "xla_cpu_disable_new_fusion_emitters"  # in jax 0.11; 0.12 always has them


def fake_devices(count: int) -> str:
    """The XLA_FLAGS for `count` CPU devices, whose programs compile fast and run slowly."""
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    flags += " --xla_cpu_parallel_codegen_split_count=1"  # fewer modules of LLVM: a tenth less time
    if _has_flag():
        return f"{flags} --{_FUSION_EMITTERS}=false"
    return f"{flags} --xla_backend_extra_options={_WITHOUT_EMITTERS}"


def usual_fusions() -> dict[str, bool]:
    """Options for XLA with which jax 0.10 compiles one program as without `fake_devices`.

    Programs that differ then round equal expressions alike, where bits are compared. In jax
    0.11 they round alike either way.
    """
    return {_FUSION_EMITTERS: True} if _has_flag() else {}


def _has_flag() -> bool:
    """Whether XLA knows the flag, which went with jax 0.11."""
    major, minor = map(int, version("jax").split(".")[:2])
    return (major, minor) < (0, 11)
