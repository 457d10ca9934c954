"""A Triton kernel as a JAX function, through jax-triton.

Kernels lie in modules of their own (`*_triton.py`). Those import triton, so they are imported on
use. jax-triton compiles a kernel to PTX when the program around it is lowered, once for each set of
dtypes and constants, and XLA carries the PTX as a custom call. Neither needs a GPU, but jax-triton
asks one for its compute capability (tests/aot tell it).
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax


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

    more = {"out_shape": list(outputs)}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # jax-triton >= 0.4
        unpassed = [kernel.arg_names[len(inputs) + o] for o in (aliases or {}).values()]
        fused = {"enable_fp_fusion": True}  # multiplication and addition; triton's default changes
        more = {"out_type": list(outputs), "backend_options": fused} | dict.fromkeys(unpassed)
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
