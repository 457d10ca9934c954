"""Context parallelism: causal attention of sequences that are split over the mesh axis cp.

A sequence is cut into 2·cp chunks and device r holds chunks r and 2·cp-1-r (zigzag), so all devices
see equally many keys. `zigzag` orders a batch once, on the host; every token carries its true place
(`Tokens.columns`), so only attention needs to know. Four ways to exchange keys (docs/context.md):
all_gather; ring with merged log-sum-exp (Liu et al., arXiv 2310.01889; zigzag: Brandon et al.,
arXiv 2311.09431); a2a, heads for sequence (DeepSpeed-Ulysses, arXiv 2309.14509); a2a_ring, both.
Invariant: the output is that of `kernels.attention` on the whole sequence, and gradients are those
of shares: what a device computes for another's keys travels back to their owner.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels.attention import (
    attention,
    block_backward,
    block_forward,
    require,
    resolve,
)
from mjax.models.barriers import wait_for_all
from mjax.sharding.collectives import Parallel

_AXIS = "cp"
_NOTHING = -1e30  # log-sum-exp of no key


def zigzag(size: int, cp: int) -> np.ndarray:
    """Order of the columns of a batch that puts chunks r and 2·cp-1-r on device r of cp."""
    chunks = np.arange(size).reshape(2 * cp, -1)
    return np.concatenate([chunks[[r, 2 * cp - 1 - r]].ravel() for r in range(cp)])


@jax.named_scope("sdpa")
def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    parallel: Parallel,
    cp_type: str,
    cp_a2a: int,
    permute: bool = True,
    columns: tuple[jax.Array, jax.Array],
    segments: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    dropout: tuple | None = None,
    **options,
) -> jax.Array:
    """`kernels.attention` where q, k, v and the places of tokens are this device's zigzag shard.

    `permute` false: keys may not go round in a ring, because only some devices run this layer.
    Raises `UserError` where `cp_type` lacks a feature: it never changes the computation.
    """
    if parallel.cp == 1:
        places = dict(columns=columns, segments=segments)
        return attention(q, k, v, sinks=sinks, dropout=dropout, **places, **options)
    packed = segments is not None and options["max_documents"] != 1
    softcap, window = options["softcap"], options["window"]
    implementation = resolve(options.pop("implementation"), q, softcap, sinks, dropout)
    extra = dict(attn_logit_softcapping=softcap, attention_sinks=sinks, attention_dropout=dropout)
    lacking = [name for name, value in extra.items() if value is not None]
    masked = _unknown_to_blocks(implementation, packed or window is not None, lacking)
    if cp_type == "auto":
        grouped = k.shape[2] < q.shape[2]
        cp_type = "a2a" if masked else choose(parallel.cp, grouped, bool(lacking) or not permute)
    _refuse(cp_type, q.shape[2], parallel.cp, cp_a2a, lacking, masked, permute)
    if cp_type == "all_gather" and implementation == "xla":
        k, v = (natural(parallel.all_gather(x, _AXIS, 1), parallel.cp) for x in (k, v))
        whole = jnp.arange(k.shape[1], dtype=jnp.int32)
        if segments is not None:
            keys = natural(parallel.all_gather(segments[1], _AXIS, 1), parallel.cp)
            segments = segments[0], keys
        options |= dict(columns=(columns[0], whole), segments=segments)
        options |= dict(sinks=sinks, dropout=dropout, implementation="xla")
        return attention(q, k, v, **options)

    group = AllToAllGroup(parallel.cp, {"a2a": parallel.cp, "a2a_ring": cp_a2a}.get(cp_type, 1))
    k, v = (group.repeat_heads(x, q.shape[2]) for x in (k, v))
    q, k, v = (group.to_heads(x) for x in (q, k, v))
    column = group.gather(columns[0], 0)
    segment = group.gather(segments[0], 1) if packed else None
    if group.ring == 1:
        options |= dict(columns=(column, column), implementation=implementation)
        options |= dict(segments=(segment, segment) if packed else None)
        options |= dict(sinks=group.own(sinks, 0), dropout=group.own_heads(dropout))
        return group.to_sequence(attention(q, k, v, **options))
    if implementation != "xla":
        require(implementation, q, softcap, sinks, dropout)
        places = None
    else:
        places = jnp.broadcast_to(column, q.shape[:2]), segment
    ring = Ring(group, cp_type == "all_gather", options["scale"], window, implementation)
    return group.to_sequence(_ring(q, k, v, places, ring))


def choose(cp: int, grouped: bool, lacking: bool) -> str:
    """THE rule of mesh.cp_type=auto where masks need no a2a: all_gather while k and v are small."""
    return "all_gather" if lacking or (cp <= 4 and grouped) else "ring"


def _unknown_to_blocks(implementation: str, masked: bool, lacking: list) -> bool:
    """Whether fused blocks cannot be told of the mask; cuDNN refuses what is `lacking` itself."""
    return (implementation != "xla" and masked) or (implementation == "mosaic" and bool(lacking))


def _refuse(
    cp_type: str, heads: int, cp: int, cp_a2a: int, lacking: list, masked: bool, permute: bool
) -> None:
    if cp_type in ("ring", "a2a_ring") and not permute:
        raise UserError(
            f"mesh.cp_type={cp_type} needs stages of equal layers, but those of mesh.pp differ in "
            "number or kind; set mesh.cp_type=all_gather or a2a"
        )
    if lacking and cp_type in ("ring", "a2a_ring"):
        raise UserError(
            f"mesh.cp_type={cp_type} lacks model.{lacking[0]}; set mesh.cp_type=all_gather or a2a"
        )
    if masked and cp_type != "a2a":
        raise UserError(
            f"mesh.cp_type={cp_type}: its fused blocks know neither packed documents nor sliding "
            "windows, soft-caps or sinks; set mesh.cp_type=a2a or train.attention=xla"
        )
    size = {"a2a": cp, "a2a_ring": cp_a2a}.get(cp_type, 1)
    if heads % size:
        raise UserError(
            f"mesh.cp_type={cp_type} deals {heads} query heads per tp device out to {size} "
            "devices; choose sizes that divide them, or train.attention=xla with another cp_type"
        )


# ---- order and heads ---------------------------------------------------------------------------


def natural(x: jax.Array, n: int, axis: int = 1) -> jax.Array:
    """n zigzag shards, concatenated along `axis` -> the order of the sequence."""
    shape = x.shape
    x = x.reshape(*shape[:axis], n, 2, shape[axis] // (2 * n), *shape[axis + 1 :])
    low, high = (lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in (0, 1))
    return jnp.concatenate([low, jnp.flip(high, axis)], axis).reshape(shape)


def _zigzag_back(x: jax.Array, n: int) -> jax.Array:
    """[B, S, ...] in the order of the sequence -> n zigzag shards: the inverse of `natural`."""
    shape = x.shape
    x = x.reshape(shape[0], 2, n, shape[1] // (2 * n), *shape[2:])
    return jnp.stack([x[:, 0], jnp.flip(x[:, 1], 1)], 2).reshape(shape)


@dataclass(frozen=True)
class AllToAllGroup:
    """Groups of `size` neighbours of the cp axis that trade heads for sequence; they form a ring.

    The zigzag chunks of a group of neighbours are the zigzag chunks of a `ring` that many devices
    long, so a ring of groups works as a ring of devices does.
    """

    cp: int
    size: int

    @property
    def ring(self) -> int:
        return self.cp // self.size

    def _groups(self) -> list[list[int]] | None:
        if self.ring == 1:
            return None
        return np.arange(self.cp).reshape(self.ring, self.size).tolist()

    def repeat_heads(self, x: jax.Array, heads: int) -> jax.Array:
        """Copy kv heads until each member gets those that its share of the `heads` queries use."""
        k = x.shape[2]
        if k % self.size == 0:
            return x
        return jnp.repeat(x, (self.size if self.size % k == 0 else heads) // k, axis=2)

    def to_heads(self, x: jax.Array) -> jax.Array:
        """[B, S/cp, N, H] zigzag -> [B, S/cp·size, N/size, H], in order."""
        if self.size == 1:
            return x
        x = lax.all_to_all(x, _AXIS, 2, 1, axis_index_groups=self._groups(), tiled=True)
        return natural(x, self.size)

    def to_sequence(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_heads`."""
        if self.size == 1:
            return x
        x = _zigzag_back(x, self.size)
        return lax.all_to_all(x, _AXIS, 1, 2, axis_index_groups=self._groups(), tiled=True)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Per-token facts of the group, in order."""
        if self.size == 1:
            return x
        groups = self._groups()
        x = lax.all_gather(x, _AXIS, axis=axis, axis_index_groups=groups, tiled=True)
        return natural(x, self.size, axis)

    def own(self, x: jax.Array | None, axis: int) -> jax.Array | None:
        """This member's part of a per-head array."""
        if x is None or self.size == 1:
            return x
        n = x.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(_AXIS) % self.size * n, n, axis)

    def own_heads(self, dropout: tuple | None) -> tuple | None:
        return None if dropout is None else (*dropout[:3], self.own(dropout[3], 0))


