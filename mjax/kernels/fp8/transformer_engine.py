"""Transformer Engine's kernels under FP8 matmuls (`precision.fp8_backend=te`).

Backend of `kernels/fp8/quantize.py`, which keeps the recipes, scales, state and gradients: here are
rounding with the maximum found in the same pass, and TE's call of cuBLASLt. TE's own `dense` would
bring a state of its own, round bf16 weights in every call, and take the accumulation from an
environment variable. Invariant: numbers are those of backend `xla`, bit for bit where they are
rounded and to the order of sums in products. TE's "delayed" quantizer takes any scale, hence ours
of both recipes. Source: transformer_engine.jax.cpp_extensions (2.20), which is not a public
interface; this file is all that knows it.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from mjax.errors import UserError

_REMEDY = "set precision.fp8_backend=xla"
_SIZE = 16  # bytes to which cuBLASLt wants the rows of 8-bit operands aligned


def require_te(device: jax.Device) -> None:
    """Raise `UserError` where Transformer Engine has no kernels, is missing or is another one."""
    if device.platform == "cpu":
        raise UserError(
            "precision.fp8_backend=te: Transformer Engine has no kernels for CPUs; " + _REMEDY
        )
    _te()


@functools.cache
def _te() -> SimpleNamespace:
    """The parts of TE that are used, imported when asked for: it loads CUDA's libraries."""
    try:
        import transformer_engine.jax  # noqa: F401 - loads the extension
        from transformer_engine.jax import quantize_by_te
        from transformer_engine.jax.cpp_extensions import quantization
        from transformer_engine.jax.cpp_extensions.gemm import _te_gemm

        if not quantization.QuantizePrimitive.enabled():  # then it finds no maximum
            raise RuntimeError("NVTE_JAX_CUSTOM_CALLS turns QuantizePrimitive off")
        return SimpleNamespace(
            quantize=quantization.quantize,
            gemm=_te_gemm,
            Quantizer=quantize_by_te.DelayedScaleQuantizer,
            tensor=quantize_by_te.ScaledTensorFactory.create_1x,
            mode=quantize_by_te.ScalingMode.DELAYED_TENSOR_SCALING,
            rows=quantize_by_te.QuantizeLayout.ROWWISE,
        )
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise UserError(
            "precision.fp8_backend=te: Transformer Engine 2.20 for JAX does not load "
            f"({type(error).__name__}: {error}); install mjax[te] or {_REMEDY}"
        ) from error


def quantize_by_te(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [M, K], fp32 scale -> (x * scale rounded to `dtype`, saturating; largest |x|, fp32)."""
    te = _te()
    quantizer = te.Quantizer(
        q_dtype=dtype, scaling_mode=te.mode, q_layout=te.rows, data_layout="N", scale=scale[None]
    )
    made = te.quantize(x, quantizer=quantizer, flatten_axis=-1)
    return made.data, made.amax[0]


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    scales: tuple[jax.Array, jax.Array],
    dtype: jnp.dtype,
    precise: bool,
) -> jax.Array:
    """8-bit matrices -> their product over axes `contract` in `dtype`, divided by both `scales`.

    `precise`: without the fast, 14-bit accumulation. Raises `UserError` for sizes that cuBLASLt
    does not take; XLA pads those.
    """
    te = _te()
    if any(n % _SIZE for n in (*a.shape, *b.shape)):
        raise UserError(
            f"precision.fp8_backend=te: a product of {a.shape} and {b.shape} has a size that is no "
            f"multiple of {_SIZE} (tokens of a micro-batch or widths of the model on a device); "
            f"change it or {_REMEDY}"
        )

    def tensor(x: jax.Array, axis: int, scale: jax.Array):
        x = x if axis == 1 else x.T  # Hopper multiplies rows by rows
        return te.tensor(x, (1 / scale)[None], scaling_mode=te.mode, dq_dtype=dtype, flatten_axis=1)

    operands = map(tensor, (a, b), contract, scales)
    return te.gemm(*operands, contracting_dims=((1,), (1,)), use_split_accumulator=precise)
