"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries, keys and values.

A token's keys and values of all heads are products of one normed latent, and queries may be, too.
RoPE turns a part of each query, and one further part of keys that all heads share. Heads are split
over tp. The projections down to latents are not: a device applies them to its part of the sequence,
and the latents are gathered, which are smaller than the hidden state. The cache holds the latent of
each token and its key part after RoPE, [B, T, R + P]. A single new token does not expand it: its
queries are brought into the space of the latent, and what they find is brought back (absorption).

Invariant: the numbers are those of attention with expanded keys and values. Letters: R
kv_lora_rank, P qk_rope_head_dim, C qk_nope_head_dim, U v_head_dim.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.caches import Latents
from mjax.models.attention.calls import attention_arrays, attention_call
from mjax.models.attention.context_parallel import latent_attention
from mjax.models.attention.positions import apply_rope, pairs_apart, warmed
from mjax.models.attention.rope_scaling import mla_scale
from mjax.models.attention.self_attention import output_spec
from mjax.models.base.branch import BranchInputs, BranchModule, BranchOutput, HeadSizes
from mjax.models.base.context import Context
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, matrix, normal
from mjax.models.base.tensor_parallel import column, local_product, row
from mjax.models.base.weight import value_with_adapter, weight_of
from mjax.sharding.spec import ParamSpec


