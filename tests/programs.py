"""Programs that this process has compiled, kept in memory: tests of a file compile many again.

A run and the one that goes on from its checkpoint have the same programs, as have runs that differ
in their data. What is kept is the loaded program itself. Nothing is written and read again, which
XLA's collectives of several CPU devices may not survive (`tests/conftest.py`).
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps

from jax._src import compiler  # jax keeps no program whose function is gone

KEPT = 64  # programs; the one used longest ago goes first


def keep_programs() -> None:
    """Let jax compile no program that is kept already."""
    compiler.backend_compile_and_load = kept(compiler.backend_compile_and_load)


def kept(compile_and_load: Callable) -> Callable:
    """`compile_and_load` with a memory of what it has made.

    Two calls share a program if its text without places in source files, the devices, and all
    options are the same. A program that calls Python is made anew, as it holds an address, and one
    for a described GPU, whose devices are described anew each time.
    """
    programs: OrderedDict[bytes, object] = OrderedDict()
    lock = threading.Lock()  # engines compile in several threads

    @wraps(compile_and_load)
    def compile_or_take(backend, module, devices, options, host_callbacks):
        on_cpu = backend.platform == "cpu"
        text = module.operation.get_asm(enable_debug_info=False) if on_cpu else ""
        if not on_cpu or host_callbacks or "callback" in text:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        parts = text, repr(backend), repr(devices), options.SerializeAsString()
        key = hashlib.sha256(repr(parts).encode()).digest()
        with lock:
            made = programs.pop(key, None)
        if made is None:
            made = compile_and_load(backend, module, devices, options, host_callbacks)
        with lock:
            programs[key] = made  # as the last one
            if len(programs) > KEPT:
                programs.popitem(last=False)
        return made

    return compile_or_take
