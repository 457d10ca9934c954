"""Ring attention: causal attention whose keys go round the devices of a ring, block by block.

Softmax over several blocks of keys is merged by their log-sum-exp (Liu et al., arXiv 2310.01889).
Sequences are in zigzag order (`context_parallel.py`; Brandon et al., arXiv 2311.09431): a device
holds a low and a high chunk. Transfers run under the matmuls of the blocks before. Gradients are
those of shares: what a device computes for the keys of another travels back to their owner.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.attention.api import block_backward, block_forward
from mjax.kernels.base.attention_call import AttentionCall
from mjax.models.base.barriers import Tree, wait_for_all

CP_AXIS = "cp"
_NO_KEY = -1e30  # log-sum-exp over no key


class Keys(NamedTuple):
    """Keys and values of a device's tokens as one buffer [2, B, S, K, H], and where they lie.

    places: (columns [B, S], segments [B, S] or None); None where no mask reads them.
    """

    kv: jax.Array
    places: Tree | None


class PartialSoftmax(NamedTuple):
    """Attention to some keys: out [B, S, N, H] and its log-sum-exp [B, N, S], fp32."""

    out: jax.Array
    lse: jax.Array


@dataclass(frozen=True)
class Ring:
    """Static facts of a ring over the mesh axis cp.

    group_size: neighbors on the axis that hold the same tokens (`AllToAllGroup`). The ring goes
        from group to group.
    at_once: whether to gather all keys first instead of passing them on.
    call: causal attention, with an implementation other than 'auto'.
    """

    cp: int
    group_size: int
    at_once: bool
    call: AttentionCall

    @property
    def size(self) -> int:
        return self.cp // self.group_size

    def index(self) -> jax.Array:
        return lax.axis_index(CP_AXIS) // self.group_size

    def is_earlier(self, step: int) -> jax.Array:
        """Whether the keys of a step are of an earlier device of the ring."""
        owner = (self.index() - step) % self.size
        return owner < self.index()

    def shift(self, tree: Tree) -> Tree:
        """Pass arrays on to the next device of the ring."""
        pairs = []
        for device in range(self.cp):
            pairs.append((device, (device + self.group_size) % self.cp))
        return jax.tree.map(lambda x: lax.ppermute(x, CP_AXIS, pairs), tree)

    def shift_both(self, keys: Keys, d_kv: jax.Array) -> tuple[Keys, jax.Array]:
        """`shift` keys and fp32 gradients as one transfer: two would not overlap."""
        kv = keys.kv
        word = jnp.dtype(f"uint{8 * kv.dtype.itemsize}")
        buffer = jnp.concatenate([_as_words(kv, word), _as_words(d_kv, word)], -1)
        buffer = self.shift(buffer)
        kv_words, d_words = jnp.split(buffer, [kv.shape[-1]], -1)
        if word.itemsize < d_kv.dtype.itemsize:
            d_words = d_words.reshape(*d_kv.shape, -1)
        kv = lax.bitcast_convert_type(kv_words, kv.dtype)
        d_kv = lax.bitcast_convert_type(d_words, d_kv.dtype)
        return Keys(kv, self.shift(keys.places)), d_kv

    def exchange(self, local: Keys) -> tuple[Keys, Callable[[Keys, int], Keys]]:
        """(the keys of step 1, the function (keys of step s, s) -> keys of step s + 1)."""
        if not self.at_once:
            return self.shift(local), lambda keys, _: self.shift(keys)
        everyone = jax.tree.map(lambda x: lax.all_gather(x, CP_AXIS), local)

        def of_step(step: int) -> Keys:
            owner = (self.index() - step) % self.size

            def of_owner(x: jax.Array) -> jax.Array:
                return lax.dynamic_index_in_dim(x, owner, keepdims=False)

            return jax.tree.map(of_owner, everyone)

        return of_step(1), lambda _, step: of_step(step + 1)


def _as_words(x: jax.Array, word: jnp.dtype) -> jax.Array:
    """The bits of x as unsigned integers, along its last axis."""
    words = lax.bitcast_convert_type(x, word)
    return words.reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(q, k, v, places, ring):
    """Attention of this device's zigzag queries to all keys: [B, S, N, H] in q's dtype.

    Off the diagonal device r sees, of the keys of device j, exactly two half-by-half blocks. Its
    high queries see the low keys. Its low queries see the low keys (j < r), or its high queries the
    high keys (j > r). Both blocks are one kernel call, so all devices do equal work at all times.
    """
    out, _ = _ring_forward(q, k, v, places, ring)
    return out


def _ring_forward(q, k, v, places, ring):
    local = Keys(jnp.stack([k, v]), places)
    keys, next_keys = ring.exchange(local)  # under way during the diagonal
    both_places = _twice(places)
    out, lse = block_forward(q, k, v, both_places, ring.call, diagonal=True)
    low, high = map(PartialSoftmax, _halves(out, 1), _halves(lse, 2))
    for step in range(1, ring.size):
        keys, low, high = wait_for_all(keys, low, high)  # one transfer at a time
        arrived = keys
        if step < ring.size - 1:
            keys = next_keys(arrived, step)
        earlier = ring.is_earlier(step)
        queries, kv, pair_places = _block_pair(q, places, arrived, earlier)
        out, lse = block_forward(queries, *kv, pair_places, ring.call, diagonal=False)
        first, second = map(PartialSoftmax, _halves(out, 0), _halves(lse, 0))
        low = _merge_softmax(low, _only_if(earlier, second))
        high = _merge_softmax(high, first)
        high = _merge_softmax(high, _only_if(~earlier, second))
    out = jnp.concatenate([low.out, high.out], 1).astype(q.dtype)
    lse = jnp.concatenate([low.lse, high.lse], 2)
    out = checkpoint_name(out, "attn_out")
    lse = checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, places, out, lse)


def _ring_backward(ring, residuals, d_out):
    """Keys go round again; the gradients of keys follow them one step behind, in fp32.

    The blocks among the device's local tokens are split: the one off the diagonal hides the first
    transfer, the two on it hide the last.
    """
    q, k, v, places, out, lse = residuals
    local = Keys(jnp.stack([k, v]), places)
    keys, next_keys = ring.exchange(local)
    d_q, d_kv = _high_to_low_backward(ring, q, local, out, lse, d_out)
    d_kv_of_steps = [d_kv]
    for step in range(1, ring.size):
        keys, d_q, d_kv = wait_for_all(keys, d_q, d_kv)
        arrived = keys
        if ring.at_once:
            keys = next_keys(arrived, step)
            d_kv = 0
        elif step < ring.size - 1:
            keys, d_kv = ring.shift_both(arrived, d_kv)
        else:
            d_kv = ring.shift(d_kv)
        earlier = ring.is_earlier(step)
        pair_d_q, pair_d_kv = _pair_backward(ring, q, places, arrived, out, lse, d_out, earlier)
        d_q = d_q + pair_d_q
        d_kv = d_kv + pair_d_kv
        d_kv_of_steps.append(d_kv)
    d_q, d_kv = wait_for_all(d_q, d_kv)
    if ring.at_once:
        steps = (ring.index() - jnp.arange(ring.size)) % ring.size  # in which each owner was met
        d_kv_of_owners = jnp.stack(d_kv_of_steps)[steps]
        d_kv = lax.psum_scatter(d_kv_of_owners, CP_AXIS, scatter_dimension=0)
    else:
        d_kv = ring.shift(d_kv)
    diagonal_d_q, diagonal_d_kv = _diagonal_backward(ring, q, local, out, lse, d_out)
    d_k, d_v = (d_kv + diagonal_d_kv).astype(k.dtype)
    d_q = (d_q + diagonal_d_q).astype(q.dtype)
    return d_q, d_k, d_v, None


ring_attention.defvjp(_ring_forward, _ring_backward)


# ---- blocks of a ring ----------------------------------------------------------------------------


def _diagonal_backward(ring, q, local: Keys, out, lse, d_out):
    """(d_q, d_kv), fp32, of low queries with low keys and high with high, causal, as one call."""

    def rows(x, axis=1):
        return jnp.concatenate(_halves(x, axis), 0)

    def columns(d):
        return jnp.concatenate(_halves(d, 0), 1)

    places = jax.tree.map(rows, local.places)
    both_places = _twice(places)
    queries, means, d_means = map(rows, (q, out, d_out))
    keys, values = map(rows, local.kv)
    sums = rows(lse, 2)
    grads = block_backward(
        queries, keys, values, both_places, means, sums, d_means, ring.call, diagonal=True
    )
    d_q, d_k, d_v = map(columns, grads)
    return d_q, jnp.stack([d_k, d_v])


def _high_to_low_backward(ring, q, local: Keys, out, lse, d_out):
    """(d_q, d_kv), fp32, of a device's high queries with its low keys, all of which they see."""

    def low(x):
        return _halves(x, 1)[0]

    def high(x, axis=1):
        return _halves(x, axis)[1]

    places = None
    if local.places is not None:
        places = jax.tree.map(high, local.places), jax.tree.map(low, local.places)
    queries, means, d_means = map(high, (q, out, d_out))
    keys, values = map(low, local.kv)
    sums = high(lse, 2)
    d_q, d_k, d_v = block_backward(
        queries, keys, values, places, means, sums, d_means, ring.call, diagonal=False
    )
    d_kv = jnp.stack([d_k, d_v])
    d_q = jnp.concatenate([jnp.zeros_like(d_q), d_q], 1)
    return d_q, jnp.concatenate([d_kv, jnp.zeros_like(d_kv)], 2)


