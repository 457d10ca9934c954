"""Fake CPU devices, on which laws are proved: what XLA must be told before JAX starts.

Shapes there are tiny, so compiling is most of the time. Nothing here needs jax.
"""

from importlib.metadata import version


def fake_devices(count: int) -> str:
    """The XLA_FLAGS for `count` CPU devices, whose programs compile fast and run slowly."""
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    major, minor = map(int, version("jax").split(".")[:2])
    if (major, minor) < (0, 11):  # later XLA does not know the flag
        flags += " --xla_cpu_use_fusion_emitters=false"  # they double the time to compile
    return flags
