"""Recurrences and convolutions of documents that start from the state of another one.

A document may continue a prefix: a document before it in its row, which several continue. Its
tokens come behind those of the prefix, not behind what lies between. Two states travel from chunk
to chunk: S, of the document that a chunk begins in, and P, after the latest prefix. Within a chunk
a token meets those of its own document and of its prefix, decayed along its own path; with log
decays L summed from the chunk's start, b before its document and e at its prefix's end, the decay
from token s of the prefix to token q is L[q] - L[b] + L[e] - L[s].

The gated delta rule and Mamba-2's scan have the same form: y[q] is the sum of decay (q[q] . k[s])
u[s], and what q reads of the rest of S and P. For Mamba-2 u is dt x; the delta rule solves a system
for it (`gated_delta.py`), over the tokens of a path. Chunks are computed one after the other, each
again in the backward, which keeps the states between chunks, [C, B, 2, H, P, N] in fp32. Letters:
as in `chunks.py`; N channels of a key, P of a value.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.recurrence.chunks import by_group, cut, documents_before, wide_dtype


class Forks(NamedTuple):
    """Documents of a row, some of which continue a prefix. All are [B, S].

    documents: int32, the number of each token's document, from 0 on.
    parents: int32, the number of the document that its document continues; -1: none.
    """

    documents: jax.Array
    parents: jax.Array


class ForkedReads(NamedTuple):
    """The inputs of a recurrence for each token.

    q, k: [B, S, G, N]. v: [B, S, H, P]. log_decay: fp32 [B, S, H], not positive.
    beta: fp32 [B, S, H] of the delta rule, or None: u is v.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None


class PathFacts(NamedTuple):
    """Decays along the paths of the tokens of a chunk.

    between: [Q, Q, H], from token s to token q; 0 where s is not on q's path.
    seen: [Q, 2, H], what each token sees of S and of P before the chunk.
    rest: [2, Q, H], what S and P after the chunk keep of each token.
    left: [2, 2, H], what S and P after it keep of S and P before it.
    """

    between: jax.Array
    seen: jax.Array
    rest: jax.Array
    left: jax.Array


def forked_scan(reads: ForkedReads, forks: Forks, chunk: int) -> tuple[jax.Array, jax.Array]:
    """(y [B, S, H, P] in v's dtype, the state after the last token, fp32 [B, H, P, N])."""
    batch, length, heads, size = reads.v.shape
    chunk = min(chunk, length)
    padded = ((0, 0), (0, -length % chunk))
    documents, parents = (jnp.pad(x, padded, mode="edge").reshape(batch, -1, chunk) for x in forks)
    latest = lax.cummax(parents.reshape(batch, -1), axis=1).reshape(parents.shape)[:, :-1, -1]
    saved = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)
    of_reads = ForkedReads(*(None if x is None else cut(x, chunk) for x in reads))
    of_chunk = of_reads, documents, parents, documents_before(documents), saved
    states = jnp.zeros((batch, 2, heads, size, reads.k.shape[-1]), wide_dtype(reads.v.dtype))
    step = jax.checkpoint(lambda states, xs: jax.vmap(_chunk_step)(states, *xs))
    swapped = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), of_chunk)
    states, y = lax.scan(step, states, swapped)
    y = jnp.swapaxes(y, 0, 1).reshape(batch, -1, heads, size)[:, :length]
    return y, states[:, 0]


def _chunk_step(states, reads: ForkedReads, documents, parents, before, saved):
    """(S and P [2, H, P, N] after a chunk of one row, its y [Q, H, P])."""
    q, k, v, log_decay, beta = reads
    groups, wide, dtype = k.shape[1], states.dtype, v.dtype
    exactly = {"preferred_element_type": wide}
    facts = _path_facts(log_decay.astype(wide), documents, parents, before, saved)
    tokens = len(documents)
    between = jnp.moveaxis(facts.between, -1, 0).reshape(groups, -1, tokens, tokens)
    by_groups = states.astype(dtype).reshape(2, groups, -1, *states.shape[2:])

    def read(x: jax.Array) -> jax.Array:
        """[Q, H, P] that x [Q, G, N] reads of the states before the chunk."""
        found = jnp.einsum("qgn,igrpn->qigrp", x, by_groups, **exactly)
        return jnp.sum(found.reshape(tokens, 2, *v.shape[1:]) * facts.seen[..., None], 1)

    written = v
    if beta is not None:
        beta = beta.astype(wide)
        products = jnp.einsum("qgn,sgn->gqs", k, k, **exactly)[:, None] * between
        system = products * beta.T.reshape(groups, -1, tokens, 1)
        right = by_group((v - read(k)) * beta[..., None], groups)
        right = jnp.moveaxis(right.astype(wide), 0, 2)
        sides = {"left_side": True, "lower": True, "unit_diagonal": True}
        written = jnp.moveaxis(lax.linalg.triangular_solve(system, right, **sides), 2, 0)
        written = written.reshape(v.shape).astype(dtype)
    weights = jnp.einsum("qgn,sgn->gqs", q, k, **exactly)[:, None] * between
    of_groups = by_group(written, groups)
    y = jnp.einsum("grqs,sgrp->qgrp", weights.astype(dtype), of_groups, **exactly)
    y = y.reshape(v.shape) + read(q)
    kept = (written * facts.rest[..., None]).astype(dtype).reshape(2, *of_groups.shape)
    new = jnp.einsum("iqgrp,qgn->igrpn", kept, k, **exactly).reshape(states.shape)
    states = jnp.einsum("ijh,jhpn->ihpn", facts.left, states) + new
    return states, y.astype(dtype)


