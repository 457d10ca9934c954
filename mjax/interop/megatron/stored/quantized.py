"""Tensors that Transformer Engine stores in 8 bits: what their pickles say, and their values.

A value is a number in e4m3 or e5m2 times a factor: of the whole tensor (delayed and current
scaling), of 128 x 128 (blockwise) or of 32 in a row (MXFP8). Megatron-core writes values in the
model's dtype where it can. So these are rare: of saves from the CPU, and of older versions.
Invariant: no code of the pickle's runs; a form that is not known is refused by name.
Source: transformer_engine/pytorch/tensor (`__reduce_ex__`, `get_scale_shape`).
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

StoredTensor = tuple  # of an archive: (storage, key), offset, shape, strides
_OF_VALUES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# By the number of Transformer Engine's DType. Before version 2.5 e4m3 was 6 and e5m2 7, in which no
# weights were trained.
_FLOAT8 = {6: ml_dtypes.float8_e4m3fn, 7: ml_dtypes.float8_e4m3fn, 8: ml_dtypes.float8_e5m2}
_ROW, _SQUARE = (1, 32), (128, 128)  # of the values that have one scale


class UnknownForm(Exception):
    """Weights in 8 bits of a form that is not read."""


@dataclass(frozen=True)
class Quantized:
    """A tensor of an archive whose values are `data` times `scales`.

    block: the rows and columns that one scale is for; None: there is one scale. exponents: scales
    are powers of two, in bytes. dtype: of the values.
    """

    data: StoredTensor
    scales: StoredTensor
    kind: np.dtype
    dtype: np.dtype
    block: tuple[int, int] | None = None
    exponents: bool = False


class Dequantized:
    """Values of a box of a tensor, computed where it is read: as an array with dtype and slices.

    data: mapped numbers in 8 bits. scales: theirs, mapped.
    """

    def __init__(self, of: Quantized, data: np.ndarray, scales: np.ndarray, shape: tuple):
        self.dtype, self.block = of.dtype, of.block
        columns = data.shape[-1]
        rows = data.size // max(1, columns)
        scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127) if of.exponents else scales
        if of.block:
            needed = -(-rows // of.block[0]), -(-columns // of.block[1])
            scales = scales[: needed[0], : needed[1]]
            if scales.shape != needed:
                raise ValueError(f"{scales.shape} scales where {needed} are needed")
        elif scales.size != 1:
            raise ValueError(f"{scales.size} scales where 1 is needed")
        self.rows = rows, columns
        self.scales, self.data = scales, data.view(of.kind).reshape(shape)

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        values = self.data[box].astype(np.float32)
        if self.block is None:
            values *= self.scales.reshape(-1)
        else:
            by_row = np.repeat(self.scales, self.block[0], 0)
            every = np.repeat(by_row, self.block[1], 1)[: self.rows[0], : self.rows[1]]
            values *= every.reshape(self.data.shape)[box]
        return values.astype(self.dtype)


def _quantized(data, scales, number, dtype, **form) -> Quantized:
    if data is None or scales is None:
        raise UnknownForm("FP8 weights of which columns alone are there")
    value = number if isinstance(number, int) else (*number.args, number.__dict__.get("state"))[0]
    kind, name = _FLOAT8.get(value), getattr(dtype, "__name__", None)
    if kind is None or name not in _OF_VALUES:
        raise UnknownForm(f"FP8 weights of type {value} for {name}")
    return Quantized(data, scales, np.dtype(kind), _OF_VALUES[name], **form)


def _whole(data, number, scales, dtype, *_) -> Quantized:
    return _quantized(data, scales, number, dtype)


def _by_rows(data, scales, _, __, number, dtype, shape=None, quantizer=None, swizzled=False):
    if swizzled:
        raise UnknownForm("MXFP8 weights with scales in the order of a kernel")
    return _quantized(data, scales, number, dtype, block=_ROW, exponents=True)


def _by_squares(shape, data, scales, _, __, number, dtype, quantizer, is_square, *___):
    if not is_square:
        raise UnknownForm("FP8 weights with scales of 1 x 128")
    return _quantized(data, scales, number, dtype, block=_SQUARE)


_BY_CLASS = {
    "Float8Tensor": _whole,
    "MXFP8Tensor": _by_rows,
    "Float8BlockwiseQTensor": _by_squares,
}
_MODULES = "float8_tensor", "mxfp8_tensor", "float8_blockwise_tensor"
MAKERS = {  # by the names of newer versions
    f"_make_{module}_in_reduce_ex": make
    for module, make in zip(_MODULES, _BY_CLASS.values(), strict=True)
}


def maker_of(of: object, name: object):
    """The function that rebuilds a tensor of a class, where `getattr` names it; else None."""
    module = str(getattr(of, "__module__", ""))
    if name == "_make_in_reduce_ex" and module.startswith("transformer_engine."):
        if (found := _BY_CLASS.get(of.__name__)) is None:
            raise UnknownForm(f"a {of.__name__}, which is no form of weights known here")
        return found
    return None
