"""Runs our Triton kernels on CPUs, in Triton's interpreter, on numpy arrays behind a callback.

The interpreter knows no inline PTX, no libdevice and no sums of pairs: numpy takes the place of the
helpers that are such. It truncates where a GPU rounds to the nearest number, and saturates:
ml_dtypes does so here. The helpers, the GPU's own rounding, and what compiling adds, are tested on
GPUs only (tests/gpu).
"""

import functools
import sys
import threading
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mjax.kernels.base.device_facts import has_triton

_ONE = threading.Lock()  # devices call back beside each other; the interpreter's state is global


def interpret(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Interpret kernels in calls that are traced from now on. Returns what will list their names.

    Skips the test where triton is not installed. jax-triton, which needs jax for GPUs, is not used.
    """
    pytest.importorskip("triton", reason="needs triton (extra test, on Linux)")
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    def call(function: JITFunction, *args, **kwargs):
        if function.__name__ in HELPERS:
            return _in_numpy(HELPERS[function.__name__], *args)
        return _rewritten(function.fn)(*args, **kwargs)

    def sums(self, inputs):
        assert self.combine_fn.__name__ == "_add"
        values = [np.sum(a.handle.data, self.axis, keepdims=self.keep_dims) for a in inputs]
        return [self.to_tensor(v, a.dtype) for v, a in zip(values, inputs, strict=True)]

    def splat(self, type_, value):  # the interpreter's own makes integers of a comparison
        data = np.full(type_.shape, value.data, value.data.dtype)
        return interpreter.TensorHandle(data, value.dtype.scalar)

    has_triton()  # remembers what is true of this machine before the module below is pretended
    names = []

    def triton_call(
        *inputs, kernel, out_shape, grid, num_warps, input_output_aliases, **constants
    ) -> list[jax.Array]:
        def run(*arrays):
            read = [np.array(a) for a in arrays]
            made = [np.full(s.shape, 7, s.dtype) for s in out_shape]
            for i, o in input_output_aliases.items():
                made[o] = read[i]
            with _ONE, np.errstate(invalid="ignore"):  # inf - inf
                _run(kernel, grid[0], [*read, *made], constants)
            return made

        names.append(kernel.__name__)
        return jax.pure_callback(run, out_shape, *inputs)

    module = SimpleNamespace(triton_call=triton_call, __spec__=ModuleSpec("jax_triton", None))
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    monkeypatch.setattr(JITFunction, "__call__", call)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", sums)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat)
    monkeypatch.setattr(interpreter, "_convert_float", _converted)
    return names


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jax.numpy.bfloat16).astype(np.float32)


def _converted(x: np.ndarray, source, target, mode) -> np.ndarray:
    """The bits of x, which has those of `source`, as `target`."""
    wide = x.view(FLOATS[source.name]).astype(np.float32)
    if target.primitive_bitwidth == 8:
        top = float(jax.numpy.finfo(FLOATS[target.name]).max)
        wide = np.clip(wide, -top, top)
    return wide.astype(FLOATS[target.name])


FLOATS = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": jax.numpy.bfloat16,
    "fp8e4nv": jax.numpy.float8_e4m3fn,
    "fp8e5": jax.numpy.float8_e5m2,
}


def _codes(x: np.ndarray, half: str) -> np.ndarray:
    codes = x.view(np.uint8).reshape(*x.shape, 2)[..., ("low", "high").index(half)]
    return codes.view(jax.numpy.float8_e4m3fn).astype(np.float16)


HELPERS = {
    "sigmoid": _sigmoid,
    "power_of_two": np.exp2,
    "reciprocal": np.reciprocal,
    "rounded_to_bf16": _rounded,
    "tanh": np.tanh,
    "half_of_codes": _codes,
}


def _in_numpy(function, x, *constants):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    found = function(np.ascontiguousarray(x.handle.data), *constants)
    dtype = tl.float16 if found.dtype == np.float16 else x.dtype  # the rest keep theirs
    return tl.tensor(TensorHandle(found, dtype), x.type.with_element_ty(dtype))


@functools.cache
def _rewritten(function):
    """A kernel, or a function that it calls, as the interpreter wants it."""
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function).rewrite()


def _run(kernel, programs: int, arrays: list[np.ndarray], constants: dict) -> None:
    """All programs of a kernel, one after the other."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import mangle_type

    def pointer(a):
        kind = SimpleNamespace(dtype=str(a.dtype), data_ptr=lambda: a.ctypes.data)
        dtype = tl.str_to_ty(mangle_type(kind), None)
        return tl.tensor(
            interpreter.TensorHandle(np.array([a.ctypes.data], np.uint64), dtype), dtype
        )

    params = dict(zip(kernel.arg_names, map(pointer, arrays), strict=False)) | constants
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())  # for numpy 2.5
    builder = interpreter.interpreter_builder
    try:
        builder.set_grid_dim(programs, 1, 1)
        for program in range(programs):
            builder.set_grid_idx(program, 0, 0)
            _rewritten(kernel.fn)(**params)
    finally:
        scope.restore()
