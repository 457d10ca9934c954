"""A gated feed-forward block in FP8 with delayed scaling, as one function with its own backward.

Of two matmuls (`quantize.matmul`) with a gate between, XLA rounds what goes in and out of the gate
in passes of their own. Here the gate's kernels (`kernels/gate.py`) round while they compute, and
hand the weights' gradients operands that lie as cuBLASLt wants them: contracted axes last.
Invariant: equal to the two matmuls and the gate. Kept for the backward: x, turned, in 8 bits, and
what the gate is given, by the name `up`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels import gate
from mjax.kernels.quantize import (
    E4M3,
    E5M2,
    SCALES,
    Fp8,
    dot8,
    flipped,
    forward_weight8,
    weight8,
    weight_gradient,
)


class Weight(NamedTuple):
    """A matrix [K, N]; its bits and those of its transpose, or None; scales [3] of its matmul; a
    sum [K, N] of its gradients, or None."""

    w: jax.Array
    bits: jax.Array | None
    flipped: jax.Array | None
    scales: jax.Array
    total: jax.Array | None


def takes(fp8: Fp8 | None, act: str) -> bool:
    """Whether `gated_mlp` does a block with gate `act`. Current scaling must know a maximum before
    it rounds, and Transformer Engine has passes of its own."""
    return fp8 is not None and fp8.delayed and fp8.backend == "xla" and act in gate.GATES


def gated_mlp(x: jax.Array, weights: dict, fp8: Fp8, act: str, sums: dict) -> jax.Array:
    """x [..., D] -> [..., D] in x's dtype by weights `up` [D, 2, F] and `down` [F, D].

    `fp8`, and `sums` of gradients, are as in `quantize.matmul`, by the names of the weights.
    """
    f, d = weights["down"].shape
    flat = lambda a, shape: None if a is None else a.reshape(shape)  # noqa: E731

    def matrix(name, shape):
        w, total = weights[name], sums.get(name)
        w = w if total is None else lax.stop_gradient(w)
        bits = fp8.rounded.get(name), fp8.rounded.get(flipped(name))
        w, own, total = (flat(a, shape) for a in (w, bits[0], total))
        return Weight(w, own, flat(bits[1], shape[::-1]), fp8.scales[name], total)

    y = _mlp(act, x.reshape(-1, d), matrix("up", (d, 2 * f)), matrix("down", (f, d)))
    return y.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(act: str, x: jax.Array, up: Weight, down: Weight) -> jax.Array:
    """x [M, D] -> [M, D]; cotangents of scales and sums are as in `quantize.matmul`."""
    return _forward(act, x, up, down)[0]


def _forward(act, x, up, down):
    x8, top = gate.quantise(x, up.scales[0], E4M3)
    h = checkpoint_name(_times(x8, up, x.dtype), "up")
    a8, top_a = gate.gate_forward8(h, down.scales[0], act)
    tops = checkpoint_name(jnp.stack([top, top_a]), SCALES)
    x8, _ = gate.quantise(x, up.scales[0], E4M3, plain=False, turned=True)
    kept = (w if w.bits is None else w._replace(w=None) for w in (up, down))
    return _times(a8, down, x.dtype), (x8, h, tops, *kept)


def _backward(act, saved, g):
    x8, h, tops, up, down = saved
    g8, g8_turned, top = gate.quantise(g, down.scales[2], E5M2, turned=True)
    da = _back(g8, down, g.dtype)
    scales = down.scales[0], up.scales[2]
    dh8, a8, dh8_turned, top_h = gate.gate_backward8(h, da, *scales, act)
    dx = _back(dh8, up, g.dtype)
    up = _gradients(x8, dh8_turned, up, g.dtype, (tops[0], top_h))
    down = _gradients(a8, g8_turned, down, g.dtype, (tops[1], top))
    return dx, up, down


_mlp.defvjp(_forward, _backward)


def _times(x8, weight: Weight, dtype):
    *own, scales, _ = weight
    b, axis = forward_weight8(*own, scales)
    return dot8(x8, b, (1, axis), (scales[0], scales[1]), dtype)


def _back(g8, weight: Weight, dtype):
    w8, scales = weight8(weight.w, weight.bits, weight.scales), weight.scales
    return dot8(g8, w8, (1, 1), (scales[2], scales[1]), dtype, precise=True)


def _gradients(x8, g8, weight: Weight, dtype, seen) -> Weight:
    """The cotangents of `weight`, of turned x8 [K, M] and g8 [N, M] and the maxima `seen`."""
    scales = weight.scales[0], weight.scales[2]
    product = functools.partial(dot8, x8, g8, (1, 1), scales, precise=True)
    dw, total = weight_gradient(product, weight.total, dtype)
    return Weight(dw, None, None, jnp.stack([seen[0], jnp.zeros_like(seen[0]), seen[1]]), total)
