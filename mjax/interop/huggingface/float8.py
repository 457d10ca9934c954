"""FP8 weights as servers read them, in two layouts of matrices [out, in] of float8_e4m3fn.

`float8`: compressed-tensors' "float-quantized". `X.weight` has one scale a row beside it,
`X.weight_scale` [out, 1]; the weight is their product. Invariant: scales are fp32 (readers multiply
in their dtype) but bfloat16 numbers, rounded up, so nothing saturates and no reader's cast changes
them. Layout: github.com/vllm-project/compressed-tensors, version 0.20, which tests/oracle reads it
with.

`float8_block`: DeepSeek-V3's, for experts, too. `X.weight_scale_inv` fp32 has one scale for each
128 rows and 128 columns, the largest number of the block over 448. Invariant: what was read from
such blocks is written with the same codes. Layout: transformers' FineGrainedFP8Config.

Embeddings, norms, biases, router and head stay bfloat16; activations are quantized by the server.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from mjax.checkpoint.base.source import run_all
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.entries import CodedTensors
from mjax.interop.huggingface.families.engine import family_of
from mjax.interop.huggingface.families.family import SlotsByPath, inputs_first
from mjax.sharding.spec import ParamSpec

WEIGHT = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
REST = np.dtype(ml_dtypes.bfloat16)
LARGEST_FLOAT8 = float(ml_dtypes.finfo(WEIGHT).max)  # 448
BLOCK_SIDE = 128
# What servers multiply in 8 bits by blocks; they read other projections in bfloat16.
_BY_BLOCKS = re.compile(r"(^|\.)(self_attn|mlp)\.")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CodedLayout:
    """How matrices are stored in 8 bits.

    suffix: how the names of scales end. scales_of: the shape of a matrix -> that of its scales.
    quantize: (matrix, its name) -> (codes, scales).
    """

    suffix: str
    scales_of: Callable[[Shape], Shape]
    quantize: Callable[[np.ndarray, str], tuple[np.ndarray, np.ndarray]]


def quantization_config(
    cfg: ModelConfig, slots: SlotsByPath, specs: Mapping, dtype: str, kept: Iterable[str] = ()
) -> dict:
    """The entry of config.json on the layout `dtype`. Raises `UserError` for families without it.

    `kept`: matrices in bfloat16 that the model does not read.
    """
    if family_of(cfg).layouts.get("matrix") is inputs_first:
        raise UserError(
            f"--dtype {dtype}: GPT-2 stores transposed Conv1D matrices, which layouts of 8 bits do "
            "not cover; export it as bfloat16"
        )
    kept = [name.removesuffix(".weight") for name in kept]
    if dtype == "float8_block":
        plain = _plain_modules(slots, specs)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK_SIDE, BLOCK_SIDE],
            "modules_to_not_convert": list(dict.fromkeys(["lm_head", *plain, *kept])),
        }
    if cfg.has_role("experts"):
        raise UserError(
            "--dtype float8: experts in the compressed-tensors layout are not checked against any "
            "reader yet; export the model as float8_block or bfloat16"
        )
    scheme = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**scheme, "strategy": "channel", "dynamic": False}
    activations = {**scheme, "strategy": "token", "dynamic": True}
    return compressed_tensors_config("float-quantized", weights, activations, ["lm_head", *kept])


def compressed_tensors_config(
    layout: str, weights: dict, activations: dict | None, ignored: list[str]
) -> dict:
    """The quantization_config of compressed-tensors; `ignored` names modules that stay plain."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def is_linear(spec: ParamSpec, dtype: str) -> bool:
    """Whether the layout `dtype` has the matrices of a parameter in 8 bits."""
    known = dtype == "float8" or _BY_BLOCKS.search(spec.hf[0])
    return spec.role == "matrix" and bool(known)


