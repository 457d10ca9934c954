"""The log-probabilities of the last tokens of rows, a batch at a time."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mjax.infer.records import bucket
from mjax.interop.pretrained import Pretrained
from mjax.models.base.context import Context, Kernels, tokens_of

Row = tuple[Sequence[int], int]  # ids, and how many at their end are scored
_AT_ONCE = 1024  # tokens whose logits are in memory


def batch_of(
    rows: Sequence[Row], count: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, labels, mask of the scored ones) [count, S] of rows, the longest first.

    S is a power of two, or `most`. Further rows score nothing.
    """
    longest = max(2, len(rows[0][0])) - 1
    shape = count, min(bucket(longest), most)
    tokens, labels = np.zeros((2, *shape), np.int32)
    mask = np.zeros(shape, bool)
    for i, (ids, scored) in enumerate(rows):
        end = len(ids) - 1
        tokens[i, :end] = ids[:-1]
        labels[i, :end] = ids[1:]
        mask[i, end - scored : end] = True
    return tokens, labels, mask


def scorer(model: Pretrained):
    """Jitted (params, tokens, labels, mask [B, S]) -> (fp32 [B] sums of the masked labels'
    log-probabilities, bool [B] whether each of them is the likeliest), whole on every device."""
    everywhere = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())

    @partial(jax.jit, out_shardings=everywhere)
    def score(params, tokens, labels, mask):
        decoder = model.definition.bind(params)
        ctx = Context(kernels=Kernels(attention="xla"))
        x, _, _ = decoder.hidden(tokens, tokens_of(tokens.shape), ctx)

        def one(token):
            vector, label = token
            z = decoder.logits(vector)
            logprob = z[label] - jax.nn.logsumexp(z)
            return logprob, jnp.argmax(z) == label

        vectors = x.reshape(-1, x.shape[-1])
        flat = vectors, labels.reshape(-1)
        logprobs, hits = jax.lax.map(one, flat, batch_size=_AT_ONCE)
        logprobs = logprobs.reshape(mask.shape)
        hits = hits.reshape(mask.shape)
        sums = jnp.where(mask, logprobs, 0).sum(1)
        return sums, (hits | ~mask).all(1)

    return score
