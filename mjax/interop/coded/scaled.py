"""Weights in 8 bits with scales, as DeepSeek, Qwen and compressed-tensors publish them.

`X` float8_e4m3fn [..., out, in] has its scales beside it as `X_scale_inv` or `X_scale`, one for
each block of rows and columns (`quantization.py`); the last blocks may be partial. Together they
are read as fp32. Invariant: each number is fp32(code) * fp32(scale), rounded once, to the nearest
even, whatever part of the tensor is asked for; a part reads its own scales alone.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mjax.checkpoint.base.safetensors import KINDS, Tensor, open_folder
from mjax.errors import UserError
from mjax.interop.coded import mxfp4, packed
from mjax.interop.coded.quantization import SharedBlock, quantization_of, weight_blocks
from mjax.json_file import read_json

_CODES = "F8_E4M3"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_SUFFIXES = ("_scale_inv", "_scale")
# Scales of activations and caches, which servers read.
_OF_SERVERS = (
    "activation_scale",
    ".input_global_scale",
    *(f".{of}_scale" for of in "input output q k v".split()),
)
_FLOATS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class ScaledTensor(Tensor):
    """Codes [..., out, in] and their scales; read like an fp32 `Tensor`.

    block: the rows and columns that share a scale.
    """

    scales: Tensor
    block: tuple[int, int]
    dtype = np.dtype(np.float32)

    def whole(self) -> np.ndarray:
        """The tensor in bfloat16."""
        *lead, width = self.shape
        with open(self.file, "rb", buffering=0) as f:
            rows = slice(0, math.prod(lead))
            part = self.read(f.fileno(), 0, width, rows, slice(0, width))
        return part.astype(mxfp4.BF16).reshape(self.shape)

    def read(self, file: int, first: int, width: int, rows: slice, cols: slice) -> np.ndarray:
        """As `Tensor.read`: rows and columns of the matrix that begins at number `first`."""
        height, inner = self.shape[-2:]
        if width != inner:
            raise UserError(f"{self.file}: tensor {self.name} with scales is not read by matrices")
        matrix, row = np.divmod(first // width + np.arange(rows.start, rows.stop), height)
        down = matrix * -(-height // self.block[0]) + row // self.block[0]
        across = np.arange(cols.start, cols.stop) // self.block[1]
        parts = slice(down[0], down[-1] + 1), slice(across[0], across[-1] + 1)
        scales = self._read_scales(-(-inner // self.block[1]), *parts)
        codes = self.read_bytes(file, 1, first, width, rows, cols)
        values = _FLOATS.take(codes)
        values *= scales[:, across - across[0]][down - down[0]]
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.file}: tensor {self.name} or its {self.scales.name} holds NaN or infinity; "
                "copy them again"
            )
        return values

    def _read_scales(self, width: int, rows: slice, cols: slice) -> np.ndarray:
        dtype = KINDS[self.scales.kind]
        file = os.open(self.scales.file, os.O_RDONLY)
        try:
            raw = self.scales.read_bytes(file, dtype.itemsize, 0, width, rows, cols)
        finally:
            os.close(file)
        return raw.view(dtype).astype(np.float32)


Stored = Tensor | mxfp4.PackedTensor


def open_weights(folder: str | Path) -> dict[str, Stored]:
    """The tensors of a Hugging Face folder, codes and their scales as the ones they stand for.

    Raises `UserError` naming a tensor whose scales are missing or of another shape.
    """
    tensors: dict[str, Stored] = dict(mxfp4.unpacked(packed.with_matrices(open_folder(folder))))
    config = read_json(Path(folder) / "config.json", missing={})
    is_coded, blocks = quantization_of(config) is not None, weight_blocks(config)
    for name in [n for n, t in tensors.items() if isinstance(t, Tensor) and t.kind == _CODES]:
        found = [name + suffix for suffix in _SUFFIXES if name + suffix in tensors]
        if found:
            tensors[name] = _scaled(tensors[name], tensors.pop(found[0]), blocks)
        elif is_coded:
            raise UserError(
                f"{tensors[name].file}: tensor {name} has 8 bits and lacks its "
                f"{name}{_SUFFIXES[0]} or {name}{_SUFFIXES[1]}; copy the folder again"
            )
    return {n: t for n, t in tensors.items() if not (is_coded and n.endswith(_OF_SERVERS))}


def _scaled(codes: Tensor, scales: Tensor, blocks: tuple[SharedBlock, ...]) -> ScaledTensor:
    """Codes with their scales. Raises `UserError` unless one kind of block has these shapes."""
    *lead, height, width = codes.shape if len(codes.shape) > 1 else (1, 1, 0)
    shape = (*scales.shape, *[1] * (len(codes.shape) - len(scales.shape)))
    whole = {(rows or height, columns or width) for rows, columns in blocks}
    fits = {
        (min(rows, height), min(columns, width))
        for rows, columns in whole
        if shape == (*lead, -(-height // max(rows, 1)), -(-width // max(columns, 1)))
    }
    if len(fits) != 1 or scales.kind not in _SCALES:
        told = f"blocks of {sorted(whole)}" if blocks else "no quantization_config"
        raise UserError(
            f"{codes.file}: tensor {codes.name} {codes.shape} has scales {scales.kind} "
            f"{scales.shape} in {scales.name}, but its config.json has {told}; is it that of "
            "another model?"
        )
    return ScaledTensor(**vars(codes), scales=scales, block=fits.pop())
