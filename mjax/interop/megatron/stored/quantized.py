"""Tensors that Transformer Engine stores in 8 bits: what their pickles say, and their values.

A value is a number in e4m3 or e5m2 times a factor: of the whole tensor (delayed and current
scaling), of 128 x 128 or 1 x 128 (blockwise) or of 32 in a row (MXFP8). A tensor may hold rows,
columns or both; rows are read, and columns where they are alone. Megatron-core writes values in the
model's dtype where it can. So these are rare: of saves from the CPU, and of older versions.
Invariant: no code of the pickle's runs; a form that is not known is refused by name.
Source: transformer_engine/pytorch/tensor (`__reduce_ex__`, `get_scale_shape`, `dequantize`).
"""

import re
from collections.abc import Callable
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
_ROW, _COLUMN, _SQUARE, _VECTOR = (1, 32), (32, 1), (128, 128), (1, 128)  # that have one scale


class UnknownForm(Exception):
    """Weights in 8 bits of a form that is not read."""


@dataclass(frozen=True)
class Quantized:
    """A tensor of an archive whose values are `data` times `scales`.

    data_transposed: `data` has the last axis of the values first. block: the rows and columns of
    values that one scale is for; None: there is one scale. exponents: scales are powers of two, in
    bytes. scales_transposed: they lie transposed. swizzled: they lie in the order of cuBLAS.
    dtype: of the values.
    """

    data: StoredTensor
    scales: StoredTensor
    kind: np.dtype
    dtype: np.dtype
    block: tuple[int, int] | None = None
    exponents: bool = False
    data_transposed: bool = False
    scales_transposed: bool = False
    swizzled: bool = False


class Dequantized:
    """Values of a box of a tensor, computed where it is read: as an array with dtype and slices.

    data: mapped numbers in 8 bits. scales: theirs, mapped.
    """

    def __init__(self, of: Quantized, data: np.ndarray, scales: np.ndarray, shape: tuple):
        self.of, self.dtype = of, of.dtype
        columns = data.shape[-1]
        self.matrix = data.size // max(1, columns), columns
        if of.swizzled:
            scales = _from_tiles(scales, of.block == _COLUMN)
        scales = scales.T if of.scales_transposed else scales
        if of.block:
            needed = tuple(-(-n // size) for n, size in zip(self.matrix, of.block, strict=True))
            scales = scales[: needed[0], : needed[1]]
            if scales.shape != needed:
                raise ValueError(f"{scales.shape} scales where {needed} are needed")
        elif scales.size != 1:
            raise ValueError(f"{scales.size} scales where 1 is needed")
        self.scales, self.data = scales, data.view(of.kind).reshape(shape)

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        values = self.data[box].astype(np.float32)
        if self.of.block is None:
            values *= self._factors(self.scales).reshape(-1)
        elif self.data.shape == self.matrix and len(box) == 2:
            values *= self._expanded(box)
        else:
            whole = tuple(slice(0, n) for n in self.matrix)
            values *= self._expanded(whole).reshape(self.data.shape)[box]
        return values.astype(self.dtype)

    def _factors(self, scales: np.ndarray) -> np.ndarray:
        """Scales in fp32."""
        if not self.of.exponents:
            return scales
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)

    def _expanded(self, box: tuple[slice, ...]) -> np.ndarray:
        """The factor of each value in a box of the matrix."""
        found, inside = self.scales, []
        for axis, (own, size) in enumerate(zip(box, self.of.block, strict=True)):
            start, stop, _ = own.indices(self.matrix[axis])
            first = start // size
            found = found.take(range(first, max(first, -(-stop // size))), axis)
            inside.append(slice(start - first * size, stop - first * size))
        found = self._factors(found)
        for axis, size in enumerate(self.of.block):
            found = np.repeat(found, size, axis)
        return found[tuple(inside)]


def _from_tiles(scales: np.ndarray, of_columns: bool) -> np.ndarray:
    """Scales from the order of cuBLAS, where tiles of 128 x 4 follow each other; columns' scales
    lie as rows of the transposed tensor's would."""
    rows, columns = scales.shape[::-1] if of_columns else scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    plain = tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns)
    return plain.T if of_columns else plain


def _quantized(data, scales, number, dtype, **form) -> Quantized:
    if data is None or scales is None:
        raise UnknownForm("FP8 weights without numbers or scales")
    value, name = _number_of(number), getattr(dtype, "__name__", None)
    kind = _FLOAT8.get(value)
    if kind is None or name not in _OF_VALUES:
        raise UnknownForm(f"FP8 weights of type {value} for {name}")
    return Quantized(data, scales, np.dtype(kind), _OF_VALUES[name], **form)


def _number_of(member: object) -> object:
    """The number of an entry of an enumeration."""
    is_plain = member is None or isinstance(member, int)
    return member if is_plain else (*member.args, member.__dict__.get("state"))[0]


def _whole(data, number, scales, dtype, shape=None, columns=None) -> Quantized:
    own = columns if data is None else data
    return _quantized(own, scales, number, dtype, data_transposed=data is None)


def _by_rows(
    data, scales, columns, own, number, dtype, shape=None, quantizer=None, swizzled=False
) -> Quantized:
    """32 in a row, or in a column, which lie as rows do."""
    kept, block = ((columns, own), _COLUMN) if data is None else ((data, scales), _ROW)
    return _quantized(*kept, number, dtype, block=block, exponents=True, swizzled=bool(swizzled))


def _by_blocks(
    shape, data, scales, columns, own, number, dtype, quantizer, is_square, order=None
) -> Quantized:
    """Squares, or 128 in a row, whose scales lie transposed; columns are rows of a transpose."""
    if not is_square and _number_of(order):
        raise UnknownForm("FP8 weights with scales of 1 x 128 in their compact order")
    alone = data is None
    kept = (columns, own) if alone else (data, scales)
    block = _SQUARE if is_square else (_VECTOR[::-1] if alone else _VECTOR)
    form = {"data_transposed": alone, "block": block, "scales_transposed": alone == is_square}
    return _quantized(*kept, number, dtype, **form)


_BY_CLASS = {
    "Float8Tensor": _whole,
    "MXFP8Tensor": _by_rows,
    "Float8BlockwiseQTensor": _by_blocks,
}
_MODULES = "float8_tensor", "mxfp8_tensor", "float8_blockwise_tensor"
_BY_MODULE = dict(zip(_MODULES, _BY_CLASS.values(), strict=True))
_MAKER = re.compile(r"_make_(\w+)_in_reduce_ex")


def maker_named(name: str) -> Callable | None:
    """The function that rebuilds a tensor, by the name of newer versions; None: of no tensor."""
    if (found := _MAKER.fullmatch(name)) is None:
        return None
    return _BY_MODULE.get(found[1]) or _refusing(found[1])


def _refusing(kind: str) -> Callable:
    def refuse(*_: object) -> None:
        raise UnknownForm(f"a {kind}, which is no form of weights known here")

    return refuse


def maker_of(of: object, name: object):
    """The function that rebuilds a tensor of a class, where `getattr` names it; else None."""
    module = str(getattr(of, "__module__", ""))
    if name == "_make_in_reduce_ex" and module.startswith("transformer_engine."):
        return _BY_CLASS.get(of.__name__) or _refusing(of.__name__)
    return None
