"""The scan of Mamba-2 in four Triton kernels (`ssd_triton.py`); `ssd.py` says what it computes.

Forward: a program takes 64 channels of a head and walks its chunks, with the state in registers. So
no state between chunks goes through memory, and only inputs are kept. Backward: two such walks
write the state before each chunk, and, from the end, the gradient of the state after it. Then
a program takes a chunk of a group and sums the gradients of b and c over the group's heads, in
registers and in order: no atomics, equal bit for bit each time. Invariant: states, decays and sums
are fp32; matmuls read x's dtype, in which the backward's states lie between kernels.

The bound, for 8 x 4096 tokens of 80 heads of 64, state 128, 8 groups, chunks of 64, by 4.2 TB/s and
600 TFLOP/s: the forward moves 0.8 GB and computes 150 GFLOP (0.25 ms), the backward moves 5.8 GB
and computes 300 GFLOP (1.4 ms), of which 3.3 GB are states, written twice and read three times.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.base.chooser import SSD_CHANNELS as CHANNELS
from mjax.kernels.base.triton_call import triton_call

_PROGRAMS = 528  # four for each of an H200's multiprocessors: fewer, and a group's heads are parted


class ScanTile(NamedTuple):
    """Tokens of a chunk, warps of a program, and stages of its loads."""

    chunk: int
    warps: int
    stages: int


# Fastest on an H200. All but the forward's have the same chunk.
FORWARD = ScanTile(64, 4, 2)
STATES = ScanTile(64, 4, 4)
GRADIENTS = ScanTile(64, 8, 3)
GRADIENT_C = ScanTile(64, 4, 3)


def fused_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    starts: jax.Array | None,
    initial: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`ssd` of arrays as they are."""
    begins = None
    if starts is not None:
        tokens = jnp.arange(starts.shape[1], dtype=jnp.int32)
        begins = lax.cummax(jnp.where(starts, tokens, -1), 1)
    return _fused_scan(x, dt, a, b, c, begins, initial)


@jax.custom_vjp
def _fused_scan(x, dt, a, b, c, begins, initial):
    return _fused_forward_rule(x, dt, a, b, c, begins, initial)[0]


def _fused_forward_rule(*inputs: jax.Array):
    from mjax.kernels.recurrence import ssd_triton

    x, dt, a, b, c, begins, initial = inputs
    tile = FORWARD
    steps, log = _steps_and_sums(dt, a, tile.chunk)
    y, final = _call_scan(
        ssd_triton.ssd_forward,
        tile,
        [x, steps, log, _padded(begins, tile.chunk), b, c, initial.astype(jnp.float32)],
        [_shape_like(x), _shape_like(initial, jnp.float32)],
        programs=initial.size // (CHANNELS * b.shape[-1]),
        PACKED=begins is not None,
    )
    return (y, final), inputs


def _fused_backward_rule(inputs: tuple, gradients: tuple):
    x, dt, a, b, c, begins, initial = inputs
    d_y, d_final = gradients
    chunk = STATES.chunk
    (steps, log), through_steps = jax.vjp(functools.partial(_steps_and_sums, chunk=chunk), dt, a)
    packed = {"PACKED": begins is not None}
    begins = None if begins is None else _padded(begins, chunk)
    decays = steps, log, _padded(begins, chunk)
    d_states, d_initial = _states(d_y, decays, c, d_final, None, **packed)
    states, _, d_decays = _states(x, decays, b, initial, d_states, **packed)
    d_x, d_steps, d_log, d_b, d_c = _scan_gradients(
        x, decays, begins, b, c, d_y, states, d_states, **packed
    )
    d_log = d_log.at[..., chunk - 1 :: chunk].add(d_decays)
    d_dt, d_a = through_steps((d_steps, d_log))
    return d_x, d_dt, d_a, d_b, d_c, None, d_initial


_fused_scan.defvjp(_fused_forward_rule, _fused_backward_rule)


