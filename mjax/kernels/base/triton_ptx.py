"""Triton functions as PTX that XLA launches itself; `triton_call.py` says when.

XLA takes PTX in a custom call of its own, `__gpu$xla.gpu.ptx`. It launches the kernel as it does
its own: in a CUDA graph it is a plain node, where a call into a library is captured as a graph of
its own. The driver makes machine code of the PTX when a program is loaded, so no ptxas is needed.
Each argument is a pointer to an input or an output, in this order.
"""

import functools
import json
import re
import threading
from typing import Any, NamedTuple

PTX_TARGET = "__gpu$xla.gpu.ptx"
PTX_VERSION = 90  # 9.0, of CUDA 13.0
_COMPILES = threading.Lock()  # Triton's compiler has global state


class CompiledKernel(NamedTuple):
    """The PTX of a kernel, its name in there, threads of a program and bytes of shared memory."""

    name: str
    ptx: str
    threads: int
    shared: int

    def launch(self, programs: int, inputs: int, outputs: int) -> str:
        """The attributes of XLA's custom call: a dictionary in MLIR's syntax."""
        fields = {"name": self.name, "kernel_type": "ptx", "kernel_data": self.ptx}
        fields |= {"grid_x": programs, "grid_y": 1, "grid_z": 1}
        fields |= {"block_x": self.threads, "block_y": 1, "block_z": 1}
        fields |= {"shared_mem_bytes": self.shared}
        fields |= {"output_indices": list(range(inputs, inputs + outputs))}
        return f"{{{', '.join(f'{name} = {json.dumps(value)}' for name, value in fields.items())}}}"


@functools.cache
def compile_kernel(
    kernel: Any,
    pointers: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    warps: int,
    capability: int,
) -> CompiledKernel:
    """Compile a `triton.jit` function for GPUs of a compute capability, such as 90.

    pointers: the names of its parameters that are pointers, and the dtypes of what is there.
    constants: the names and values of the others.
    """
    from triton._C.libtriton import ir
    from triton._utils import canonicalize_dtype
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    asked = {"num_warps": warps, "enable_fp_fusion": True, "ptx_version": PTX_VERSION}
    options = backend.parse_options(asked)
    types = {name: f"*{canonicalize_dtype(dtype)}" for name, dtype in pointers}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # D marks an address that 16 divides, as it does all of XLA's
    aligned = {(kernel.arg_names.index(name),): backend.parse_attr("D") for name in types}
    source = ASTSource(kernel, signature, dict(constants), aligned)
    metadata, stages = {}, {}
    backend.add_stages(stages, options, source.language)
    with _COMPILES:
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        helpers = backend.get_codegen_implementation(options), backend.get_module_map()
        made = source.make_ir(target, options, *helpers, context)
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            made = stages[stage](made, metadata)
    ptx = only_parameters(without_sources(made), len(pointers))
    threads = int(re.search(r"^\.reqntid (\d+)", ptx, re.M)[1])
    return CompiledKernel(metadata["name"], ptx, threads, metadata["shared"])


def without_sources(ptx: str) -> str:
    """PTX without comments and lines of source files: it says nothing of where they lie."""
    ptx, _, _ = ptx.partition("\n\t.file\t")  # files and tables for debuggers are last
    ptx = re.sub(r"^\t\.loc\t.*\n", "", ptx, flags=re.M)
    return re.sub(r"\n\s*\n", "\n", re.sub(r"[ \t]*//.*", "", ptx)).strip() + "\n"


def only_parameters(ptx: str, count: int) -> str:
    """PTX whose kernel has its first `count` parameters only.

    Triton adds pointers to scratch memory. A launch by XLA has none, so a kernel that reads them is
    refused: NotImplementedError.
    """
    head, name, listed, body = re.split(r"\.visible \.entry (\w+)\(([^)]*)\)", ptx)
    parameters = [line.strip() for line in listed.split(",")]
    for parameter in parameters[count:]:
        if re.search(rf"\b{parameter.split()[-1]}\b", body):
            raise NotImplementedError(
                f"{name}: Triton wants scratch memory of the GPU for it ({parameter}), which a "
                "launch by XLA does not have; write it with less, or launch it by jax-triton"
            )
    kept = ",\n\t".join(parameters[:count])
    return f"{head}.visible .entry {name}(\n\t{kept}\n){body}"
