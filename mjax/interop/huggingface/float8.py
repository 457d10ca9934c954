"""FP8 weights as vLLM reads them: compressed-tensors' layout "float-quantized".

Every linear layer of the blocks is stored as float8_e4m3fn `X.weight` [out, in] beside one scale a
row, `X.weight_scale` [out, 1]; the weight is their product. Embeddings, norms, biases, router and
head stay bfloat16; activations are quantized by the server, per token. Invariant: scales are fp32
(readers multiply in their dtype) but bfloat16 numbers, rounded up, so nothing saturates and no
reader's cast changes them. Layout: github.com/vllm-project/compressed-tensors, version 0.20, which
tests/oracle reads it with.
"""

from collections.abc import Callable, Iterable, Mapping

import ml_dtypes
import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import family_of
from mjax.interop.huggingface.families.family import inputs_first

WEIGHT = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
REST = np.dtype(ml_dtypes.bfloat16)
LARGEST_FLOAT8 = float(ml_dtypes.finfo(WEIGHT).max)  # 448
SUFFIX = "_scale"

Shape = tuple[int, ...]


def quantization_config(cfg: ModelConfig) -> dict:
    """The entry of config.json on the layout. Raises `UserError` for families that lack it."""
    if family_of(cfg).layouts.get("matrix") is inputs_first:
        raise UserError(
            "--dtype float8: GPT-2 stores transposed Conv1D matrices, which the compressed-tensors "
            "layout does not cover; export it as bfloat16"
        )
    if cfg.has_role("experts"):
        raise UserError(
            "--dtype float8: experts in the compressed-tensors layout are not checked against any "
            "reader yet; export the model as bfloat16"
        )
    scheme = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def quantized(
    shapes: Mapping[str, Shape],
    linear: set[str],
    tensor: Callable[[str, np.dtype], np.ndarray],
) -> tuple[dict[str, tuple[Shape, np.dtype]], Callable[[str], Iterable[np.ndarray]]]:
    """(tensors, parts) for `safetensors.write_file`, which asks for them in order: those named in
    `linear` quantized, each followed by its scales. `tensor(name, dtype)` makes one."""
    entries: dict[str, tuple[Shape, np.dtype]] = {}
    for name, shape in shapes.items():
        entries[name] = shape, WEIGHT if name in linear else REST
        if name in linear:
            entries[name + SUFFIX] = (shape[0], 1), SCALE
    scales: dict[str, np.ndarray] = {}

    def parts(name: str) -> list[np.ndarray]:
        if name in scales:
            return [scales.pop(name)]
        if name not in linear:
            return [tensor(name, REST)]
        weight, scales[name + SUFFIX] = quantize_rows(tensor(name, SCALE), name)
        return [weight]

    return entries, parts


def quantize_rows(w: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [out, in], which is overwritten -> (float8_e4m3fn [out, in], fp32 scales [out, 1]).

    Raises `UserError` naming the tensor where it is not finite."""
    largest = np.maximum(w.max(1, keepdims=True), -w.min(1, keepdims=True))
    if not np.isfinite(largest).all():
        raise UserError(f"tensor {name} holds values that are not finite; nothing is written")
    wanted = np.maximum(largest / LARGEST_FLOAT8, np.finfo(SCALE).tiny)
    rounded = wanted.astype(REST)
    up = rounded.view(np.uint16) + (rounded.astype(SCALE) < wanted)  # the next one, where too low
    scale = up.astype(np.uint16).view(REST).astype(SCALE)
    w /= scale
    return w.astype(WEIGHT), scale