# ---- ring --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Static facts of a ring. `at_once`: gather all keys first instead of passing them on."""

    group: AllToAllGroup
    at_once: bool
    scale: float
    window: int | None
    implementation: str

    @property
    def size(self) -> int:
        return self.group.ring

    def index(self) -> jax.Array:
        return lax.axis_index(_AXIS) // self.group.size

    def shift(self, tree):
        """Pass on to the next device of the ring."""
        to = [(i, (i + self.group.size) % self.group.cp) for i in range(self.group.cp)]
        return jax.tree.map(lambda x: lax.ppermute(x, _AXIS, to), tree)

    def shift_both(self, keys, d_kv: jax.Array) -> tuple:
        """`shift` keys (kv, places) and fp32 gradients as one transfer: two would not overlap."""
        kv, places = keys
        word = jnp.dtype(f"uint{8 * kv.dtype.itemsize}")
        parts = [lax.bitcast_convert_type(x, word).reshape(*x.shape[:-1], -1) for x in (kv, d_kv)]
        moved = self.shift(jnp.concatenate(parts, -1))
        first, rest = jnp.split(moved, [kv.shape[-1]], -1)
        if word.itemsize < d_kv.dtype.itemsize:
            rest = rest.reshape(*d_kv.shape, -1)
        keys = lax.bitcast_convert_type(first, kv.dtype), self.shift(places)
        return keys, lax.bitcast_convert_type(rest, d_kv.dtype)

    def kernel(self, causal: bool) -> dict:
        return dict(
            scale=self.scale,
            causal=causal,
            window=self.window,
            implementation=self.implementation,
        )

    def keys(self, own):
        """(first, next): the keys of step 1, and the function (keys of step s) -> those of s+1."""
        if not self.at_once:
            return self.shift(own), lambda keys, step: self.shift(keys)
        everyone = jax.tree.map(lambda x: lax.all_gather(x, _AXIS), own)

        def of(step):
            owner = (self.index() - step) % self.size
            pick = functools.partial(lax.dynamic_index_in_dim, index=owner, keepdims=False)
            return jax.tree.map(pick, everyone)

        return of(1), lambda _, step: of(step + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q, k, v, places, ring):
    """Attention of this device's zigzag queries to all keys. k and v travel as one buffer.

    Off the diagonal device r sees, of the keys of device j, exactly two half-by-half blocks: its
    high queries see the low keys, and its low queries see the low keys (j < r) or its high queries
    the high keys (j > r). Both are one kernel call, so all devices do equal work at all times.
    """
    return _ring_fwd(q, k, v, places, ring)[0]


