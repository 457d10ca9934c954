"""Self-attention with grouped heads, tensor-parallel over query heads.

A device holds N/tp query heads. Where tp divides the kv heads it holds its share of them; where it
does not, k and v weights are replicated over tp and each device projects only the kv heads that
its query heads use: the gradient rule sums the parts. Caches hold keys after RoPE.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema import ModelConfig
from mjax.models.context import Context, Tokens
from mjax.models.context_attention import context_attention
from mjax.models.linear import column, row
from mjax.models.norm import Norm
from mjax.models.params import constant, declare, normal
from mjax.models.positions import apply_rope
from mjax.models.weight import Weight, weight_of
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec

Cache = tuple[jax.Array, jax.Array]  # keys, values, each [B, T, K, H]


class Attention(nnx.Module):
    """[B, S/tp, D] -> [B, S/tp, D], causal, optionally windowed and within segments."""

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        d, n, k, h = (
            cfg.hidden_size,
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.head_dim,
        )
        init, zero = normal(cfg.initializer_range), constant(0.0)
        q_axes, kv_axes = ("heads", "head_dim"), ("pair", "kv_heads", "head_dim")
        q = ParamSpec((d, n, h), ("embed", *q_axes), "matrix", matmul="q", hf=_names("q", "weight"))
        kv = ParamSpec(
            (d, 2, k, h), ("embed", *kv_axes), "matrix", matmul="kv", hf=_names("kv", "weight")
        )
        out = ParamSpec(
            (n, h, d), (*q_axes, "embed"), "matrix", 2, "attn_proj", hf=_names("o", "weight")
        )
        self.q, self.kv = declare(rngs, q, init), declare(rngs, kv, init)
        self.out = declare(rngs, out, normal(out_std))
        if cfg.attention_bias:
            q = ParamSpec((n, h), q_axes, "bias", hf=_names("q", "bias"))
            kv = ParamSpec((2, k, h), kv_axes, "bias", hf=_names("kv", "bias"))
            self.q_bias, self.kv_bias = declare(rngs, q, zero), declare(rngs, kv, zero)
        if cfg.attention_out_bias:
            bias = ParamSpec((d,), ("embed",), "bias", hf=_names("o", "bias"))
            self.out_bias = declare(rngs, bias, zero)
        if cfg.qk_norm:
            whole = cfg.qk_norm_all_heads
            for name, heads, axis in (("q_norm", n, "heads"), ("k_norm", k, "kv_heads")):
                sizes, axes = ((heads, h), (axis, "head_dim")) if whole else ((h,), ("head_dim",))
                setattr(self, name, Norm(cfg, sizes, axes, f"self_attn.{name}", rngs))
        if cfg.attention_sinks:
            sinks = ParamSpec((n,), ("heads",), "scalar", hf=("self_attn.sinks",))
            self.sinks = declare(rngs, sinks, init)

    @jax.named_scope("attention")
    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        ctx: Context,
        *,
        window: int | None,
        rope: tuple[jax.Array, jax.Array] | None,
        salt: jax.Array | int = 0,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        cfg, par = self.cfg, ctx.parallel
        q, k, v = self._project(x, ctx)
        if cfg.qk_norm:
            q, k = self.q_norm(q, par), self.k_norm(k, par)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        key_columns, key_segments = tokens.columns, tokens.segments
        if cache is not None:
            start = (0, tokens.columns[0], 0, 0)
            copies = cache[0].shape[2] // k.shape[2]  # of each kv head (infer/cache.py)
            cache = tuple(
                jax.lax.dynamic_update_slice(c, jnp.repeat(new, copies, 2).astype(c.dtype), start)
                for c, new in zip(cache, (k, v), strict=True)
            )
            (k, v), key_segments = cache, tokens.key_segments
            key_columns = jnp.arange(k.shape[1], dtype=jnp.int32)
        o = context_attention(
            q,
            k,
            v,
            parallel=par,
            cp_type=ctx.cp_type,
            cp_a2a=ctx.cp_a2a,
            permute=ctx.permute,
            scale=cfg.attention_multiplier or cfg.head_dim**-0.5,
            window=window,
            softcap=cfg.attn_logit_softcapping,
            sinks=self.sinks[...] if cfg.attention_sinks else None,
            columns=(tokens.columns, key_columns),
            segments=None if key_segments is None else (tokens.segments, key_segments),
            dropout=self._dropout(tokens, ctx, salt),
            max_documents=ctx.max_documents,
            implementation=ctx.attention if cache is None else "xla",
        )
        y = row(o, weight_of(self.out), ctx)
        return (y + self.out_bias[...] if cfg.attention_out_bias else y), cache

    def _project(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, S, N/tp, H] and the k, v [B, S, K', H] that these query heads use."""
        par = ctx.parallel
        q, kv = column(x, (weight_of(self.q), self._own_kv_weight(par)), ctx)
        if self.cfg.attention_bias:
            q = q + self.q_bias[...]
            kv = kv + _own_kv(self.kv_bias[...], self.cfg, par)
        return q, kv[..., 0, :, :], kv[..., 1, :, :]

    def _own_kv_weight(self, parallel: Parallel) -> Weight:
        """The kv weight of this device's query heads.

        Where tp does not divide the kv heads it is a part of the weight that the device holds, and
        neither 8-bit forms nor running sums are made of it (`models/layers.py`).
        """
        weight = weight_of(self.kv)
        return replace(weight, value=_own_kv(weight.value, self.cfg, parallel))

    def _dropout(self, tokens: Tokens, ctx: Context, salt: jax.Array | int) -> tuple | None:
        """(rate, key, rows, global head numbers) for dropout on attention probabilities."""
        if self.cfg.attention_dropout == 0 or not ctx.dropout:
            return None
        n = self.cfg.num_attention_heads // ctx.parallel.tp
        heads = ctx.parallel.index("tp") * n + jnp.arange(n)
        key = jax.random.fold_in(tokens.key, salt)
        return self.cfg.attention_dropout, key, tokens.rows, heads


def _names(which: str, kind: str) -> tuple[str, ...]:
    """Hugging Face names of the projections called `which`, one for each letter."""
    return tuple(f"self_attn.{letter}_proj.{kind}" for letter in which)


def _own_kv(w: jax.Array, cfg: ModelConfig, par: Parallel) -> jax.Array:
    """The kv heads (axis -2) of `w` that this device's query heads use."""
    k, n = cfg.num_key_value_heads, cfg.num_attention_heads // par.tp
    if k % par.tp == 0:
        return w  # already this device's share
    group = cfg.num_attention_heads // k
    first = par.index("tp") * n
    if group % n == 0:  # all query heads here read one kv head
        return jax.lax.dynamic_slice_in_dim(w, first // group, 1, w.ndim - 2)
    return jnp.take(w, (first + jnp.arange(n)) // group, axis=w.ndim - 2)
