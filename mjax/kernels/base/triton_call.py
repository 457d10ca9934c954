"""A Triton kernel as a JAX function, launched by XLA itself or by jax-triton.

Kernels lie in modules of their own (`*_triton.py`). They import triton, so they are imported on
use. A kernel is compiled to PTX when the program around it is lowered, once for each set of dtypes
and constants, and XLA carries the PTX as a custom call. No GPU is needed, but one is asked for its
compute capability (tests/aot tell it).

The environment variable MJAX_TRITON_LAUNCH says who launches; it is read when a program is traced.
With xla the PTX is a kernel of XLA's own (`triton_ptx.py`). With jax-triton, the default, XLA calls
jax-triton's library.

jax-triton turns PTX into machine code with the first ptxas on PATH, else that of /usr/local/cuda.
It does not look at jax's own CUDA wheels there. Triton stamps PTX with the newest version that the
ptxas in its own wheel reads. So both are set here: a version that every CUDA 13 reads, and a PATH
that begins with the wheel's ptxas.
"""

import functools
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from mjax.errors import UserError
from mjax.kernels.base.triton_ptx import PTX_TARGET, PTX_VERSION, compile_kernel

FIRST_CUDA = (13, 0)  # whose ptxas reads PTX_VERSION
_INSTALLED = ("/usr/local/cuda/bin", "/opt/cuda/bin")  # where XLA looks after PATH


def triton_call(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    warps: int,
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array]:
    """Run `programs` programs of a `triton.jit` function, of so many `warps`, and return `outputs`.

    Its parameters are pointers to `inputs`, then to `outputs`, then `constants`, by name: numbers
    and strings that it is compiled for, and None for an output that is left out. `aliases` maps an
    input to the output that takes its place in memory: a kernel writes to the input, and its
    parameter for the output may be None. Neither differentiation nor `vmap` passes through.
    """
    given = tuple((aliases or {}).items()), tuple(constants.items())
    call = KernelCall(kernel, tuple(outputs), programs, warps, *given)
    with jax.named_scope(kernel.__name__):
        if launched_by() == "xla":
            return _kernel_p.bind(*inputs, call=call)
        return _by_jax_triton(inputs, call)


class KernelCall(NamedTuple):
    """The arguments of `triton_call` but its inputs, hashable."""

    kernel: Any
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    programs: int
    warps: int
    aliases: tuple[tuple[int, int], ...]
    constants: tuple[tuple[str, Any], ...]


def launched_by() -> str:
    """The name of what launches kernels: xla or jax-triton. Raises `UserError`."""
    chosen = os.environ.get("MJAX_TRITON_LAUNCH", "jax-triton")
    if chosen not in ("xla", "jax-triton"):
        raise UserError(f"MJAX_TRITON_LAUNCH={chosen}: say xla or jax-triton")
    return chosen


def _by_jax_triton(inputs: Sequence[jax.Array], call: KernelCall) -> list[jax.Array]:
    import jax_triton

    prefer_own_ptxas()
    places, aliases = list(range(len(call.outputs))), dict(call.aliases)
    more: dict[str, Any] = {"out_shape": list(call.outputs)}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # jax-triton >= 0.4
        # It passes no pointer to an aliased output, but XLA counts one. So these come last: any
        # output behind one would be written to that one's memory.
        places.sort(key=lambda o: o in aliases.values())
        aliases = {i: places.index(o) for i, o in aliases.items()}
        unpassed = [call.kernel.arg_names[len(inputs) + o] for _, o in call.aliases]
        # fusion of multiplication and addition is said, for triton's default changes
        options = {"enable_fp_fusion": True, "ptx_version": PTX_VERSION}
        more = {"out_type": [call.outputs[o] for o in places], "backend_options": options}
        more |= dict.fromkeys(unpassed)
    # XLA lets a kernel read a slice of an array, or write one, where it lies. It does so with
    # aliased arrays, too, as if the kernel wrote its output: a loop's slices would be lost.
    inputs = jax.lax.optimization_barrier(list(inputs)) if aliases else inputs
    found = jax_triton.triton_call(
        *inputs,
        kernel=call.kernel,
        grid=(call.programs,),
        num_warps=call.warps,
        input_output_aliases=aliases,
        **more,
        **dict(call.constants),
    )
    found = [found[places.index(o)] for o in range(len(places))]
    return jax.lax.optimization_barrier(found) if aliases else found


def _lowered(ctx: Any, *operands: Any, call: KernelCall) -> Sequence[Any]:
    from jax_triton.triton_lib import triton_kernel_call_lib

    arrays = [*ctx.avals_in, *ctx.avals_out]
    named = [name for name in call.kernel.arg_names if name not in dict(call.constants)]
    pointers = tuple((n, a.dtype.name) for n, a in zip(named, arrays, strict=True))
    capability = triton_kernel_call_lib.get_compute_capability(0)
    compiled = compile_kernel(call.kernel, pointers, call.constants, call.warps, capability)
    config = compiled.launch(call.programs, len(operands), len(call.outputs))
    # 2 is the version of calls whose attributes are one string
    more = {"api_version": 2, "operand_output_aliases": dict(call.aliases)}
    return jax.ffi.ffi_lowering(PTX_TARGET, backend_config=config, **more)(ctx, *operands)


def _types_of_outputs(*_: Any, call: KernelCall) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(output.shape, output.dtype) for output in call.outputs]


_kernel_p = Primitive("triton_kernel_call")  # jax-triton's name of it, too
_kernel_p.multiple_results = True
_kernel_p.def_abstract_eval(_types_of_outputs)
_kernel_p.def_impl(functools.partial(xla.apply_primitive, _kernel_p))
mlir.register_lowering(_kernel_p, _lowered, platform="cuda")


@functools.cache
def prefer_own_ptxas() -> None:
    """Let XLA find the ptxas of jax's CUDA wheels first, for this process and its children.

    Raises `UserError` where the one that it then finds is too old for our kernels.
    """
    wheel = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    folders = [Path(place, "bin") for place in (wheel and wheel.submodule_search_locations) or ()]
    own = [str(folder) for folder in folders if (folder / "ptxas").exists()]
    if own:
        os.environ["PATH"] = os.pathsep.join([*own, os.environ.get("PATH", "")])
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(_INSTALLED))
    if ptxas is None:
        return  # XLA says so itself
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found and (int(found[1]), int(found[2])) < FIRST_CUDA:
        raise UserError(
            f"Triton kernels are PTX {PTX_VERSION / 10}, but {ptxas} is of CUDA {found[1]}."
            f"{found[2]}, which reads older PTX; install the ptxas that jax uses: "
            "pip install 'nvidia-cuda-nvcc>=13,<14'"
        )