def _ring_fwd(q, k, v, places, ring):
    keys, following = ring.keys((jnp.stack([k, v]), places))  # under way during the diagonal
    both = None if places is None else (places, places)
    out, lse = block_forward(q, k, v, both, **ring.kernel(causal=True))
    low, high = zip(_halves(out, 1), _halves(lse, 2), strict=True)
    for step in range(1, ring.size):
        keys, low, high = wait_for_all(keys, low, high)  # one transfer at a time
        (kv, key_places), keys = keys, following(keys, step) if step < ring.size - 1 else None
        earlier = (ring.index() - step) % ring.size < ring.index()
        mine, pair, seen = _off_diagonal(q, kv, places, key_places, earlier)
        out, lse = block_forward(mine(q), *pair, seen, **ring.kernel(causal=False))
        (first, second), (lse1, lse2) = _halves(out, 0), _halves(lse, 0)
        low = _merge_softmax(low, (second, jnp.where(earlier, lse2, _NOTHING)))
        high = _merge_softmax(high, (first, lse1))
        high = _merge_softmax(high, (second, jnp.where(earlier, _NOTHING, lse2)))
    out = jnp.concatenate([low[0], high[0]], 1).astype(q.dtype)
    lse = jnp.concatenate([low[1], high[1]], 2)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, places, out, lse)


