"""T5's biases on attention scores: one a head for each bucket of distances (arXiv 1910.10683).

Short distances have a bucket each. Longer ones share buckets that widen by a constant factor, and
from a largest distance on all share the last. If a query sees both ways, half of the buckets are
for keys after it. Invariant: a bias depends on the columns of query and key alone, so it is the
same however a sequence is cut.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall


def relative_bias(call: AttentionCall, arrays: AttentionArrays) -> jax.Array:
    """The bias of each head for each query and key: fp32 [N, S, T], or [B, N, S, T] where rows
    have columns of their own.

    It is a matmul with the buckets' indicators. Its transpose, which sums the gradients of scores
    into few buckets, then needs no scattered additions.
    """
    table = arrays.relative
    sees_both_ways = call.mask == "full"
    queries, keys = arrays.columns
    distance = keys[None, :] - queries[..., None]
    lookup = jnp.asarray(buckets(table.shape[1], call.max_distance, sees_both_ways))
    furthest = call.max_distance
    place = jnp.clip(distance, -furthest, furthest) + furthest
    one_hot = jax.nn.one_hot(lookup[place], table.shape[1], dtype=table.dtype)
    return jnp.einsum("...stb,nb->...nst", one_hot, table, preferred_element_type=jnp.float32)


@functools.cache
def buckets(count: int, max_distance: int, sees_both_ways: bool) -> np.ndarray:
    """The bucket of each distance from -max_distance to max_distance, int32 [2 * max_distance + 1].

    A distance is the key's column minus the query's. The logarithm is of fp32, as in T5: other
    precisions put some distances into the bucket beside.
    """
    distance = np.arange(-max_distance, max_distance + 1)
    first = np.zeros_like(distance)
    if sees_both_ways:
        count //= 2
        first = np.where(distance > 0, count, 0)
        steps = np.abs(distance)
    else:
        steps = np.maximum(-distance, 0)
    exact = count // 2
    ratio = np.maximum(steps, 1).astype(np.float32) / np.float32(exact)
    widths = np.log(ratio) / np.float32(np.log(max_distance / exact)) * np.float32(count - exact)
    far = np.minimum(exact + widths.astype(np.int64), count - 1)
    return (first + np.where(steps < exact, steps, far)).astype(np.int32)
