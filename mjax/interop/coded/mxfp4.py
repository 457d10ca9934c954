"""MXFP4 weights, as gpt-oss is published, read as bfloat16: 32 numbers of 4 bits share a scale.

`X_blocks` uint8 [..., out, in / 32, 16] has two numbers a byte, the lower half first; `X_scales`
uint8 [..., out, in / 32] is an exponent of 2, plus 127. Together they stand for a tensor X. A
checkpoint in bfloat16 has it as [..., in, out], so slots are turned round (`names.py`). Invariant:
values are those of transformers' dequantization, bit for bit; every product is exact in bfloat16.
Format: OCP Microscaling Formats (MX) 1.0, E2M1 numbers with E8M0 scales.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from mjax.checkpoint.base.safetensors import Tensor
from mjax.errors import UserError

GROUP = 32  # numbers that share a scale
_PACKED = 2  # numbers in a byte
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are their negatives
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class PackedTensor:
    """A bfloat16 tensor [..., out, in] that two tensors of bytes stand for; read like `Tensor`."""

    name: str
    blocks: Tensor
    scales: Tensor
    dtype = BF16

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, groups = self.scales.shape
        return *rows, groups * GROUP

    def read(self, file: int, first: int, width: int, rows: slice, cols: slice) -> np.ndarray:
        """As `Tensor.read`: rows and columns of the matrix that begins at number `first`."""
        groups = slice(cols.start // GROUP, -(-cols.stop // GROUP))
        size = GROUP // _PACKED  # bytes of a group
        place = first // GROUP, width // GROUP, rows, groups
        packed = self.blocks.read_bytes(file, size, *place)
        other = os.open(self.scales.file, os.O_RDONLY)
        try:
            scales = self.scales.read_bytes(other, 1, *place)
        finally:
            os.close(other)
        packed = packed.reshape(*scales.shape, size)
        codes = (scales.astype(np.uint16)[..., None] << 8) | packed
        values = pairs_of_codes().take(codes).reshape(len(codes), -1).view(BF16)
        skipped = groups.start * GROUP
        return values[:, cols.start - skipped : cols.stop - skipped]


@cache
def pairs_of_codes() -> np.ndarray:
    """uint32 [2^16], at 256 * scale + byte: the bits of the byte's two numbers in bfloat16.

    The scale 255 is no number in the format. It is read as 2^128, as transformers does.
    """
    negative = [-value for value in E2M1]
    numbers = np.array([*E2M1, *negative], np.float32)
    exponents = np.arange(256)[:, None] - 127
    with np.errstate(over="ignore"):
        scaled = np.ldexp(numbers, exponents).astype(BF16)
    codes = np.arange(256)
    low, high = scaled[:, codes & 15], scaled[:, codes >> 4]
    pairs = np.stack([low, high], -1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1)


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | PackedTensor]:
    """The tensors of a checkpoint, each pair of blocks and scales as the one it stands for.

    Raises `UserError` naming a tensor whose other half is missing or of another shape.
    """
    found: dict[str, Tensor | PackedTensor] = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        whole = name.removesuffix("_blocks")
        blocks, scales = found.pop(name), found.pop(f"{whole}_scales", None)
        if scales is None:
            raise UserError(f"{blocks.file}: tensor {name} lacks its {whole}_scales; copy it again")
        shape = *scales.shape, GROUP // _PACKED
        if (blocks.kind, scales.kind) != ("U8", "U8") or blocks.shape != shape:
            raise UserError(
                f"{blocks.file}: tensor {name} is {blocks.kind} {blocks.shape} and its scales are "
                f"{scales.kind} {scales.shape}, which is not MXFP4; save the model in bfloat16"
            )
        found[whole] = PackedTensor(whole, blocks, scales)
    return found
