"""AdamW of one row of a stack as a Triton kernel; `adam.py` says what it computes and calls it."""

import triton
import triton.language as tl


@triton.jit
def update_row(
    param,
    mu,
    nu,
    grad,
    row,
    numbers,
    new_param,
    new_mu,
    new_nu,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    EPS: tl.constexpr,
):
    """Row `row` of param, mu and nu [L, SIZE] after a step by grad [SIZE], written in its place."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    in_stack = tl.load(row).to(tl.int64) * SIZE + place
    lr, decay, scale = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    mu_correction, nu_correction = tl.load(numbers + 3), tl.load(numbers + 4)
    keep = tl.load(numbers + 5) > 0
    g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32) * scale
    old = tl.load(param + in_stack, mask=mask, other=0.0)
    old_m = tl.load(mu + in_stack, mask=mask, other=0.0)
    old_v = tl.load(nu + in_stack, mask=mask, other=0.0)
    m = B1 * old_m.to(tl.float32) + (1 - B1) * g
    v = B2 * old_v.to(tl.float32) + (1 - B2) * (g * g)
    direction = m * mu_correction / (tl.sqrt(v * nu_correction) + EPS)
    wide = old.to(tl.float32)
    new = wide - lr * (direction + decay * wide)
    tl.store(param + in_stack, tl.where(keep, new.to(old.dtype), old), mask=mask)
    tl.store(mu + in_stack, tl.where(keep, m.to(old_m.dtype), old_m), mask=mask)
    tl.store(nu + in_stack, tl.where(keep, v.to(old_v.dtype), old_v), mask=mask)
