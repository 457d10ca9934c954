"""What Mamba-2 computes between its projections, to time: the scan, and the convolution before it.

The reference is plain JAX, which XLA compiles. FLOPs are those of chunks of 64 tokens, half of each
square, with products of B and C once a group; a backward has twice as many. Bytes are those of
inputs and outputs: states between chunks, which our backward writes and reads, do not count.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mjax.bench.work import Work, draw
from mjax.kernels.causal_conv import causal_conv
from mjax.kernels.chooser import Device, believed
from mjax.kernels.ssd import SsdInputs, ssd

_CHUNK = 64
_CHUNK_OF_REFERENCE = 128  # its fastest
_TAPS = 4


def scans(b: int, s: int, heads: int, groups: int, size: int, state: int) -> Iterator[Work]:
    """Of x [B, S, H, P] with states [P, N], in bf16."""
    x, d_y = draw((b, s, heads, size)), draw((b, s, heads, size), 1)
    dt = jax.nn.softplus(draw((b, s, heads), 2, "float32") - 3)
    of_groups = [draw((b, s, groups, state), seed) * state**-0.25 for seed in (3, 4)]
    inputs = SsdInputs(x, dt, -jnp.linspace(1.0, 16.0, heads), *of_groups)

    def scan(*inputs: jax.Array) -> jax.Array:
        return ssd(SsdInputs(*inputs), chunk=_CHUNK_OF_REFERENCE)[0]

    of_token = groups * state * _CHUNK + heads * size * (_CHUNK + 4.0 * state)
    flops = b * s * of_token
    small = dt.nbytes + 2.0 * of_groups[0].nbytes
    forward, backward = 2 * x.nbytes + small, 3 * x.nbytes + 2 * small
    facts = (
        {"flops": flops, "bytes": forward},
        {"flops": 3 * flops, "bytes": forward + backward},
    )
    yield from _both_ways("", scan, inputs, d_y, facts)

    channels = draw((b, s, heads * size + 2 * groups * state), 5)
    weight = draw((channels.shape[-1], _TAPS), 6, "float32")
    moved = 1.0 * channels.nbytes
    facts = {"bytes": 2 * moved}, {"bytes": 5 * moved}
    yield from _both_ways("convolution ", causal_conv, (channels, weight), channels, facts)


def _both_ways(
    name: str, run: Callable, inputs: tuple, gradient: jax.Array, facts: tuple[dict, dict]
) -> Iterator[Work]:
    """The forward, then forward and backward in one program, each by ours and by the reference."""

    def plain(*inputs: jax.Array) -> jax.Array:
        with believed(Device("cpu")):
            return run(*inputs)

    def pulled(run: Callable) -> Callable:
        def both(gradient: jax.Array, *inputs: jax.Array) -> tuple:
            y, pull = jax.vjp(run, *inputs)
            return y, pull(gradient)

        return both

    def plain_both(*given: jax.Array) -> tuple:
        with believed(Device("cpu")):  # the backward is traced within
            return pulled(run)(*given)

    forward, backward = facts
    yield Work(f"{name}forward", run, inputs, **forward, expected=plain)
    yield Work(f"reference {name}forward", plain, inputs, **forward)
    yield Work(f"{name}forward and backward", pulled(run), (gradient, *inputs), **backward)
    yield Work(f"reference {name}forward and backward", plain_both, (gradient, *inputs), **backward)
