"""Cross-attention: a decoder's tokens attend to the output of an encoder (arXiv 1706.03762).

Queries come from the residual stream, keys and values from the encoder's output after its norm. A
query sees all keys of its own segment, so packed documents stay apart. The keys of a whole text are
computed once: a cache holds them for the tokens that are made one by one.
"""

from dataclasses import replace
from typing import NamedTuple

import jax

from mjax.config.schema.model import ModelConfig
from mjax.kernels.base.attention_call import AttentionCall
from mjax.kernels.elementwise import norm
from mjax.models.attention.caches import KeysValues
from mjax.models.attention.calls import attention_arrays, attention_call
from mjax.models.attention.context_parallel import context_attention
from mjax.models.attention.self_attention import Attention, heads_of_cache
from mjax.models.base.branch import BranchInputs, BranchOutput, CacheSpec, Source
from mjax.models.base.context import Context, NewTokens, tokens_of
from mjax.models.base.dropout import dropout
from mjax.models.base.tensor_parallel import column
from mjax.models.base.weight import weight_of

_SOURCE_SALT = 2 << 24  # keys dropout of the encoder's output, equal in all layers


class SourceKeysValues(NamedTuple):
    """Keys and values [B, K, T, H] of another stream, written once; `real` int32 [B, T] is 1 for
    its tokens and 0 for padding."""

    keys: jax.Array
    values: jax.Array
    real: jax.Array

    @staticmethod
    def spec(batch: int, heads: int, length: int, size: int) -> "SourceKeysValues":
        """The arrays of caches for sources of `length` tokens."""
        keys, values = KeysValues.spec(batch, heads, length, size)
        shape = batch, length
        real = CacheSpec(shape, ("batch", None), "int32")
        return SourceKeysValues(keys, values, real)

    def write(
        self, k: jax.Array, v: jax.Array, real: jax.Array, new: NewTokens
    ) -> "SourceKeysValues":
        """The cache of a source, which it fills, with keys and values [B, T, K, H]."""
        keys = k.swapaxes(1, 2)
        values = v.swapaxes(1, 2)
        return SourceKeysValues(keys, values, real)

    def read(self, new: NewTokens) -> tuple[jax.Array, jax.Array, Source]:
        """Keys and values [B, T, K, H], and the source that they are of."""
        tokens = tokens_of(self.real.shape, segments=self.real)
        k = self.keys.swapaxes(1, 2)
        v = self.values.swapaxes(1, 2)
        return k, v, Source(None, tokens)


class CrossAttention(Attention):
    """[B, T/tp, D] -> [B, T/tp, D]: attention to all tokens of the source's segments.

    The parameters are those of `Attention`. The norm of the source is `source_norm` of the shared
    weights.
    """

    hf_name = "cross_attn"
    matmul_prefix = "cross_"
    source_norm = "encoder_norm"

    @jax.named_scope("cross_attention")
    def __call__(
        self,
        x: jax.Array,
        inputs: BranchInputs,
        cache: SourceKeysValues | None = None,
    ) -> BranchOutput:
        cfg, ctx, source = self.cfg, inputs.ctx, inputs.source
        (q,) = column(x, (weight_of(self.q),), ctx)
        if cfg.attention.attention_bias:
            q = q + self.q_bias[...]
        if source.x is not None:
            k, v = self._keys_and_values(source, inputs)
            if cache is not None:
                cache = cache.write(k, v, source.tokens.segments, inputs.tokens.new)
        if cache is not None:
            k, v, source = cache.read(inputs.tokens.new)
            inputs = replace(inputs, source=source)
        out = self.attend(q, k, v, inputs)
        return BranchOutput(self.output(out, inputs), cache=cache)

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> SourceKeysValues:
        """The keys and values of a source of `length` tokens."""
        heads = heads_of_cache(cfg, tp)
        return SourceKeysValues.spec(batch, heads, length, cfg.attention.head_dim)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BranchInputs) -> jax.Array:
        """Heads of values [B, T, N/tp, H] for queries of that shape."""
        arrays = attention_arrays(self.cfg, inputs)
        return context_attention(q, k, v, self.call(inputs), arrays, inputs.ctx)

    def call(self, inputs: BranchInputs) -> AttentionCall:
        """Describes the attention that this branch computes."""
        sizes = self.cfg.attention
        scale = sizes.attention_multiplier or sizes.head_dim**-0.5
        return attention_call(self.cfg, inputs, scale)

    def _keys_and_values(self, source: Source, inputs: BranchInputs) -> tuple[jax.Array, jax.Array]:
        """k, v [B, S, K', H] of the source's tokens, for this device's query heads."""
        weights = getattr(inputs.shared, self.source_norm)
        x = normed_source(source, weights, self.cfg, inputs.ctx)
        weight = self.local_kv_weight(inputs.ctx.parallel)
        weight = weight.for_tokens(source.tokens, inputs.ctx)
        (kv,) = column(x, (weight,), inputs.ctx)
        return self.biased(kv, inputs.ctx.parallel)


def normed_source(
    source: Source,
    weights: tuple[jax.Array, jax.Array | None] | None,
    cfg: ModelConfig,
    ctx: Context,
) -> jax.Array:
    """The source after its norm, if that has `weights`, and dropout, [B, S/tp, D]."""
    x = source.x
    if weights is not None:
        gain, bias = weights
        x = norm.norm(x, gain, bias, eps=cfg.norm_eps)
    return dropout(x, cfg.hidden_dropout, source.tokens, ctx, _SOURCE_SALT)
