"""The ways to exchange keys over cp (docs/train/context.md), rows of the table `KEY_EXCHANGES`.

They are all_gather; ring (`ring.py`); a2a, which trades heads for sequence (DeepSpeed-Ulysses,
arXiv 2309.14509); and a2a_ring, both. A way says which features of a call it computes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.errors import UserError
from mjax.kernels.attention.api import attention, require
from mjax.kernels.base.attention_call import (
    AttentionArrays,
    AttentionCall,
    DropoutPlaces,
    features_in_use,
)
from mjax.models.attention.ring import CP_AXIS, Ring, ring_attention
from mjax.models.attention.zigzag import natural, zigzag_shards
from mjax.models.base.context import Context


@dataclass(frozen=True)
class Needs:
    """The features that a call uses.

    blocks: those that fused kernels must be told of, where keys come in blocks; none in plain JAX.
    permute: whether keys may go round in a ring.
    """

    features: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    permute: bool = True


def needs_of(q, v, call: AttentionCall, arrays: AttentionArrays, ctx: Context) -> Needs:
    of_model = [f"model.{name}" for name in features_in_use(call, arrays)]
    of_mask = []
    if arrays.is_packed(call):
        of_mask.append(PACKED)
    if call.shared:
        of_mask.append(SHARED)
    if call.window is not None:
        of_mask.append(WINDOWS)
    if call.mask != "causal":
        of_mask.append(f"{call.mask} masks")
    if v.shape[-1] != q.shape[-1]:
        of_mask.append(VALUE_HEADS)
    blocks = [] if call.implementation == "xla" else list(of_mask)
    if call.implementation == "mosaic":  # cuDNN refuses the model's features itself
        blocks += of_model
    return Needs((*of_model, *of_mask), tuple(blocks), ctx.kernels.permute)


@dataclass(frozen=True)
class Exchange:
    """A way to exchange keys over cp.

    attend: (q, k, v, call, arrays, ctx) -> [B, S/cp, N, H].
    supports: the features that it computes, besides causal attention.
    supports_fused: those that it computes with fused kernels.
    permutes: whether keys go round in a ring, which waits for all devices.
    trades: who trades heads for sequence: none, groups of `mesh.cp_a2a` devices, or all.
    """

    attend: Callable[..., jax.Array]
    supports: frozenset[str]
    supports_fused: frozenset[str] = frozenset()
    permutes: bool = False
    trades: str = "none"

    def fits(self, needs: Needs) -> bool:
        """Whether it computes all that is needed."""
        allowed = needs.permute or not self.permutes
        known = self.supports.issuperset(needs.features)
        return allowed and known and self.supports_fused.issuperset(needs.blocks)

    def group_size(self, ctx: Context) -> int:
        """The number of devices that trade heads for sequence."""
        return {"none": 1, "groups": ctx.kernels.cp_a2a, "all": ctx.parallel.cp}[self.trades]

    def group(self, ctx: Context) -> "AllToAllGroup":
        return AllToAllGroup(ctx.parallel.cp, self.group_size(ctx))


def _attend_to_all(q, k, v, call, arrays, ctx: Context) -> jax.Array:
    """Attention to the keys of all devices, gathered."""
    if call.implementation != "xla":
        return _attend_by_blocks("all_gather", q, k, v, call, arrays, ctx)
    k, v = keys_of_all_tokens(k, ctx), keys_of_all_tokens(v, ctx)
    return attention(q, k, v, call, arrays_of_all_keys(arrays, ctx))


def keys_of_all_tokens(x: jax.Array, ctx: Context) -> jax.Array:
    """[B, S/cp, ...] zigzag shards -> [B, S, ...] in the order of the sequence."""
    return natural(ctx.parallel.all_gather(x, CP_AXIS, 1), ctx.parallel.cp)


def arrays_of_all_keys(arrays: AttentionArrays, ctx: Context) -> AttentionArrays:
    """The arrays of a call whose keys are those of all tokens."""
    segments, prefix = arrays.segments, arrays.prefix
    size = ctx.parallel.cp * len(arrays.columns[1])
    if segments is not None:
        segments = segments[0], keys_of_all_tokens(segments[1], ctx)
    return replace(
        arrays,
        columns=(arrays.columns[0], jnp.arange(size, dtype=jnp.int32)),
        segments=segments,
        prefix=None if prefix is None else keys_of_all_tokens(prefix, ctx),
    )


def _attend_with_own_heads(q, k, v, call, arrays, ctx: Context) -> jax.Array:
    """Attention of this device's share of the heads, over the whole sequence."""
    group = KEY_EXCHANGES["a2a"].group(ctx)
    packed = arrays.is_packed(call)
    q, k, v = group.split_heads(q, k, v)

    def of_group(pair: tuple[jax.Array, jax.Array], axis: int) -> tuple[jax.Array, jax.Array]:
        queries, keys = pair
        queries = group.gather(queries, axis)
        return queries, group.gather(keys, axis) if call.mask == "cross" else queries

    own = AttentionArrays(
        columns=of_group(arrays.columns, 0),
        segments=of_group(arrays.segments, 1) if packed else None,
        sinks=group.own_heads(arrays.sinks),
        relative=group.own_heads(arrays.relative),
        prefix=None if arrays.prefix is None else group.gather(arrays.prefix, 1),
        dropout=group.own_dropout(arrays.dropout),
    )
    return group.to_sequence(attention(q, k, v, call, own))


