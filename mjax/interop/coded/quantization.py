"""Blocks of numbers that share a scale, as the quantization_config of a config.json tells.

Read are quant_method `fp8` (DeepSeek, Qwen), `compressed-tensors` of 8-bit floats and of 4 bits,
and `mxfp4`.
Invariant: a code that is not read is refused by its name before any weight is. Fields follow
transformers' FineGrainedFP8Config and compressed-tensors' QuantizationConfig.
"""

from typing import NoReturn

from mjax.errors import UserError

KEYS_OF_CODES = ("quantization_config", "compression_config", "quantization")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
# Layouts that `packed.py` reads: type and bits of their numbers, and whether they are symmetric.
_PACKED_FORMATS = {
    "nvfp4-pack-quantized": ("float", 4, True),
    "mxfp4-pack-quantized": ("float", 4, True),
    "pack-quantized": ("int", 4, True),
}
_WAYS = {
    "bitsandbytes": "let transformers write it: model.dequantize(), model.save_pretrained(FOLDER)",
    "compressed-tensors": "let transformers write it: CompressedTensorsConfig(dequantize=True)",
}

SharedBlock = tuple[int | None, int | None]  # rows and columns that share a scale; None: all


def quantization_of(config: dict) -> dict | None:
    """The part of a config.json that tells how weights are coded, that of its text if need be."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
    found = (part[key] for part in parts for key in KEYS_OF_CODES if part.get(key))
    return next(found, None)


def has_static_scales(config: dict) -> bool:
    """Whether a checkpoint has scales of activations or caches, which servers alone read."""
    said = quantization_of(config) or {}
    activations = [group.get("input_activations") or {} for group in _modules_alike(said)]
    static = said.get("activation_scheme") == "static" or said.get("kv_cache_scheme")
    return bool(static) or any(of.get("dynamic") in (False, "local") for of in activations)


def weight_blocks(config: dict) -> tuple[SharedBlock, ...]:
    """The blocks that scales of a checkpoint stand for. Raises `UserError` for codes unknown."""
    said = quantization_of(config) or {}
    method = said.get("quant_method")
    if not said or method == "mxfp4":
        return ()
    if method == "fp8":
        for key, value in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
            if said.get(key) not in (None, value):
                _refuse(f"{key}={said[key]!r}")
        sizes = said.get("weight_block_size")
        return (_checked_block(sizes) if sizes else (None, None),)
    if method != "compressed-tensors" and not (method is None and _modules_alike(said)):
        _refuse(f"quant_method={method!r}", method)
    groups = _modules_alike(said)
    formats = [said.get("format"), *(group.get("format") for group in groups)]
    known = None, "mixed-precision", *_FLOAT_FORMATS, *_PACKED_FORMATS
    strange = [name for name in formats if name not in known]
    sparse = (said.get("sparsity_config") or {}).get("format") not in (None, "dense")
    if strange or sparse or said.get("transform_config"):
        what = f"format={strange[0]!r}" if strange else "transform_config or sparsity_config"
        _refuse(what, "compressed-tensors")
    layouts = (
        (group.get("weights"), group.get("format") or said.get("format")) for group in groups
    )
    blocks = (_block_of_weights(*each) for each in layouts if each[0])
    return tuple(block for block in blocks if block is not None)


def _modules_alike(said: dict) -> list[dict]:
    """Modules that are coded alike, of compressed-tensors."""
    return list((said.get("config_groups") or {}).values())


def _block_of_weights(weights: dict, layout: str | None) -> SharedBlock | None:
    """The block of a scale; None where the tensors of a layout tell."""
    kind = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("symmetric", True)
    if layout in _PACKED_FORMATS:
        if kind != _PACKED_FORMATS[layout]:
            _refuse(f"format={layout!r}", "compressed-tensors")
        return None
    if kind != ("float", 8, True):
        _refuse("weights of type={}, num_bits={}, symmetric={}".format(*kind), "compressed-tensors")
    strategy = weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return None if strategy == "tensor" else 1, None
    sizes = {"group": [1, weights.get("group_size")], "block": weights.get("block_structure")}
    if strategy not in sizes:
        _refuse(f"strategy={strategy!r}", "compressed-tensors")
    return _checked_block(sizes[strategy])


def _checked_block(sizes: object) -> SharedBlock:
    whole = isinstance(sizes, list | tuple) and all(type(n) is int and n > 0 for n in sizes)
    if not whole or len(sizes) != 2:
        raise UserError(
            f"config.json: quantization_config has blocks of {sizes!r}; give two sizes above 0"
        )
    return tuple(sizes)


def _refuse(what: str, method: str | None = None) -> NoReturn:
    way = _WAYS.get(method, "take the bfloat16 model that it was made from")
    raise UserError(
        f"config.json: quantization_config has {what}, which mjax does not read (only fp8, mxfp4, "
        f"and compressed-tensors of 8-bit floats or 4 bits); {way}"
    )
