"""Context parallelism: attention of sequences that are split over the mesh axis cp.

`zigzag.py` orders a batch once, on the host. Every token carries its true column
(`Tokens.columns`), so only attention needs to know; `key_exchange.py` has the ways in which it gets
its keys. Invariant: the output is that of `kernels.attention` on the sequence in one piece.
"""

from collections.abc import Callable
from dataclasses import replace

import jax

from mjax.kernels.attention.api import attention, resolve
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.key_exchange import (
    KEY_EXCHANGES,
    arrays_of_all_keys,
    choose_exchange,
    keys_of_all_tokens,
    needs_of,
    refuse_exchange,
)
from mjax.models.base.context import Context


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

    Without `Kernels.permute` keys may not go round in a ring, because only some devices run this
    layer. Raises `UserError` where `Kernels.cp_type` lacks a feature: it never changes the
    computation.
    """
    if ctx.parallel.cp == 1:
        return attention(q, k, v, call, arrays)
    if arrays.relative is not None:  # no fused kernel takes biases of a block of keys
        call = replace(call, implementation="xla")
    call = resolve(call, q, v, arrays, by_blocks=True)
    name = _exchange_of(q, k, v, call, arrays, ctx)
    return KEY_EXCHANGES[name].attend(q, k, v, call, arrays, ctx)


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    expand: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    call: AttentionCall,
    arrays: AttentionArrays,
    ctx: Context,
    travels: bool,
) -> jax.Array:
    """`context_attention` to the keys and values that `expand` makes of a latent [B, S/cp, R].

    If every device gets the keys of all, the latent `travels` in their place. It is smaller than
    they are, and each device expands it for its own heads.
    """
    if travels and ctx.parallel.cp > 1:
        k, v = jax.eval_shape(expand, latent)
        call = resolve(call, q, v, arrays, by_blocks=True)
        name = _exchange_of(q, k, v, call, arrays, ctx)
        if name == "all_gather" and call.implementation == "xla":
            everyone = arrays_of_all_keys(arrays, ctx)
            return attention(q, *expand(keys_of_all_tokens(latent, ctx)), call, everyone)
    return context_attention(q, *expand(latent), call, arrays, ctx)


def _exchange_of(q, k, v, call, arrays, ctx: Context) -> str:
    """The way that a call with an implementation takes, by its name in `KEY_EXCHANGES`."""
    needs = needs_of(q, v, call, arrays, ctx)
    name = ctx.kernels.cp_type
    if name == "auto":
        grouped = k.shape[2] < q.shape[2]
        name = choose_exchange(ctx.parallel.cp, grouped, needs)
    refuse_exchange(name, needs, q.shape[2], ctx)
    return name
