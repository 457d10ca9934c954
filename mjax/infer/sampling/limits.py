"""Top-k, top-p, min-p and the likeliest tokens without a sort of the vocabulary.

Each limit keeps a head of the sorted row, so all that is needed is the least logit that stays. As a
rule it is among the few largest, which one pass over the logits finds. In other rows it is found
digit by digit from the highest: fp32 numbers have 8 digits of 4 bits, and sums over the row say
which candidates are too high. A pass reads the logits once; a sort moves them many times.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

_LEAST = float(np.finfo(np.float32).tiny)  # fp32 computes with no smaller number above 0
_DIGIT = 4  # bits that one pass over the logits decides
_SORTED = 4096  # numbers of a row that XLA sorts in one kernel
_CANDIDATES = 512  # largest logits of a row; as a rule the least that stays is one of them
_MINUS_INFINITY = 0x007FFFFF  # its place in the order of all fp32 numbers

Settings = dict[str, jax.Array]  # the fields of `Sampling`, each [R]
Weigh = Callable[[jax.Array], jax.Array]  # from logits to weights, 0 or more


def within_limits(z: jax.Array, temperature: jax.Array, settings: Settings) -> jax.Array:
    """Whether tokens stay within top-k, top-p and min-p of logits fp32 [R, V]: bool [R, V].

    temperature: fp32 [R, 1], above 0. settings: top_k int32, top_p and min_p fp32, each [R]. Top-p
    counts what top-k has left, and tokens of equal logits are kept or dropped together.
    """
    few, _ = likeliest(z, min(_CANDIDATES, z.shape[1]))
    names = "top_k", "top_p", "min_p"
    top_k, top_p, min_p = (settings[name][:, None] for name in names)
    least = _least_of_top_k(z, few, top_k)

    def tempered(z: jax.Array) -> jax.Array:
        return (z - few[:, :1]) / temperature

    def weigh(z: jax.Array) -> jax.Array:
        return jnp.where(z >= least, jnp.exp(tempered(z)), 0)

    nucleus = _least_of_top_p(z, few, weigh, top_p)
    is_likely = tempered(z) >= jnp.log(min_p)
    return (z >= jnp.maximum(least, nucleus)) & is_likely


def _least_of_top_k(z: jax.Array, few: jax.Array, top_k: jax.Array) -> jax.Array:
    """The least logit that stays [R, 1]; few: the largest logits, largest first."""
    ranks = jnp.arange(1, few.shape[1] + 1, dtype=z.dtype)
    count = jnp.where(top_k < z.shape[1], top_k, 0)
    return _least_reaching(z, few, ranks, jnp.ones_like, count.astype(z.dtype))


def _least_of_top_p(z: jax.Array, few: jax.Array, weigh: Weigh, top_p: jax.Array) -> jax.Array:
    """The least logit that stays [R, 1]; weigh: probabilities times any factor of the row."""
    mass = top_p * weigh(z).sum(-1, keepdims=True)
    target = jnp.where(top_p < 1, jnp.maximum(mass, _LEAST), 0)
    return _least_reaching(z, few, jnp.cumsum(weigh(few), -1), weigh, target)


def _least_reaching(
    z: jax.Array, few: jax.Array, sums: jax.Array, weigh: Weigh, target: jax.Array
) -> jax.Array:
    """`largest_reaching`, or minus infinity where the target is 0.

    sums: of the weights of `few` so far, [R, N]. A row that these cannot decide takes the threshold
    of a search of all logits. Other rows keep theirs, so no row depends on another.
    """
    is_reached = sums >= target
    # Logits of a row of no request may be NaN, which is worth no search.
    found = is_reached.any(-1, keepdims=True) | jnp.isnan(few[:, :1])
    place = is_reached.argmax(-1, keepdims=True)
    least = jnp.where(target > 0, jnp.take_along_axis(few, place, 1), -jnp.inf)

    if few.shape == z.shape:
        return jnp.where(found, least, -jnp.inf)

    def search() -> jax.Array:
        return jnp.where(found, least, largest_reaching(z, weigh, target))

    return jax.lax.cond(found.all(), lambda: least, search)


def largest_reaching(z: jax.Array, weigh: Weigh, target: jax.Array) -> jax.Array:
    """The largest t [R, 1] for which the weights of all z [R, V] >= t reach target > 0 [R, 1].

    Minus infinity where all of them do not reach it. A loop of JAX would end a CUDA graph.
    """
    digits = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)
    place = jnp.zeros(target.shape, jnp.uint32)
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        sums = _sums_above(z, weigh(z), _float_at(place | digits << shift))
        digit = sum((s[:, None] >= target).astype(jnp.uint32) for s in sums)
        place |= digit << shift
    return _float_at(place)


def _sums_above(z: jax.Array, weights: jax.Array, bounds: jax.Array) -> Sequence[jax.Array]:
    """The weights [R, V] of all z at or above each of bounds [R, N], summed: N arrays [R].

    They are one reduction of N operands, so that XLA reads the logits once for all.
    """
    kept = [jnp.where(z >= bounds[:, i, None], weights, 0) for i in range(bounds.shape[1])]
    return jax.lax.reduce(kept, [np.float32(0)] * len(kept), partial(jax.tree.map, jnp.add), (1,))


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits [R, count] of [R, V], largest first, and their tokens; equal ones by id.

    They lie in the `count` <= 2048 blocks with the largest maxima. XLA would sort all logits.
    """
    rows, size = logits.shape
    if size <= _SORTED:
        return jax.lax.top_k(logits, count)
    width = -(-size // _SORTED)
    padding = (0, 0), (0, -size % width)
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(rows, -1, width)
    _, chosen = jax.lax.top_k(blocks.max(-1), count)
    chosen = jnp.sort(chosen, axis=-1)
    inner = jnp.take_along_axis(blocks, chosen[:, :, None], 1, mode="clip")
    found, places = likeliest(inner.reshape(rows, -1), count)
    block = jnp.take_along_axis(chosen, places // width, 1)
    return found, block * width + places % width


def _float_at(place: jax.Array) -> jax.Array:
    """The fp32 number at a place, uint32, in their order; NaN above infinity.

    Subnormal numbers are 0, as devices may compare them so.
    """
    place = jnp.maximum(place, jnp.uint32(_MINUS_INFINITY))
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(place >= sign, place ^ sign, ~place)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.abs(found) < _LEAST, 0.0, found)