def _steps_and_sums(dt: jax.Array, a: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """(dt, the sums of dt * a from each chunk's start to each token): [B, H, chunks * Q]."""
    steps = jnp.swapaxes(dt.astype(jnp.float32), 1, 2)
    steps = jnp.pad(steps, [(0, 0), (0, 0), (0, -dt.shape[1] % chunk)])
    logs = (steps * a.astype(jnp.float32)[:, None]).reshape(*steps.shape[:2], -1, chunk)
    return steps, jnp.cumsum(logs, -1).reshape(steps.shape)


def _padded(begins: jax.Array | None, chunk: int) -> jax.Array:
    """Begins of documents, padded to whole chunks; without any, an array that nothing reads."""
    if begins is None:
        return jnp.zeros((1,), jnp.int32)
    return jnp.pad(begins, [(0, 0), (0, -begins.shape[1] % chunk)], mode="edge")


def _states(v, decays, w, initial, d_states, **constants: bool) -> list[jax.Array]:
    """(States between chunks [B, H, P / 64, chunks, N, 64] in v's dtype, the state at the end).

    With `d_states` also the gradients of logarithms of the decays of chunks [B, H, chunks].
    """
    from mjax.kernels.recurrence import ssd_triton

    tile, state = STATES, w.shape[-1]
    programs = initial.size // (CHANNELS * state)
    (batch, length, heads, size), reverse = v.shape, d_states is None
    cut, chunks = size // CHANNELS, -(-length // tile.chunk)
    between = jax.ShapeDtypeStruct((batch, heads, cut, chunks, state, CHANNELS), v.dtype)
    of_chunks = jax.ShapeDtypeStruct(between.shape[:4], jnp.float32)
    states, final, *d_decays = _call_scan(
        ssd_triton.ssd_states,
        tile,
        [v, *decays, w, initial.astype(jnp.float32), v if reverse else d_states],
        [between, _shape_like(initial, jnp.float32), *([] if reverse else [of_chunks])],
        programs=programs,
        REVERSE=reverse,
        **({"d_decays": None} if reverse else {}),
        **constants,
    )
    return [states, final, *(jnp.sum(v, 2) for v in d_decays)]


def _scan_gradients(x, decays, begins, b, c, d_y, states, d_states, **constants: bool):
    """The gradients of x, steps, logarithms, b and c."""
    from mjax.kernels.recurrence import ssd_triton

    batch, length, groups, state = b.shape
    heads, cut = x.shape[2], x.shape[3] // CHANNELS
    tokens, chunk = decays[0].shape[2], STATES.chunk
    programs = batch * groups * (tokens // chunk)
    parts = _parts_of_group(heads * cut // groups, programs)
    of_slices = jax.ShapeDtypeStruct((batch, heads, cut, tokens), jnp.float32)
    dtype = b.dtype if parts == 1 else jnp.float32
    of_parts = jax.ShapeDtypeStruct((batch, length, groups, parts, state), dtype)
    of_products = jax.ShapeDtypeStruct((programs * parts, chunk, chunk), x.dtype)
    more = {"programs": programs * parts, "PARTS": parts} | constants
    d_x, d_steps, d_log, d_b, d_products = _call_scan(
        ssd_triton.ssd_gradients,
        GRADIENTS,
        [x, *decays, b, c, _products_of_chunks(begins, b, c, chunk), d_y, d_states],
        [_shape_like(x), of_slices, of_slices, of_parts, of_products],
        **more,
    )
    d_log_too, d_c = _call_scan(
        ssd_triton.ssd_gradient_c,
        GRADIENT_C,
        [d_y, *decays, b, c, states, d_products],
        [of_slices, of_parts],
        **more,
    )
    d_steps, d_log = (jnp.sum(v, 2) for v in (d_steps, d_log + d_log_too))
    d_b, d_c = (jnp.sum(v, 3).astype(b.dtype) for v in (d_b, d_c))
    return d_x, d_steps, d_log, d_b, d_c


def _products_of_chunks(
    begins: jax.Array | None, b: jax.Array, c: jax.Array, chunk: int
) -> jax.Array:
    """Products of b and c within chunks, fp32 [B, chunks, G, s, t]; 0 where t does not see s."""
    tokens = jnp.arange(chunk)
    seen = tokens[:, None] <= tokens
    if begins is not None:
        begins = begins.reshape(len(b), -1, 1, 1, chunk)
        first = chunk * jnp.arange(begins.shape[1])[:, None, None, None]
        seen = seen & (first + tokens[:, None] >= begins)
    b, c = (
        jnp.pad(v, [(0, 0), (0, -v.shape[1] % chunk), (0, 0), (0, 0)]).reshape(
            len(v), -1, chunk, *v.shape[2:]
        )
        for v in (b, c)
    )
    products = jnp.einsum("zksgn,zktgn->zkgst", b, c, preferred_element_type=jnp.float32)
    return jnp.where(seen, products, 0)


def _parts_of_group(slices: int, programs: int) -> int:
    """Into how many parts a group's slices go, so that there are programs enough."""
    divisors = [n for n in range(1, slices + 1) if slices % n == 0]
    return next((n for n in divisors if n * programs >= _PROGRAMS), slices)


def _call_scan(
    kernel, tile: ScanTile, inputs, outputs, *, programs: int, **constants
) -> list[jax.Array]:
    """One of the kernels; its first input is like x, its fifth like b."""
    (_, length, heads, size), (*_, groups, state) = inputs[0].shape, inputs[4].shape
    return triton_call(
        kernel,
        inputs,
        outputs,
        programs=programs,
        warps=tile.warps,
        LENGTH=length,
        SLICES=heads * size // CHANNELS,
        CUT=size // CHANNELS,
        GROUPS=groups,
        P=CHANNELS,
        N=state,
        Q=tile.chunk,
        STAGES=tile.stages,
        **constants,
    )


def _shape_like(v: jax.Array, dtype: jnp.dtype | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.shape, dtype or v.dtype)
