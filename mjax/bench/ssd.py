"""Mamba-2's work between its projections, to time: the scan, and the preceding convolution.

The reference is plain JAX, which XLA compiles. FLOPs are those of chunks of 64 tokens, half of each
square, with products of B and C once a group; a backward has twice as many. Bytes are those of
inputs and outputs: states between chunks, which our backward writes and reads, do not count.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mjax.bench.work import Work, draw, pulled
from mjax.kernels.base.chooser import Device, believed
from mjax.kernels.recurrence.causal_conv import causal_conv
from mjax.kernels.recurrence.ssd import SsdInputs, ssd

_CHUNK = 64
_CHUNK_OF_REFERENCE = 128  # its fastest
_TAPS = 4


def scans(b: int, s: int, heads: int, groups: int, size: int, state: int) -> Iterator[Work]:
    """Time the scan of x [B, S, H, P] with states [P, N], in bf16, and its convolution."""
    x = draw((b, s, heads, size))
    steps = draw((b, s, heads), 2, "float32")
    dt = jax.nn.softplus(steps - 3)
    a = -jnp.linspace(1.0, 16.0, heads)
    of_groups = [draw((b, s, groups, state), seed) * state**-0.25 for seed in (3, 4)]
    inputs = SsdInputs(x, dt, a, *of_groups)

    def scan(*inputs: jax.Array) -> jax.Array:
        return ssd(SsdInputs(*inputs), chunk=_CHUNK_OF_REFERENCE)[0]

    of_groups_a_token = groups * state * _CHUNK
    of_heads_a_token = heads * size * (_CHUNK + 4.0 * state)
    flops = b * s * (of_groups_a_token + of_heads_a_token)
    small = dt.nbytes + 2.0 * of_groups[0].nbytes
    moved = 2 * x.nbytes + small, 3 * x.nbytes + 2 * small
    yield from _both_ways("", scan, inputs, moved, flops)
    width = heads * size + 2 * groups * state
    channels = draw((b, s, width), 5)
    weight = draw((width, _TAPS), 6, "float32")
    moved = 2.0 * channels.nbytes, 3.0 * channels.nbytes
    yield from _both_ways("convolution ", causal_conv, (channels, weight), moved)


def _both_ways(
    name: str, run: Callable, inputs: tuple, moved: tuple[float, float], flops: float = 0.0
) -> Iterator[Work]:
    """Forward and backward, by ours and by the reference; `moved` are the bytes of each."""

    def plain(*inputs: jax.Array) -> jax.Array:
        with believed(Device("cpu")):
            return run(*inputs)

    for prefix, f, expected in (("", run, plain), ("reference ", plain, None)):
        yield Work(f"{prefix}{name}forward", f, inputs, flops, moved[0], expected)
        yield pulled(f, inputs, f"{prefix}{name}backward", 2 * flops, moved[1])