def _plain_modules(slots: SlotsByPath, specs: Mapping) -> list[str]:
    """The modules whose matrices stay in bfloat16 among blocks.

    Raises `UserError` where experts are stacked in one tensor.
    """
    plain = []
    for path, places in slots.items():
        linear = is_linear(specs[path], "float8_block")
        if linear and places[0].lead:
            raise UserError(
                f"--dtype float8_block: {places[0].tensor} stacks experts in one tensor, which no "
                "reader is known to take in 8 bits; export the model as bfloat16"
            )
        if not linear and specs[path].role != "embedding" and len(places[0].dims) > 1:
            plain += [slot.tensor.removesuffix(".weight") for slot in places]
    return plain


def coded_tensors(
    shapes: Mapping[str, Shape],
    linear: set[str],
    layout: CodedLayout,
    tensor: Callable[[str, np.dtype], np.ndarray],
) -> CodedTensors:
    """The tensors named in `linear` quantized, each followed by its scales."""

    def both(name: str, codes: object, scales: object) -> dict:
        return {name: codes, name + layout.suffix: scales}

    entries = {
        name: both(name, (shapes[name], WEIGHT), (layout.scales_of(shapes[name]), SCALE))
        for name in linear
    }
    return CodedTensors(entries, lambda n: both(n, *layout.quantize(tensor(n, SCALE), n)))


def quantize_rows(w: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [out, in], which is overwritten -> (float8_e4m3fn [out, in], fp32 scales [out, 1]).

    Raises `UserError` naming the tensor where it is not finite."""
    largest = np.maximum(w.max(1, keepdims=True), -w.min(1, keepdims=True))
    _require_finite(largest, name)
    wanted = np.maximum(largest / LARGEST_FLOAT8, np.finfo(SCALE).tiny)
    rounded = wanted.astype(REST)
    up = rounded.view(np.uint16) + (rounded.astype(SCALE) < wanted)  # the next one, where too low
    scale = up.astype(np.uint16).view(REST).astype(SCALE)
    w /= scale
    return w.astype(WEIGHT), scale


def quantize_blocks(w: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [out, in] -> (float8_e4m3fn [out, in], fp32 scales of blocks [out / 128, in / 128]).

    A power of two is the scale where the block has its bits in it: of scales that were powers of
    two, codes come back. Raises `UserError` naming the tensor where it is not finite.
    """
    codes = np.empty(w.shape, WEIGHT)

    def quantize(first: int) -> np.ndarray:
        rows = slice(first, first + BLOCK_SIDE)
        scales = _block_scales(w[rows], name)
        codes[rows] = w[rows] / _of_columns(scales, w)
        return scales

    return codes, np.stack(run_all(partial(quantize, n) for n in range(0, len(w), BLOCK_SIDE)))


def _block_scales(part: np.ndarray, name: str) -> np.ndarray:
    """The scales of the blocks in up to 128 rows."""
    starts = np.arange(0, part.shape[1], BLOCK_SIDE)
    largest = np.maximum.reduceat(np.abs(part).max(0), starts)
    _require_finite(largest, name)
    # Some kernels make NaN of smaller scales (of experts that saw no token).
    scales = np.maximum(largest, SCALE.type(1e-12)) / SCALE.type(LARGEST_FLOAT8)
    mantissa, exponent = np.frexp(scales)
    powers = np.ldexp(SCALE.type(1), exponent - (mantissa == 0.5))
    wide = _of_columns(powers, part)
    for rows in part[:1], part:  # few have bits to spare: one row tells
        kept = ((rows / wide).astype(WEIGHT).astype(SCALE) * wide == rows).all(0)
        exact = np.logical_and.reduceat(kept, starts)
        if not exact.any():
            return scales
    return np.where(exact, powers, scales)


def _blocks_of(shape: Shape) -> Shape:
    return tuple(-(-side // BLOCK_SIDE) for side in shape)


def _of_columns(scales: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.repeat(scales, BLOCK_SIDE)[: w.shape[1]]


def _require_finite(largest: np.ndarray, name: str) -> None:
    if not np.isfinite(largest).all():
        raise UserError(f"tensor {name} holds values that are not finite; nothing is written")


CODED_LAYOUTS = {
    "float8": CodedLayout("_scale", lambda shape: (shape[0], 1), quantize_rows),
    "float8_block": CodedLayout("_scale_inv", _blocks_of, quantize_blocks),
}