class MLA(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D]: causal latent attention, within segments.

    `kv_a` is [D, R + P], `kv_b` [R, N, C + U], `out` [N, U, D]. Queries come from `q`
    [D, N, C + P], or from a latent, by `q_a` [D, q_lora_rank] and `q_b` [q_lora_rank, N, C + P].
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        sizes = cfg.mla
        rank = sizes.kv_lora_rank
        # Tensors hold two of the paper's matrices each: content and rotated part of queries, latent
        # and rotated key, content of keys and values.
        query = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
        init = normal(cfg.initializer_range)
        if sizes.q_lora_rank is None:
            q = self._up("q", "q_proj", ("embed", cfg.hidden_size), *query)
            self.q = declare(rngs, q, init)
        else:
            from_latent = "latent", sizes.q_lora_rank
            q_a = self._down("q_a", "q_a_proj", sizes.q_lora_rank)
            q_b = self._up("q_b", "q_b_proj", from_latent, *query)
            self.q_a = declare(rngs, q_a, init)
            self.q_norm = self._norm("q_a_layernorm", sizes.q_lora_rank, rngs)
            self.q_b = declare(rngs, q_b, init)
        key_and_value = sizes.qk_nope_head_dim, sizes.v_head_dim
        kv_a = self._down("kv_a", "kv_a_proj_with_mqa", rank, sizes.qk_rope_head_dim)
        kv_b = self._up("kv_b", "kv_b_proj", ("latent", rank), *key_and_value)
        self.kv_a = declare(rngs, kv_a, init)
        self.kv_norm = self._norm("kv_a_layernorm", rank, rngs)
        self.kv_b = declare(rngs, kv_b, init)
        out = output_spec(cfg, sizes.v_head_dim)
        self.out = declare(rngs, out, normal(out_std))

    def _down(self, matmul: str, hf: str, *parts: int) -> ParamSpec:
        """The projections of the input down to a latent, and to what lies beside it."""
        shape = (self.cfg.hidden_size, sum(parts))
        axes = ("embed", "latent")
        name = f"self_attn.{hf}.weight"
        return matrix(shape, axes, name, parts=parts, matmul=matmul)

    def _up(
        self,
        matmul: str,
        hf: str,
        inputs: tuple[str, int],
        *parts: int,
    ) -> ParamSpec:
        """The projections of `inputs`, an axis and its size, to the parts of heads."""
        axis, width = inputs
        shape = (width, self.cfg.attention.num_attention_heads, sum(parts))
        axes = (axis, "heads", "head_dim")
        name = f"self_attn.{hf}.weight"
        return matrix(shape, axes, name, parts=parts, matmul=matmul)

    def _norm(self, hf: str, rank: int, rngs: nnx.Rngs) -> Norm:
        """The norm of a latent."""
        cfg = self.cfg.model_copy(update={"norm_eps": self.cfg.mla.latent_norm_eps})
        return Norm(cfg, (rank,), ("latent",), f"self_attn.{hf}", rngs)

    @jax.named_scope("attention")
    def __call__(
        self,
        x: jax.Array,
        inputs: BranchInputs,
        cache: Latents | None = None,
    ) -> BranchOutput:
        ctx = inputs.ctx
        q = self._queries(x, inputs)
        latent = self._latent(x, inputs)
        scale = self.cfg.attention.attention_multiplier
        if scale is None:
            scale = mla_scale(self.cfg)
        call = attention_call(self.cfg, inputs, scale)
        arrays, new = attention_arrays(self.cfg, inputs), inputs.tokens.new
        if cache is None:
            out = self._attend(q, latent, call, arrays, ctx)
        else:
            cache = cache.write(latent, new)
            call = replace(call, implementation="xla")
            if self._reads_as_they_are(cache, q.shape[1]):
                attend = partial(cache.attend, call=call, arrays=arrays, new=new)
                out = self._absorbed(q, attend)
            else:
                latent, arrays = cache.read(arrays, new, q.shape[1])
                out = self._attend(q, latent, call, arrays, ctx)
        y = row(out, weight_of(self.out), ctx)
        return BranchOutput(y, cache=cache)

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        """6 * N * (C + P + U) * s/2: a query sees s/2 keys on average.

        Document masks are not discounted.
        """
        channels = cfg.mla.qk_head_dim + cfg.mla.v_head_dim
        return 3.0 * cfg.attention.num_attention_heads * channels * seq_length

    @staticmethod
    def heads(cfg: ModelConfig) -> HeadSizes:
        count = cfg.attention.num_attention_heads
        return HeadSizes(count, count, cfg.mla.qk_head_dim, cfg.mla.v_head_dim)

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> Latents:
        """The normed latent and the key part after RoPE."""
        width = cfg.mla.kv_lora_rank + cfg.mla.qk_rope_head_dim
        return Latents.spec(batch, length, width)

    def _queries(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        """q [B, S, N/tp, C + P], after RoPE."""
        sizes, ctx = self.cfg.mla, inputs.ctx
        if sizes.q_lora_rank is None:
            (q,) = column(x, (weight_of(self.q),), ctx)
        else:
            latent = local_product(x, weight_of(self.q_a), ctx)
            latent = self.q_norm(latent)
            (q,) = column(latent, (weight_of(self.q_b),), ctx)
        fixed, turned = _cut_channels(q, sizes.qk_nope_head_dim)
        turned = self._turn(turned, inputs)
        return warmed(_join_channels(fixed, turned), inputs.tokens, self.cfg)

    def _latent(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        """[B, S, R + P]: the normed latent, and the key part of all heads after RoPE."""
        ctx, rank = inputs.ctx, self.cfg.mla.kv_lora_rank
        made = local_product(x, weight_of(self.kv_a), ctx)
        latent, key = _cut_channels(made, rank)
        latent = self.kv_norm(latent)
        both = ctx.parallel.gather_seq(_join_channels(latent, key))
        latent, key = _cut_channels(both, rank)
        one_head = key[:, :, None]
        key = self._turn(one_head, inputs)[:, :, 0]
        return _join_channels(latent, key)

    def _turn(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        """[B, S, N, P] after RoPE, where the model has it."""
        if inputs.word not in inputs.rope:
            return x
        x = pairs_apart(x)
        return apply_rope(x, inputs.rope[inputs.word])

    def _attend(
        self,
        q: jax.Array,
        latent: jax.Array,
        call: AttentionCall,
        arrays: AttentionArrays,
        ctx: Context,
    ) -> jax.Array:
        """[B, S, N/tp, U] from the keys and values in a latent [B, T, R + P]."""

        def expand(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self._expand(latent, ctx)

        # In 8 bits each device would round its own part of the gradient of keys and values.
        travels = weight_of(self.kv_b).recipe is None
        return latent_attention(q, latent, expand, call, arrays, ctx, travels)

    def _expand(self, latent: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """k [B, T, N/tp, C + P] and v [B, T, N/tp, U] of this device's heads."""
        sizes = self.cfg.mla
        latent, key = _cut_channels(latent, sizes.kv_lora_rank)
        made = local_product(latent, weight_of(self.kv_b), ctx)
        k, v = _cut_channels(made, sizes.qk_nope_head_dim)
        shape = *k.shape[:3], sizes.qk_rope_head_dim
        shared = jnp.broadcast_to(key[:, :, None], shape)
        return _join_channels(k, shared), v

    def _reads_as_they_are(self, cache: Latents, tokens: int) -> bool:
        """Whether new tokens attend to latents through one `kv_b`, as rows with adapters cannot."""
        adapter = weight_of(self.kv_b).adapter
        is_one_weight = adapter is None or adapter.scales is None
        return is_one_weight and cache.reads_as_they_are(tokens)

    def _absorbed(self, q: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """[B, S, N, U] of queries that read latents as they are: `attend` of a cache."""
        sizes = self.cfg.mla
        weight = value_with_adapter(weight_of(self.kv_b), q.dtype)
        to_key, to_value = _cut_channels(weight, sizes.qk_nope_head_dim)
        fixed, turned = _cut_channels(q, sizes.qk_nope_head_dim)
        absorbed = jnp.einsum("bsnc,rnc->bsnr", fixed, to_key)
        latent = attend(_join_channels(absorbed, turned), rank=sizes.kv_lora_rank)
        return jnp.einsum("bsnr,rnu->bsnu", latent, to_value)


def _cut_channels(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(the first `size` channels, the others)."""
    first, second = jnp.split(x, [size], -1)
    return first, second


def _join_channels(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], -1)
