"""Context parallelism: causal attention of sequences that are split over the mesh axis cp.

A sequence is cut into 2*cp chunks, and device r holds chunks r and 2*cp-1-r (zigzag), so all
devices see equally many keys. `zigzag` orders a batch once, on the host. Every token carries its
true column (`Tokens.columns`), so only attention needs to know. There are four ways to exchange
keys (docs/context.md): all_gather; ring (`ring_attention.py`); a2a, which trades heads for sequence
(DeepSpeed-Ulysses, arXiv 2309.14509); and a2a_ring, both. Zigzag follows Brandon et al. (arXiv
2311.09431). Invariant: the output is that of `kernels.attention` on the sequence in one piece.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.errors import UserError
from mjax.kernels.attention import attention, require, resolve
from mjax.kernels.attention_call import (
    AttentionArrays,
    AttentionCall,
    DropoutPlaces,
    features_in_use,
)
from mjax.models.context import Context
from mjax.models.ring_attention import CP_AXIS, Ring, ring_attention
from mjax.sharding.collectives import Parallel


def zigzag(size: int, cp: int) -> np.ndarray:
    """The order of the columns of a batch that puts chunks r and 2*cp-1-r on device r: int [size].

    `size` is the number of columns.
    """
    chunks = np.arange(size).reshape(2 * cp, -1)
    order = []
    for device in range(cp):
        order += [chunks[device], chunks[2 * cp - 1 - device]]
    return np.concatenate(order)


@jax.named_scope("sdpa")
def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    call: AttentionCall,
    arrays: AttentionArrays,
    ctx: Context,
) -> jax.Array:
    """[B, S/cp, N, H]: `kernels.attention` of q, k, v and columns that are zigzag shards over cp.

    Where `ctx.permute` is false, keys may not go round in a ring, because only some devices run
    this layer. Raises `UserError` where `ctx.cp_type` lacks a feature: it never changes the
    computation.
    """
    parallel, cp_type = ctx.parallel, ctx.cp_type
    if parallel.cp == 1:
        return attention(q, k, v, call, arrays)
    if call.mask != "causal":
        raise UserError(f"attention with a {call.mask} mask: mesh.cp > 1 lacks it; set mesh.cp=1")
    call = resolve(call, q, v, arrays)
    packed = arrays.is_packed(call)
    lacking = features_in_use(call, arrays)
    masked = _unknown_to_blocks(call, packed, lacking)
    if cp_type == "auto":
        grouped = k.shape[2] < q.shape[2]
        all_gather = bool(lacking) or not ctx.permute
        cp_type = "a2a" if masked else choose(parallel.cp, grouped, all_gather)
    _refuse(cp_type, q.shape[2], ctx, lacking, masked)
    if cp_type == "all_gather" and call.implementation == "xla":
        return _attention_to_all(q, k, v, call, arrays, parallel)

    group = AllToAllGroup(parallel.cp, _group_size(cp_type, ctx))
    q, k, v = group.split_heads(q, k, v)
    column = group.gather(arrays.columns[0], 0)
    segment = group.gather(arrays.segments[0], 1) if packed else None
    if group.ring == 1:
        own = AttentionArrays(
            columns=(column, column),
            segments=(segment, segment) if packed else None,
            sinks=group.own_heads(arrays.sinks),
            dropout=group.own_dropout(arrays.dropout),
        )
        return group.to_sequence(attention(q, k, v, call, own))
    if call.implementation == "xla":
        places = jnp.broadcast_to(column, q.shape[:2]), segment
    else:
        places = None
        require(call, q, v, arrays)
    ring = Ring(parallel.cp, group.size, cp_type == "all_gather", call)
    return group.to_sequence(ring_attention(q, k, v, places, ring))


def _attention_to_all(q, k, v, call, arrays, parallel: Parallel) -> jax.Array:
    """Attention in plain JAX to the keys of all devices, gathered and in the order of tokens."""

    def gathered(x: jax.Array) -> jax.Array:
        return natural(parallel.all_gather(x, CP_AXIS, 1), parallel.cp)

    k, v = gathered(k), gathered(v)
    key_columns = jnp.arange(k.shape[1], dtype=jnp.int32)
    segments = arrays.segments
    if segments is not None:
        segments = segments[0], gathered(segments[1])
    arrays = replace(arrays, columns=(arrays.columns[0], key_columns), segments=segments)
    return attention(q, k, v, call, arrays)


def choose(cp: int, grouped: bool, lacking: bool) -> str:
    """THE rule of mesh.cp_type=auto where masks need no a2a: all_gather while k and v are small."""
    return "all_gather" if lacking or (cp <= 4 and grouped) else "ring"


def _unknown_to_blocks(call: AttentionCall, packed: bool, lacking: list) -> bool:
    """Whether fused blocks cannot be told of the mask; cuDNN refuses what is `lacking` itself."""
    if call.implementation == "xla":
        return False
    masked = packed or call.window is not None
    return masked or (call.implementation == "mosaic" and bool(lacking))


def _group_size(cp_type: str, ctx: Context) -> int:
    """The number of devices that trade heads for sequence."""
    return {"a2a": ctx.parallel.cp, "a2a_ring": ctx.cp_a2a}.get(cp_type, 1)


def _refuse(cp_type: str, heads: int, ctx: Context, lacking: list, masked: bool) -> None:
    is_ring = cp_type in ("ring", "a2a_ring")
    if is_ring and not ctx.permute:
        raise UserError(
            f"mesh.cp_type={cp_type} needs stages of equal layers, but those of mesh.pp differ in "
            "number or kind; set mesh.cp_type=all_gather or a2a"
        )
    if is_ring and lacking:
        raise UserError(
            f"mesh.cp_type={cp_type} lacks model.{lacking[0]}; set mesh.cp_type=all_gather or a2a"
        )
    if masked and cp_type != "a2a":
        raise UserError(
            f"mesh.cp_type={cp_type}: its fused blocks know neither packed documents nor sliding "
            "windows, soft-caps or sinks; set mesh.cp_type=a2a or train.attention=xla"
        )
    size = _group_size(cp_type, ctx)
    if heads % size:
        raise UserError(
            f"mesh.cp_type={cp_type} deals {heads} query heads per tp device out to {size} "
            "devices; choose sizes that divide them, or train.attention=xla with another cp_type"
        )


# ---- order and heads ---------------------------------------------------------------------------


def natural(x: jax.Array, shards: int, axis: int = 1) -> jax.Array:
    """Zigzag shards, concatenated along `axis` -> the order of the sequence."""
    length = x.shape[axis] // (2 * shards)
    chunks = x.reshape(*x.shape[:axis], shards, 2, length, *x.shape[axis + 1 :])
    low = lax.index_in_dim(chunks, 0, axis + 1, keepdims=False)
    high = lax.index_in_dim(chunks, 1, axis + 1, keepdims=False)
    ordered = jnp.concatenate([low, jnp.flip(high, axis)], axis)
    return ordered.reshape(x.shape)


def _zigzag_shards(x: jax.Array, shards: int) -> jax.Array:
    """[B, S, ...] in the order of the sequence -> zigzag shards: the inverse of `natural`."""
    batch, tokens, *rest = x.shape
    chunks = x.reshape(batch, 2, shards, tokens // (2 * shards), *rest)
    low = chunks[:, 0]
    high = jnp.flip(chunks[:, 1], 1)
    return jnp.stack([low, high], 2).reshape(x.shape)


@dataclass(frozen=True)
class AllToAllGroup:
    """Groups of `size` neighbors on the cp axis that trade heads for sequence; they form a ring.

    The zigzag chunks of a group of neighbors are the zigzag chunks of a `ring` that many devices
    long, so a ring of groups works as a ring of devices does.
    """

    cp: int
    size: int

    @property
    def ring(self) -> int:
        """The number of groups."""
        return self.cp // self.size

    def _groups(self) -> list[list[int]] | None:
        if self.ring == 1:
            return None
        return np.arange(self.cp).reshape(self.ring, self.size).tolist()

    def repeat_heads(self, x: jax.Array, heads: int) -> jax.Array:
        """Copy kv heads until each member gets those that its share of the `heads` queries use."""
        kv_heads = x.shape[2]
        if kv_heads % self.size == 0:
            return x
        wanted = self.size if self.size % kv_heads == 0 else heads
        return jnp.repeat(x, wanted // kv_heads, axis=2)

    def split_heads(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q, k, v) of all tokens of the group and of this member's share of the heads."""
        heads = q.shape[2]
        k = self.repeat_heads(k, heads)
        v = self.repeat_heads(v, heads)
        return self.to_heads(q), self.to_heads(k), self.to_heads(v)

    def to_heads(self, x: jax.Array) -> jax.Array:
        """[B, S/cp, N, H] zigzag -> [B, S/cp*size, N/size, H], in order."""
        if self.size == 1:
            return x
        x = lax.all_to_all(x, CP_AXIS, 2, 1, axis_index_groups=self._groups(), tiled=True)
        return natural(x, self.size)

    def to_sequence(self, x: jax.Array) -> jax.Array:
        """[B, S/cp*size, N/size, H] -> [B, S/cp, N, H]: the inverse of `to_heads`."""
        if self.size == 1:
            return x
        x = _zigzag_shards(x, self.size)
        return lax.all_to_all(x, CP_AXIS, 1, 2, axis_index_groups=self._groups(), tiled=True)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Facts about each token of the group, in order along `axis`."""
        if self.size == 1:
            return x
        groups = self._groups()
        x = lax.all_gather(x, CP_AXIS, axis=axis, axis_index_groups=groups, tiled=True)
        return natural(x, self.size, axis)

    def own_heads(self, x: jax.Array | None) -> jax.Array | None:
        """This member's part of an array [N] over heads."""
        if x is None or self.size == 1:
            return x
        heads = x.shape[0] // self.size
        member = lax.axis_index(CP_AXIS) % self.size
        return lax.dynamic_slice_in_dim(x, member * heads, heads, 0)

    def own_dropout(self, places: DropoutPlaces | None) -> DropoutPlaces | None:
        """The places with the head numbers of this member."""
        if places is None:
            return None
        return places._replace(heads=self.own_heads(places.heads))