def _pair_backward(ring, q, places, keys: Keys, out, lse, d_out, earlier):
    """(d_q, d_kv), fp32, of the two blocks of a step off the diagonal."""
    queries, kv, pair_places = _block_pair(q, places, keys, earlier)
    d_q, d_k, d_v = block_backward(
        queries,
        *kv,
        pair_places,
        _pair_queries(out, earlier),
        _pair_queries(lse, earlier, 2),
        _pair_queries(d_out, earlier),
        ring.call,
        diagonal=False,
    )
    d_q = _unpaired(d_q, earlier, first_to_low=False)
    d_k = _unpaired(d_k, earlier, first_to_low=True)
    d_v = _unpaired(d_v, earlier, first_to_low=True)
    return d_q, jnp.stack([d_k, d_v])


def _block_pair(q, places, keys: Keys, earlier):
    """(queries, (k, v), places) of the two blocks of a step off the diagonal, [2 B, S/2, ...]."""
    kv = _pair_keys(keys.kv[0], earlier), _pair_keys(keys.kv[1], earlier)
    pair_places = None
    if places is not None:
        query_places = jax.tree.map(lambda x: _pair_queries(x, earlier), places)
        key_places = jax.tree.map(lambda x: _pair_keys(x, earlier), keys.places)
        pair_places = query_places, key_places
    return _pair_queries(q, earlier), kv, pair_places


