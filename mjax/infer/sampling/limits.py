"""Top-k, top-p and min-p without a sort of the vocabulary.

Each keeps a head of the sorted row, so all that is needed is the least logit that stays. It is
found digit by digit from the highest bit: fp32 numbers have 32 bits, and a sum over the row says
whether a candidate is too high. A pass reads the logits once; a sort moves them many times.
"""

import jax
import jax.numpy as jnp
import numpy as np

_LEAST = float(np.finfo(np.float32).tiny)  # fp32 computes with no smaller number above 0
_DIGIT = 2  # bits that one pass over the logits decides
_MINUS_INFINITY = 0x007FFFFF  # its place in the order of all fp32 numbers


def limited(z: jax.Array, settings: dict[str, jax.Array]) -> jax.Array:
    """Logits fp32 [R, V] with all tokens outside top-k, top-p and min-p at minus infinity.

    settings: top_k int32, top_p and min_p fp32, each [R]. Top-p counts what top-k has left, and
    tokens of equal logits are kept or dropped together.
    """
    top_k, top_p, min_p = (settings[name][:, None] for name in ("top_k", "top_p", "min_p"))
    size = z.shape[-1]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    least = largest_reaching(z, jnp.ones_like(z), count.astype(z.dtype))
    weights = jnp.where(z >= least, jnp.exp(z - z.max(-1, keepdims=True)), 0)
    mass = jnp.maximum(top_p * weights.sum(-1, keepdims=True), _LEAST)
    least = jnp.where(top_p < 1, largest_reaching(z, weights, mass), least)
    return jnp.where((z >= least) & (weights >= min_p), z, -jnp.inf)


def largest_reaching(z: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The largest t [R, 1] for which the weights [R, V] of all z >= t reach target > 0 [R, 1].

    Weights are 0 or more. Minus infinity where all of them do not reach it.
    """

    def decide(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = (32 - _DIGIT * (step + 1)).astype(jnp.uint32)
        digit = jnp.zeros_like(found)
        for candidate in range(1, 1 << _DIGIT):
            bound = _float_at(found | jnp.uint32(candidate) << shift)
            reached = jnp.where(z >= bound, weights, 0).sum(-1, keepdims=True)
            digit += (reached >= target).astype(jnp.uint32)
        return found | digit << shift

    places = jnp.zeros(target.shape, jnp.uint32)
    return _float_at(jax.lax.fori_loop(0, 32 // _DIGIT, decide, places))


def _float_at(place: jax.Array) -> jax.Array:
    """The fp32 number at a place, uint32, in their order; NaN above infinity.

    Subnormal numbers are 0, as devices may compare them so.
    """
    place = jnp.maximum(place, jnp.uint32(_MINUS_INFINITY))
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(place >= sign, place ^ sign, ~place)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.abs(found) < _LEAST, 0.0, found)
