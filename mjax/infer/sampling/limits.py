"""Top-k, top-p, min-p and the likeliest tokens without a sort of the vocabulary.

Each limit keeps a head of the sorted row, so all that is needed is the least logit that stays. It
is found digit by digit from the highest: fp32 numbers have 8 digits of 4 bits, and sums over the
row say which candidates are too high. A pass reads the logits once; a sort moves them many times.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

_LEAST = float(np.finfo(np.float32).tiny)  # fp32 computes with no smaller number above 0
_DIGIT = 4  # bits that one pass over the logits decides
_BLOCK = 256  # tokens of which the likeliest stands for all at first
_MINUS_INFINITY = 0x007FFFFF  # its place in the order of all fp32 numbers


def limited(z: jax.Array, settings: dict[str, jax.Array]) -> jax.Array:
    """Logits fp32 [R, V] with all tokens outside top-k, top-p and min-p at minus infinity.

    settings: top_k int32, top_p and min_p fp32, each [R]. Top-p counts what top-k has left, and
    tokens of equal logits are kept or dropped together.
    """
    top_k = settings["top_k"][:, None]
    top_p = settings["top_p"][:, None]
    min_p = settings["min_p"][:, None]
    highest = z.max(-1, keepdims=True)
    least = _least_of_top_k(z, top_k)
    weights = jnp.where(z >= least, jnp.exp(z - highest), 0)
    least = jnp.maximum(least, _least_of_top_p(z, weights, top_p))
    keep = (z >= least) & (weights >= min_p)
    return jnp.where(keep, z, -jnp.inf)


def _least_of_top_k(z: jax.Array, top_k: jax.Array) -> jax.Array:
    """The least logit that stays [R, 1]."""
    size = z.shape[-1]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    return largest_reaching(z, jnp.ones_like(z), count.astype(z.dtype))


def _least_of_top_p(z: jax.Array, weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The least logit that stays [R, 1]; weights: probabilities times any factor of the row."""
    mass = top_p * weights.sum(-1, keepdims=True)
    least = largest_reaching(z, weights, jnp.maximum(mass, _LEAST))
    return jnp.where(top_p < 1, least, -jnp.inf)


def largest_reaching(z: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The largest t [R, 1] for which the weights [R, V] of all z >= t reach target > 0 [R, 1].

    Weights are 0 or more. Minus infinity where all of them do not reach it.
    """
    digits = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)
    shifts = jnp.arange(32 - _DIGIT, -1, -_DIGIT, dtype=jnp.uint32)

    def decide(place: jax.Array, shift: jax.Array) -> tuple[jax.Array, None]:
        candidates = place | digits << shift
        sums = _sums_above(z, weights, _float_at(candidates))
        reached = [(s[:, None] >= target).astype(jnp.uint32) for s in sums]
        digit = sum(reached)
        return place | digit << shift, None

    lowest = jnp.zeros(target.shape, jnp.uint32)
    place, _ = jax.lax.scan(decide, lowest, shifts)
    return _float_at(place)


def _sums_above(z: jax.Array, weights: jax.Array, bounds: jax.Array) -> Sequence[jax.Array]:
    """The weights [R, V] of all z at or above each of bounds [R, N], summed: N arrays [R].

    They are one reduction of N operands, so that XLA reads the logits once for all.
    """
    kept = [jnp.where(z >= bounds[:, i, None], weights, 0) for i in range(bounds.shape[1])]
    zeros = [jnp.zeros((), z.dtype)] * len(kept)
    return jax.lax.reduce(kept, zeros, partial(jax.tree.map, jnp.add), (1,))


def likeliest(logits: jax.Array, count: int) -> jax.Array:
    """The tokens int32 [R, count] of the largest logits [R, V], largest first; equal ones by id.

    They lie in the `count` blocks with the largest maxima. XLA would sort all logits.
    """
    rows, size = logits.shape
    if size <= count * _BLOCK:
        return jax.lax.top_k(logits, count)[1]
    padding = (0, 0), (0, -size % _BLOCK)
    padded = jnp.pad(logits, padding, constant_values=-jnp.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    _, chosen = jax.lax.top_k(blocks.max(-1), count)
    chosen = jnp.sort(chosen, axis=-1)
    inner = jnp.take_along_axis(blocks, chosen[:, :, None], 1)
    _, places = jax.lax.top_k(inner.reshape(rows, -1), count)
    block = jnp.take_along_axis(chosen, places // _BLOCK, 1)
    return block * _BLOCK + places % _BLOCK


def _float_at(place: jax.Array) -> jax.Array:
    """The fp32 number at a place, uint32, in their order; NaN above infinity.

    Subnormal numbers are 0, as devices may compare them so.
    """
    place = jnp.maximum(place, jnp.uint32(_MINUS_INFINITY))
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(place >= sign, place ^ sign, ~place)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.abs(found) < _LEAST, 0.0, found)
