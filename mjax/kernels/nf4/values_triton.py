"""The pass over codes as a Triton kernel; `values.py` says what it computes and calls it."""

import triton
import triton.language as tl


@triton.jit
def read_codes(
    codes,
    magnitudes,
    levels,
    values,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Some outputs of one block: codes [HALF, OUTPUTS] and magnitudes [OUTPUTS] of each block."""
    tiles = tl.cdiv(OUTPUTS, TILE)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    output = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = output < OUTPUTS
    magnitude = tl.load(magnitudes + block * OUTPUTS + output, mask=inside, other=0.0)
    row = block * HALF + tl.arange(0, HALF)[:, None]
    mask = inside[None, :] & (row >= 0)
    code = tl.load(codes + row * OUTPUTS + output[None, :], mask=mask, other=0).to(tl.int32)
    early = tl.load(levels + (code >> 4)) * magnitude[None, :]
    late = tl.load(levels + (code & 15)) * magnitude[None, :]
    place = values + 2 * row * OUTPUTS + output[None, :]
    tl.store(place, early.to(values.dtype.element_ty), mask=mask)
    tl.store(place + OUTPUTS, late.to(values.dtype.element_ty), mask=mask)
