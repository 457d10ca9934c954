"""Schemes of `mjax quantize`: what shares a scale, how a matrix is rounded, how it is stored.

Each is a preset of compressed-tensors with its layout of tensors. The roundings are those of
training and of the FP8 export (`kernels/fp8`, `huggingface/float8.py`). Invariant: `numbers` are
what a reader makes of the stored parts, before it rounds them to the dtype of the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from mjax.interop.coded.mxfp4 import E2M1
from mjax.interop.huggingface.entries import Entry
from mjax.interop.huggingface.float8 import (
    BLOCK_SIDE,
    REST,
    SCALE,
    WEIGHT,
    Shape,
    compressed_tensors_config,
    quantize_blocks,
    quantize_rows,
)
from mjax.kernels.fp8.blocks import (
    FORMATS,
    Blocks,
    block_maxima,
    e8m0_up,
    free_scales,
    round_blocks,
    rounded_up,
)
from mjax.kernels.fp8.four_bits import SIDE_OF_16, round_four_bits
from mjax.kernels.fp8.weight_rounding import SIDES_OF_GROUPS, round_integer_groups

_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.int32)
_GROUP_OF_32, _GROUP_OF_128 = SIDES_OF_GROUPS["mxfp4"], SIDES_OF_GROUPS["int4_group128"]
_NUMBER_KINDS = {WEIGHT: (8, "float"), _BYTE: (4, "float"), _WORD: (4, "int")}  # bits, type


class RoundedMatrix(NamedTuple):
    """A rounded matrix.

    parts: the stored tensors, by the end of their names. numbers: fp32 [out, in], those stored.
    """

    parts: dict[str, np.ndarray]
    numbers: np.ndarray


@dataclass(frozen=True)
class Scheme:
    """A way to round and store matrices [out, in].

    format, weights, activations: in compressed-tensors' words.
    block: the rows and columns that share a scale; None: all of them.
    code, scale: dtypes of what is stored. more: further stored tensors.
    round: (matrix, which may be overwritten; the largest magnitude of it and of the matrices fused
        with it; its name) -> what is stored.
    shares: whether matrices that servers fuse need a number in common.
    """

    format: str
    block: tuple[int | None, int | None]
    code: np.dtype
    scale: np.dtype
    round: Callable[[np.ndarray, float, str], RoundedMatrix]
    weights: Mapping[str, object]
    activations: Mapping[str, object] | None = None
    more: Mapping[str, Entry] = field(default_factory=dict)
    shares: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a matrix, and those fused with it, have one scale."""
        return self.block == (None, None)

    def sides(self, shape: Shape) -> tuple[int, int]:
        """The rows and columns of a block of a matrix."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def entries(self, shape: Shape) -> dict[str, Entry]:
        """The stored tensors of a matrix, in order, by the end of their names."""
        bits, _ = _NUMBER_KINDS[self.code]
        in_code = 8 * self.code.itemsize // bits
        codes = shape[0], shape[1] // in_code
        rows, columns = self.sides(shape)
        scales = (1,) if self.is_whole else (shape[0] // rows, shape[1] // columns)
        name = "weight" if bits == 8 else "weight_packed"
        return {name: (codes, self.code), "weight_scale": (scales, self.scale), **self.more}

    def config(self, ignored: list[str]) -> dict:
        """The quantization_config of a config.json; `ignored` names modules left as they are."""
        bits, kind = _NUMBER_KINDS[self.code]
        weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
        weights |= self.weights
        return compressed_tensors_config(self.format, weights, self.activations, ignored)


# ---- 8 bits --------------------------------------------------------------------------------------


@jax.jit
def _scaled_as_a_whole(w: jax.Array, amax: jax.Array) -> Blocks:
    def rule(_: jax.Array, to) -> tuple[jax.Array, jax.Array]:
        return free_scales(amax.reshape(1, 1), to)

    return round_blocks(w, w.shape, rule, FORMATS["e4m3"], exact=False)


def _round_tensor(w: np.ndarray, amax: float, name: str) -> RoundedMatrix:
    rounded = _scaled_as_a_whole(w, np.float32(amax))
    return _in_eight_bits(np.asarray(rounded.values), np.asarray(rounded.factors).reshape(1))


def _round_channels(w: np.ndarray, amax: float, name: str) -> RoundedMatrix:
    return _in_eight_bits(*quantize_rows(w, name))


def _round_squares(w: np.ndarray, amax: float, name: str) -> RoundedMatrix:
    codes, scales = quantize_blocks(w, name)
    wide = scales.repeat(BLOCK_SIDE, 0).repeat(BLOCK_SIDE, 1)
    return _in_eight_bits(codes, scales, wide)


def _in_eight_bits(
    codes: np.ndarray, scales: np.ndarray, wide: np.ndarray | None = None
) -> RoundedMatrix:
    numbers = codes.astype(SCALE) * (scales if wide is None else wide)
    return RoundedMatrix({"weight": codes, "weight_scale": scales}, numbers)


# ---- 4 bits --------------------------------------------------------------------------------------


@jax.jit
def _in_sixteens(w: jax.Array, amax: jax.Array) -> Blocks:
    return round_four_bits(w, (1, SIDE_OF_16), amax)


def _round_nvfp4(w: np.ndarray, amax: float, name: str) -> RoundedMatrix:
    rounded = _in_sixteens(w, np.float32(amax))
    top = np.float32(FORMATS["e2m1"].top * FORMATS["e4m3"].top)
    whole = min(top / np.float32(amax), np.finfo(SCALE).max) if amax else np.float32(1)
    factors, values = np.asarray(rounded.factors), np.asarray(rounded.values).astype(SCALE)
    parts = {
        "weight_packed": _packed_floats(values),
        "weight_scale": factors.astype(WEIGHT),
        "weight_global_scale": np.array([whole], SCALE),
    }
    return RoundedMatrix(parts, values * (factors / whole).repeat(SIDE_OF_16, 1))


@jax.jit
def _in_powers(w: jax.Array) -> tuple[Blocks, jax.Array]:
    block, to = (1, _GROUP_OF_32), FORMATS["e2m1"]
    return round_blocks(w, block, rounded_up, to), e8m0_up(block_maxima(w, block), to)


def _round_mxfp4(w: np.ndarray, amax: float, name: str) -> RoundedMatrix:
    rounded, exponents = _in_powers(w)
    values = np.asarray(rounded.values).astype(SCALE)
    parts = {"weight_packed": _packed_floats(values)}
    parts["weight_scale"] = np.asarray(exponents).astype(_BYTE)
    return RoundedMatrix(parts, np.asarray(rounded.numbers()))


@jax.jit
def _in_integers(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return round_integer_groups(w, _GROUP_OF_128)


def _round_integers(w: np.ndarray, amax: float, name: str) -> RoundedMatrix:
    values, scales = map(np.asarray, _in_integers(w))
    wide = scales.astype(SCALE).repeat(_GROUP_OF_128, 1)
    parts = {
        "weight_packed": _packed_pairs((values + 8).astype(_BYTE)).view(_WORD),
        "weight_scale": scales,
        "weight_shape": np.array(w.shape, np.int64),
    }
    return RoundedMatrix(parts, values * wide)


def _packed_floats(values: np.ndarray) -> np.ndarray:
    """E2M1 numbers in fp32 [out, in] as bytes [out, in / 2]."""
    codes = np.searchsorted(np.array(E2M1, SCALE), np.abs(values)).astype(_BYTE)
    return _packed_pairs(codes | (np.signbit(values).astype(_BYTE) << 3))


def _packed_pairs(codes: np.ndarray) -> np.ndarray:
    return codes[:, ::2] | (codes[:, 1::2] << 4)


# ---- the table -----------------------------------------------------------------------------------

_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
SCHEMES = {
    "fp8_tensor": Scheme(
        "float-quantized",
        (None, None),
        WEIGHT,
        SCALE,
        _round_tensor,
        {"strategy": "tensor"},
        _EIGHT_BITS | {"strategy": "token"},
        shares=True,
    ),
    "fp8_channel": Scheme(
        "float-quantized",
        (1, None),
        WEIGHT,
        SCALE,
        _round_channels,
        {"strategy": "channel"},
        _EIGHT_BITS | {"strategy": "token"},
    ),
    "fp8_block128": Scheme(
        "float-quantized",
        (BLOCK_SIDE, BLOCK_SIDE),
        WEIGHT,
        SCALE,
        _round_squares,
        {"strategy": "block", "block_structure": [BLOCK_SIDE, BLOCK_SIDE]},
        _EIGHT_BITS | {"strategy": "group", "group_size": BLOCK_SIDE},
    ),
    "nvfp4": Scheme(
        "nvfp4-pack-quantized",
        (1, SIDE_OF_16),
        _BYTE,
        WEIGHT,
        _round_nvfp4,
        {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        more={"weight_global_scale": ((1,), SCALE)},
        shares=True,
    ),
    "mxfp4": Scheme(
        "mxfp4-pack-quantized",
        (1, _GROUP_OF_32),
        _BYTE,
        _BYTE,
        _round_mxfp4,
        {"strategy": "group", "group_size": _GROUP_OF_32, "scale_dtype": "torch.uint8"},
    ),
    "int4_group128": Scheme(
        "pack-quantized",
        (1, _GROUP_OF_128),
        _WORD,
        REST,
        _round_integers,
        {"strategy": "group", "group_size": _GROUP_OF_128},
        more={"weight_shape": ((2,), np.dtype(np.int64))},
    ),
}