def _attend_by_blocks(name: str, q, k, v, call, arrays, ctx: Context) -> jax.Array:
    """Attention to blocks of keys, merged; the keys go round the ring of groups, or come at once.

    `name` is that of the way of exchange.
    """
    group = KEY_EXCHANGES[name].group(ctx)
    q, k, v = group.split_heads(q, k, v)
    places = None
    if call.implementation == "xla":
        column = group.gather(arrays.columns[0], 0)
        packed = arrays.is_packed(call)
        segment = group.gather(arrays.segments[0], 1) if packed else None
        places = jnp.broadcast_to(column, q.shape[:2]), segment
    else:
        require(call, q, v, arrays)
    ring = Ring(ctx.parallel.cp, group.size, name == "all_gather", call)
    return group.to_sequence(ring_attention(q, k, v, places, ring))


PACKED, WINDOWS, VALUE_HEADS = "packed documents", "sliding windows", "value heads of another size"
SHARED = "shared prefixes"  # no way has them
_OF_MODEL = frozenset(
    {
        "model.attention.attn_logit_softcapping",
        "model.attention.attention_sinks",
        "model.attention.attention_dropout",
        "model.position_embedding",
    }
)
_OF_BLOCKS = frozenset({PACKED, WINDOWS})
_ALL = _OF_MODEL | _OF_BLOCKS | {VALUE_HEADS, "full masks", "prefix masks", "cross masks"}

# The ways, by their names in `mesh.cp_type`.
KEY_EXCHANGES = {
    "all_gather": Exchange(_attend_to_all, supports=_ALL),
    "ring": Exchange(
        functools.partial(_attend_by_blocks, "ring"),
        supports=_OF_BLOCKS,
        permutes=True,
    ),
    "a2a": Exchange(_attend_with_own_heads, supports=_ALL, supports_fused=_ALL, trades="all"),
    "a2a_ring": Exchange(
        functools.partial(_attend_by_blocks, "a2a_ring"),
        supports=_OF_BLOCKS,
        permutes=True,
        trades="groups",
    ),
}


def choose_exchange(cp: int, grouped: bool, needs: Needs) -> str:
    """THE rule of mesh.cp_type=auto: the first of three ways that computes what is needed.

    all_gather comes before ring while k and v are small: `cp` <= 4, and heads are `grouped`.
    """
    order = ["ring", "all_gather", "a2a"]
    if cp <= 4 and grouped:
        order = ["all_gather", "ring", "a2a"]
    fitting = [name for name in order if KEY_EXCHANGES[name].fits(needs)]
    return fitting[0] if fitting else order[-1]


def refuse_exchange(name: str, needs: Needs, heads: int, ctx: Context) -> None:
    """Raise `UserError` where the way does not compute what is needed."""
    way = KEY_EXCHANGES[name]
    if way.permutes and not needs.permute:
        raise UserError(
            f"mesh.cp_type={name} needs stages of equal layers, but those of mesh.pp differ in "
            "number or kind; set mesh.cp_type=all_gather or a2a"
        )
    for feature in needs.features:
        if feature not in way.supports:
            having = [n for n, other in KEY_EXCHANGES.items() if feature in other.supports]
            remedy = f"mesh.cp_type={' or '.join(having)}" if having else "mesh.cp=1"
            raise UserError(f"mesh.cp_type={name} lacks {feature}; set {remedy}")
    unknown = [feature for feature in needs.blocks if feature not in way.supports_fused]
    if unknown and unknown[0] not in _OF_MODEL | _OF_BLOCKS:
        raise UserError(
            f"mesh.cp_type={name}: its fused blocks lack {unknown[0]}; "
            "set mesh.cp_type=a2a or train.attention=xla"
        )
    if unknown:
        raise UserError(
            f"mesh.cp_type={name}: its fused blocks know neither packed documents nor sliding "
            "windows, soft-caps or sinks; set mesh.cp_type=a2a or train.attention=xla"
        )
    size = way.group_size(ctx)
    if heads % size:
        raise UserError(
            f"mesh.cp_type={name} deals {heads} query heads per tp device out to {size} "
            "devices; choose sizes that divide them, or train.attention=xla with another cp_type"
        )


# ---- groups that trade heads ---------------------------------------------------------------------


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
        x = zigzag_shards(x, self.size)
        return lax.all_to_all(x, CP_AXIS, 1, 2, axis_index_groups=self._groups(), tiled=True)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Facts about each token of the group, in order along `axis`."""
        if self.size == 1:
            return x
        groups = self._groups()
        x = lax.all_gather(x, CP_AXIS, axis=axis, axis_index_groups=groups, tiled=True)
        return natural(x, self.size, axis)

    def own_heads(self, x: jax.Array | None) -> jax.Array | None:
        """This member's part of an array [N, ...] over heads."""
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