def _pair_queries(x, earlier, axis=1):
    low, high = _halves(x, axis)
    second = jnp.where(earlier, low, high)
    return jnp.concatenate([high, second], 0)


def _pair_keys(x, earlier):
    low, high = _halves(x, 1)
    second = jnp.where(earlier, low, high)
    return jnp.concatenate([low, second], 0)


def _unpaired(d, earlier, first_to_low):
    """Gradients of the two blocks [2 B, S/2, ...] -> of the low and high halves [B, S, ...]."""
    first, second = _halves(d, 0)
    low = jnp.where(earlier, second, 0)
    high = jnp.where(earlier, 0, second)
    if first_to_low:
        low = low + first
    else:
        high = high + first
    return jnp.concatenate([low, high], 1)


def _halves(x, axis):
    return jnp.split(x, 2, axis)


def _twice(places):
    """Places of queries and of keys that are the same tokens, if there are any."""
    return None if places is None else (places, places)


def _only_if(condition: jax.Array, part: PartialSoftmax) -> PartialSoftmax:
    """`part`, or attention to no key."""
    return part._replace(lse=jnp.where(condition, part.lse, _NO_KEY))


def _merge_softmax(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    """Attention to the keys of both."""
    lse = jnp.logaddexp(a.lse, b.lse)

    def weighted(part: PartialSoftmax) -> jax.Array:
        weight = jnp.exp(part.lse - lse)
        return part.out * jnp.moveaxis(weight, 1, 2)[..., None]

    return PartialSoftmax(weighted(a) + weighted(b), lse)
