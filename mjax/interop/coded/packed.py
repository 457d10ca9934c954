"""Matrices of 4-bit numbers as compressed-tensors packs them, read as floating-point numbers.

`X.weight_packed` has two codes a byte along a row, the lower half first; uint8 for E2M1 numbers,
int32 for integers, whose code is the integer + 8. `X.weight_scale` has one scale for each group of
columns. NVFP4's are E4M3, divided by `X.weight_global_scale`; MXFP4's are exponents of 2, plus 127;
those of integers are in the dtype of the model. Together they stand for X.weight [out, in].
Invariant: numbers are those of compressed-tensors' decompression, bit for bit: fp32(code) times
fp32(scale), rounded once. Layout: github.com/vllm-project/compressed-tensors, version 0.20.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mjax.checkpoint.base.safetensors import KINDS, Tensor
from mjax.errors import UserError
from mjax.interop.coded.mxfp4 import BF16, E2M1

CODES, SCALES, WHOLE_SCALE, SHAPE = (
    f"_{part}" for part in ("packed", "scale", "global_scale", "shape")
)
_NOT_READ = ("_zero_point", "_g_idx")
_NUMBERS = {"U8": (*E2M1, *(-value for value in E2M1)), "I32": tuple(range(-8, 8))}
_PER_CODE = {"U8": 2, "I32": 8}  # numbers in an element


@dataclass(frozen=True)
class PackedMatrix(Tensor):
    """Codes of a matrix and their scales; read like a `Tensor` of floating-point numbers.

    whole_scale: what all scales are divided by, or None.
    """

    scales: Tensor
    whole_scale: Tensor | None

    @property
    def dtype(self) -> np.dtype:
        return KINDS[self.scales.kind] if self.kind == "I32" else BF16

    def whole(self) -> np.ndarray:
        """The matrix."""
        height, width = self.shape
        with open(self.file, "rb", buffering=0) as f:
            return self.read(f.fileno(), 0, width, slice(0, height), slice(0, width))

    def read(self, file: int, first: int, width: int, rows: slice, cols: slice) -> np.ndarray:
        """As `Tensor.read`: rows and columns of the matrix that begins at number `first`."""
        if first or width != self.shape[1]:
            raise UserError(f"{self.file}: tensor {self.name} of 4 bits is not read by matrices")
        pairs = slice(cols.start // 2, -(-cols.stop // 2))
        packed = self.read_bytes(file, 1, 0, width // 2, rows, pairs)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        codes = codes[:, cols.start % 2 :][:, : cols.stop - cols.start]
        numbers = np.array(_NUMBERS[self.kind], np.float32).take(codes)
        groups = np.arange(cols.start, cols.stop) // (width // self.scales.shape[1])
        at = slice(groups[0], groups[-1] + 1)
        scales = self._read_scales(rows, at)
        with np.errstate(over="ignore"):
            numbers *= scales[:, groups - at.start]
            values = numbers.astype(self.dtype)
        if not np.isfinite(values).all():
            raise UserError(f"{self.file}: {self.scales.name} holds NaN or infinity; copy it again")
        return values

    def _read_scales(self, rows: slice, groups: slice) -> np.ndarray:
        """Fp32 scales, what they are divided by taken into account."""
        kind = KINDS[self.scales.kind]
        file = os.open(self.scales.file, os.O_RDONLY)
        try:
            place = 0, self.scales.shape[1], rows, groups
            raw = self.scales.read_bytes(file, kind.itemsize, *place).view(kind)
        finally:
            os.close(file)
        if self.scales.kind == "U8":
            return np.where(raw == 255, np.nan, np.ldexp(np.float32(1), raw.astype(int) - 127))
        scales = raw.astype(np.float32)
        return scales if self.whole_scale is None else scales / self.whole_scale.whole().reshape(())


def with_matrices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, packed codes and their scales as the matrix they stand for.

    Raises `UserError` naming a tensor whose scales are missing or of another shape.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(f".weight{CODES}")]:
        whole = name.removesuffix(CODES)
        codes, scales = found.pop(name), found.pop(whole + SCALES, None)
        found.pop(whole + SHAPE, None)
        other = next((whole + part for part in _NOT_READ if whole + part in found), None)
        if other is not None:
            raise UserError(f"{codes.file}: {other} is not read; take the bfloat16 model")
        if scales is None:
            raise UserError(f"{codes.file}: tensor {name} lacks its {whole}{SCALES}; copy it again")
        of_all = found.pop(whole + WHOLE_SCALE, None)
        found[whole] = _packed_matrix(whole, codes, scales, of_all)
    return found


def _packed_matrix(name: str, codes: Tensor, scales: Tensor, of_all: Tensor | None) -> PackedMatrix:
    """Codes with their scales. Raises `UserError` unless their kinds and shapes belong together."""
    height, width = (*codes.shape, 0, 0)[:2]
    width *= _PER_CODE.get(codes.kind, 0)
    kinds = ("BF16", "F16", "F32") if codes.kind == "I32" else ("U8",)
    kinds = kinds if of_all is None else ("F8_E4M3",)
    rows, groups = (*scales.shape, 0, 0)[:2]
    fits = scales.kind in kinds and rows == height and groups and width % groups == 0
    single = of_all is None or (of_all.kind == "F32" and np.prod(of_all.shape) == 1)
    if not (fits and single and width and len(codes.shape) == len(scales.shape) == 2):
        raise UserError(
            f"{codes.file}: tensor {codes.name} is {codes.kind} {codes.shape} and its scales are "
            f"{scales.kind} {scales.shape}, which is no layout of 4 bits that is read; take the "
            "bfloat16 model"
        )
    plain = replace(codes, name=name, shape=(height, width))
    return PackedMatrix(**vars(plain), scales=scales, whole_scale=of_all)
