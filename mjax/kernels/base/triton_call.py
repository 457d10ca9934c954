"""A Triton kernel as a JAX function, through jax-triton.

Kernels lie in modules of their own (`*_triton.py`). They import triton, so they are imported on
use. jax-triton compiles a kernel to PTX when the program around it is lowered, once for each set of
dtypes and constants, and XLA carries the PTX as a custom call. Neither needs a GPU, but jax-triton
asks one for its compute capability (tests/aot tell it).

XLA turns that PTX into machine code with the first ptxas on PATH, else that of /usr/local/cuda; it
does not look at jax's own CUDA wheels there. Triton stamps PTX with the newest version that the
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
from typing import Any

import jax

from mjax.errors import UserError

PTX_VERSION = 90  # 9.0, of CUDA 13.0
FIRST_CUDA = (13, 0)  # whose ptxas reads it
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
    import jax_triton

    prefer_own_ptxas()
    more = {"out_shape": list(outputs)}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # jax-triton >= 0.4
        unpassed = [kernel.arg_names[len(inputs) + o] for o in (aliases or {}).values()]
        # fusion of multiplication and addition is said, for triton's default changes
        options = {"enable_fp_fusion": True, "ptx_version": PTX_VERSION}
        more = {"out_type": list(outputs), "backend_options": options} | dict.fromkeys(unpassed)
    with jax.named_scope(kernel.__name__):
        return jax_triton.triton_call(
            *inputs,
            kernel=kernel,
            grid=(programs,),
            num_warps=warps,
            input_output_aliases=aliases or {},
            **more,
            **constants,
        )


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