def _path_facts(log_decay, documents, parents, before, saved) -> PathFacts:
    """The decays of a chunk of one row.

    before: the document of the token before the chunk. saved: that of P, or -1.
    """
    log = jnp.cumsum(log_decay, 0)
    start = log - log_decay  # before each token
    place = jnp.arange(len(log))
    of_last = jnp.append(before, documents[:-1])  # the document of the token before
    begins = lax.cummax(jnp.where(documents != of_last, place, 0))
    fork = lax.cummax(jnp.where((documents != of_last) & (parents == of_last), place, -1))
    ended = jnp.where(fork[:, None] >= 0, start[fork], 0)
    path = log - start[begins] + ended  # of tokens of the prefix
    follows = (parents >= 0) & (documents != before)
    own = (documents[:, None] == documents) & (place[:, None] >= place)
    of_prefix = follows[:, None] & (parents[:, None] == documents)
    apart = jnp.where(own[..., None], log[:, None] - log, path[:, None] - log)
    between = _decay_where(own | of_prefix, apart)
    on_path = follows & (parents == before)
    from_s = _decay_where((documents == before) | on_path, jnp.where(on_path[:, None], path, log))
    from_p = _decay_where(follows & (parents == saved) & ~on_path, path)
    seen = jnp.stack([from_s, from_p], 1)
    last, prefix = fork[-1], of_last[fork[-1]]
    is_new, end = last >= 0, start[last]
    of_new = _decay_where(is_new & (documents == prefix) & (place < last), end - log)
    rest = jnp.stack([between[-1], of_new])
    to_p = jnp.stack(
        [_decay_where(is_new & (prefix == before), end), jnp.where(is_new, 0, jnp.ones_like(end))]
    )
    return PathFacts(between, seen, rest, jnp.stack([seen[-1], to_p]))


def _decay_where(where: jax.Array, log: jax.Array) -> jax.Array:
    """exp(log [..., H]) at the places of `where`, 0 elsewhere."""
    return jnp.exp(jnp.where(where[..., None], log, -jnp.inf))


@jax.checkpoint
def forked_conv(x: jax.Array, weight: jax.Array, bias: jax.Array | None, forks: Forks) -> jax.Array:
    """`causal_conv` (`causal_conv.py`), where documents begin behind the end of their prefix."""
    documents, parents = forks
    wide, taps = wide_dtype(x.dtype), weight.shape[-1]
    place = jnp.arange(x.shape[1], dtype=jnp.int32)
    of_last = jnp.pad(documents[:, :-1], ((0, 0), (1, 0)))
    changed = documents != of_last
    begins = lax.cummax(jnp.where(changed, place, 0), axis=1)
    fork = lax.cummax(jnp.where(changed & (parents == of_last), place, 0), axis=1)
    first = jnp.take_along_axis(begins, jnp.maximum(fork - 1, 0), 1)  # of the prefix
    total = jnp.zeros(x.shape, wide)
    for k in range(taps):
        behind = taps - 1 - k
        own = place - behind
        of_prefix = fork - (behind - (place - begins))
        is_own = own >= begins
        exists = is_own | ((parents >= 0) & (of_prefix >= first))
        source = jnp.where(exists, jnp.where(is_own, own, of_prefix), 0)
        channels = tuple(range(2, x.ndim))
        taken = jnp.take_along_axis(x, jnp.expand_dims(source, channels), 1).astype(wide)
        taken = jnp.where(jnp.expand_dims(exists, channels), taken, 0)
        total = total + taken * weight[..., k].astype(wide)
    if bias is not None:
        total = total + bias.astype(wide)
    return jax.nn.silu(total).astype(x.dtype)
