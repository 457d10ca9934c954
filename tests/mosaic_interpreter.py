"""Runs our Mosaic GPU kernels on CPUs, in Pallas' interpreter of GPUs.

The interpreter lacks copies that add to what is in memory: here they read it first.
"""

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch, races: bool = False) -> Iterator[None]:
    """Interpret kernels that are traced here. Skips the test where jax lacks the interpreter.

    With `races`, fails where two threads reach one place in memory in no order.
    """
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip("this jax has no interpreter for Mosaic GPU kernels (0.11 has)")
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    memory = shared_memory.GPUSharedMemory
    copy, store = gpu_callbacks.copy_smem_to_gmem, memory.store_buffer_content
    adding = threading.local()

    def copy_or_add(*, reduction_op, **facts):
        assert reduction_op in (None, "add")
        adding.now = reduction_op == "add"
        try:
            return copy(reduction_op=None, **facts)
        finally:
            adding.now = False

    def store_or_add(self, key, access, values, thread, **facts):
        if getattr(adding, "now", False):
            values = values + self.get_buffer_content(key, access, thread, **facts)[0]
        return store(self, key, access, values, thread, **facts)

    monkeypatch.setattr(gpu_callbacks, "copy_smem_to_gmem", copy_or_add)
    monkeypatch.setattr(memory, "store_buffer_content", store_or_add)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        yield
    assert not races or not gpu_callbacks.get_races().races_found