def _ring_bwd(ring, saved, d_out):
    """Keys go round again; the gradients of keys follow them one step behind, in fp32.

    The device's own keys are split: its off-diagonal block hides the first transfer, its two
    diagonal blocks the last.
    """
    q, k, v, places, out, lse = saved
    kv = jnp.stack([k, v])
    keys, following = ring.keys((kv, places))
    stats = out, lse, d_out
    d_q, d_kv = _own_backward(q, kv, places, stats, ring, diagonal=False)
    parts = [d_kv]
    for step in range(1, ring.size):
        keys, d_q, d_kv = wait_for_all(keys, d_q, d_kv)
        kv_, key_places = keys
        if ring.at_once:
            keys, moved = following(keys, step), 0
        elif step < ring.size - 1:
            keys, moved = ring.shift_both(keys, d_kv)
        else:
            moved = ring.shift(d_kv)
        earlier = (ring.index() - step) % ring.size < ring.index()
        mine, pair, seen = _off_diagonal(q, kv_, places, key_places, earlier)
        saved_ = mine(out), mine(lse, 2), mine(d_out)
        new = block_backward(mine(q), *pair, seen, *saved_, **ring.kernel(causal=False))
        d_q = d_q + _spread(new[0], earlier, first_to_low=False)
        d_kv = moved + jnp.stack([_spread(d, earlier, first_to_low=True) for d in new[1:]])
        parts.append(d_kv)
    d_q, d_kv = wait_for_all(d_q, d_kv)
    if ring.at_once:
        of = (ring.index() - jnp.arange(ring.size)) % ring.size  # the step that met each owner
        home = lax.psum_scatter(jnp.stack(parts)[of], _AXIS, scatter_dimension=0)
    else:
        home = ring.shift(d_kv)
    d_q2, d_kv2 = _own_backward(q, kv, places, stats, ring, diagonal=True)
    d_k, d_v = (home + d_kv2).astype(k.dtype)
    return (d_q + d_q2).astype(q.dtype), d_k, d_v, None


_ring.defvjp(_ring_fwd, _ring_bwd)


def _own_backward(q, kv, places, stats, ring, diagonal):
    """(d_q, d_kv) of the blocks among a device's own tokens, fp32.

    diagonal: low queries with low keys and high with high, both causal, as one call;
    else: high queries with low keys, all of which they see.
    """
    out, lse, d_out = stats
    if diagonal:
        queries = keys = lambda x, axis=1: jnp.concatenate(_halves(x, axis), 0)
    else:
        queries, keys = (lambda x, axis=1, i=i: _halves(x, axis)[i] for i in (1, 0))
    seen = None
    if places is not None:
        seen = jax.tree.map(queries, places), jax.tree.map(keys, places)
    args = queries(q), keys(kv[0]), keys(kv[1]), seen, queries(out), queries(lse, 2), queries(d_out)
    d_q, *d_kv = block_backward(*args, **ring.kernel(causal=diagonal))
    if diagonal:
        d_q, d_k, d_v = (jnp.concatenate(_halves(d, 0), 1) for d in (d_q, *d_kv))
    else:
        d_q = jnp.concatenate([jnp.zeros_like(d_q), d_q], 1)
        d_k, d_v = (jnp.concatenate([d, jnp.zeros_like(d)], 1) for d in d_kv)
    return d_q, jnp.stack([d_k, d_v])


def _off_diagonal(q, kv, places, key_places, earlier):
    """The two blocks of an off-diagonal step: (selector of queries, (k, v), their places)."""

    def half(x, axis, first):
        low, high = _halves(x, axis)
        return jnp.concatenate([(low, high)[first], jnp.where(earlier, low, high)], 0)

    def mine(x, axis=1):
        return half(x, axis, 1)

    def theirs(x):
        return half(x, 1, 0)

    seen = None
    if places is not None:
        seen = jax.tree.map(mine, places), jax.tree.map(theirs, key_places)
    return mine, (theirs(kv[0]), theirs(kv[1])), seen


def _spread(d, earlier, first_to_low):
    """Gradients of the two blocks [2B, S/2, ...] -> of the low and high halves [B, S, ...]."""
    first, second = _halves(d, 0)
    low, high = jnp.where(earlier, second, 0), jnp.where(earlier, 0, second)
    return jnp.concatenate([low + first, high] if first_to_low else [low, high + first], 1)


def _halves(x, axis):
    return jnp.split(x, 2, axis)


def _merge_softmax(a, b):
    """Softmax over two sets of keys from their (out [B, S, N, H], lse [B, N, S]), fp32."""
    lse = jnp.logaddexp(a[1], b[1])
    weight = [jnp.moveaxis(jnp.exp(x[1] - lse), 1, 2)[..., None] for x in (a, b)]
    return a[0] * weight[0] + b[0] * weight[1], lse
