"""Self-attention with grouped heads, tensor-parallel over query heads.

A device holds N/tp query heads. If tp divides the kv heads, it holds its share of them. If it
does not, k and v weights are replicated over tp and each device projects only the kv heads that
its query heads use: the gradient rule sums the parts. Caches hold keys after RoPE.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.kernels.base.attention_call import AttentionCall
from mjax.models.attention.caches import KeysValues
from mjax.models.attention.calls import IN_ORDER, attention_arrays, attention_call
from mjax.models.attention.context_parallel import context_attention
from mjax.models.attention.packed_products import Projections, attend_to_products
from mjax.models.attention.positions import apply_rope, pairs_apart, warmed
from mjax.models.base.branch import BranchInputs, BranchModule, BranchOutput, HeadSizes
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, declare_bias, matrix, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import Weight, weight_of
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import held_groups
from mjax.sharding.spec import ParamSpec

SelfCache = KeysValues


class Attention(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D]: attention within segments, of the branch's mask and window.

    `q` is [D, N, H], with an output gate [D, N, 2 H] (query, gate). `kv` is [D, 2, K, H] (key,
    value), `out` [N, H, D]. The names of the parameters begin with `hf_name` in Hugging Face's
    words, those of their matmuls with `matmul_prefix`.
    """

    hf_name = "self_attn"
    matmul_prefix = ""

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        width, head = cfg.hidden_size, cfg.attention.head_dim
        heads, kv_heads = cfg.attention.num_attention_heads, cfg.attention.num_key_value_heads
        q_axes = ("heads", "head_dim")
        kv_axes = ("pair", "kv_heads", "head_dim")
        parts = (head, head) if cfg.attention.attention_output_gate else (head,)
        queries = sum(parts)
        q = ParamSpec(
            shape=(width, heads, queries),
            axes=("embed", *q_axes),
            role="matrix",
            parts=parts,
            matmul=f"{self.matmul_prefix}q",
            hf=self._hf_names("q", "weight"),
        )
        kv = ParamSpec(
            shape=(width, 2, kv_heads, head),
            axes=("embed", *kv_axes),
            role="matrix",
            matmul=f"{self.matmul_prefix}kv",
            hf=self._hf_names("kv", "weight"),
        )
        init = normal(cfg.initializer_range)
        self.q = declare(rngs, q, init)
        self.kv = declare(rngs, kv, init)
        out = replace(
            output_spec(cfg, head),
            matmul=f"{self.matmul_prefix}attn_proj",
            hf=self._hf_names("o", "weight"),
        )
        self.out = declare(rngs, out, normal(out_std))
        if cfg.attention.attention_bias:
            names = self._hf_names("q", "bias")
            self.q_bias = declare_bias(rngs, (heads, queries), q_axes, *names)
            names = self._hf_names("kv" if cfg.attention.attention_key_bias else "v", "bias")
            self.kv_bias = declare_bias(rngs, (len(names), kv_heads, head), kv_axes, *names)
        if cfg.attention.attention_out_bias:
            names = self._hf_names("o", "bias")
            self.out_bias = declare_bias(rngs, (width,), ("embed",), *names)
        if cfg.attention.qk_norm:
            self.q_norm = self._head_norm("q_norm", heads, "heads", rngs)
            self.k_norm = self._head_norm("k_norm", kv_heads, "kv_heads", rngs)
        if cfg.attention.attention_sinks:
            sinks = ParamSpec((heads,), ("heads",), "scalar", hf=(f"{self.hf_name}.sinks",))
            self.sinks = declare(rngs, sinks, init)

    def _head_norm(self, name: str, heads: int, axis: str, rngs: nnx.Rngs) -> Norm:
        """The norm of queries or keys: of each head, or of all heads together."""
        head_dim = self.cfg.attention.head_dim
        hf = f"{self.hf_name}.{name}"
        if self.cfg.attention.qk_norm_all_heads:
            sizes = heads, head_dim
            axes = axis, "head_dim"
            return Norm(self.cfg, sizes, axes, hf, rngs)
        return Norm(self.cfg, (head_dim,), ("head_dim",), hf, rngs)

    def _hf_names(self, letters: str, kind: str) -> tuple[str, ...]:
        """Hugging Face names of the projections, one for each letter."""
        return tuple(f"{self.hf_name}.{letter}_proj.{kind}" for letter in letters)

    @jax.named_scope("attention")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: SelfCache | None = None
    ) -> BranchOutput:
        sizes = self.cfg.attention
        if sizes.attention_in_multiplier is not None:
            x = x * sizes.attention_in_multiplier
        scale = sizes.attention_multiplier or sizes.head_dim**-0.5
        call = attention_call(self.cfg, inputs, scale)
        out = None
        if cache is None:
            projections = functools.partial(self._projections, inputs.ctx.parallel)
            out = attend_to_products(x, self.cfg, projections, call, inputs)
        if out is None:
            out, cache = self._attend(x, call, inputs, cache)
        y = self.output(out, inputs)
        if sizes.attention_out_multiplier is not None:
            y = y * sizes.attention_out_multiplier
        return BranchOutput(y, cache=cache)

    def _attend(
        self,
        x: jax.Array,
        call: AttentionCall,
        inputs: BranchInputs,
        cache: SelfCache | None,
    ) -> tuple[jax.Array, SelfCache | None]:
        """(heads of values [B, S, N/tp, H], the new cache)."""
        sizes = self.cfg.attention
        q, k, v, gate = self._queries_keys_values(x, inputs)
        sinks = self.sinks[...] if sizes.attention_sinks else None
        arrays = attention_arrays(self.cfg, inputs, sinks)
        if cache is None:
            out = context_attention(q, k, v, call, arrays, inputs.ctx)
        else:
            new = inputs.tokens.new
            if call.implementation == IN_ORDER:
                q, k, v = jax.lax.optimization_barrier((q, k, v))
            cache = cache.write(k, v, new)
            out = cache.attend(q, call, arrays, new)
        return (out if gate is None else out * jax.nn.sigmoid(gate)), cache

    def _queries_keys_values(
        self, x: jax.Array, inputs: BranchInputs
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """q [B, S, N/tp, H], k and v [B, S, K', H] as attention reads them, and the output gate."""
        sizes, parallel, gate = self.cfg.attention, inputs.ctx.parallel, None
        q, kv = self._project(x, inputs)
        if sizes.attention_bias:
            q = q + self.q_bias[...]
        k, v = self.biased(kv, parallel)
        if sizes.attention_output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if sizes.key_multiplier is not None:
            k = k * sizes.key_multiplier
        if sizes.qk_norm and not sizes.qk_norm_after_rope:
            q, k = self.q_norm(q, parallel), self.k_norm(k, parallel)
        if inputs.word in inputs.rope:
            if self.cfg.rope.rope_interleave:
                q, k = pairs_apart(q), pairs_apart(k)
            tables = inputs.rope[inputs.word]
            q = apply_rope(q, tables)
            k = apply_rope(k, tables)
            q = warmed(q, inputs.tokens, self.cfg)
        if sizes.qk_norm_after_rope:
            q, k = self.q_norm(q, parallel), self.k_norm(k, parallel)
        if self.keeps_what_attention_reads:
            q = checkpoint_name(q, weight_of(self.q).name)
            k, v = (checkpoint_name(a, weight_of(self.kv).name) for a in (k, v))
        return q, k, v, gate

    def _projections(self, parallel: Parallel) -> Projections:
        """The weights of q, k and v as `attend_to_products` takes them."""
        q, kv = weight_of(self.q), self.local_kv_weight(parallel)
        if not self.cfg.attention.attention_bias:
            return Projections(q, kv, None)
        return Projections(q, kv, (self.q_bias[...], self._local_kv_bias(parallel)))

    def output(self, out: jax.Array, inputs: BranchInputs) -> jax.Array:
        """Heads of values [B, S, N/tp, H] back in the residual stream, [B, S/tp, D]."""
        y = row(out, weight_of(self.out), inputs.ctx)
        return y + self.out_bias[...] if self.cfg.attention.attention_out_bias else y

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        """12 * N * H * (the mean number of keys that a query sees).

        The mean is s if a query sees all keys of its sequence, or of the source. In a window of
        w < s keys to either side it is 2w - w^2/s. Under a causal mask it is half of that. Document
        masks are not discounted.
        """
        window = seq_length
        if BRANCHES[word].windowed and cfg.attention.sliding_window:
            window = min(cfg.attention.sliding_window, seq_length)
        keys = 2 * window - window * window / seq_length
        if BRANCHES[word].mask == "causal":
            keys /= 2
        return 12.0 * cfg.attention.num_attention_heads * cfg.attention.head_dim * keys

    @staticmethod
    def heads(cfg: ModelConfig) -> HeadSizes:
        sizes = cfg.attention
        head = sizes.head_dim
        return HeadSizes(sizes.num_attention_heads, sizes.num_key_value_heads, head, head)

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> KeysValues:
        """The keys and values of a batch."""
        return KeysValues.spec(batch, heads_of_cache(cfg, tp), length, cfg.attention.head_dim)

    @property
    def keeps_what_attention_reads(self) -> bool:
        """Whether a backward keeps q, k and v with their biases, not the products q and kv.

        Otherwise the backward would add the biases again and copy k and v out of kv. With a norm or
        a gate it needs the products, so they are kept.
        """
        sizes = self.cfg.attention
        return sizes.attention_bias and not (sizes.qk_norm or sizes.attention_output_gate)

    def _project(self, x: jax.Array, inputs: BranchInputs) -> tuple[jax.Array, jax.Array]:
        """q [B, S, N/tp, H or 2 H] and the kv [B, S, 2, K', H] that these query heads use."""
        kv_weight = self.local_kv_weight(inputs.ctx.parallel)
        weights = inputs.reading(x, weight_of(self.q), kv_weight)
        named = not self.keeps_what_attention_reads
        return column(x, weights, inputs.ctx, named)

    def biased(self, kv: jax.Array, parallel: Parallel) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K', H] of kv [B, S, 2, K', H], with the biases that they have."""
        k, v = kv[..., 0, :, :], kv[..., 1, :, :]
        if not self.cfg.attention.attention_bias:
            return k, v
        bias = self._local_kv_bias(parallel)
        if self.cfg.attention.attention_key_bias:
            k = k + bias[0]
        return k, v + bias[-1]

    def _local_kv_bias(self, parallel: Parallel) -> jax.Array:
        """[2 or 1, K', H]: the biases of keys and values, or of values alone."""
        return _local_kv_heads(self.kv_bias[...], self.cfg, parallel)

    def local_kv_weight(self, parallel: Parallel) -> Weight:
        """The kv weight of this device's query heads.

        If tp does not divide the kv heads, it is a part of the weight that the device holds, and
        neither 8-bit forms nor running sums are made of it (`models/runtime/load.py`).
        """

        def own(w: jax.Array) -> jax.Array:
            return _local_kv_heads(w, self.cfg, parallel)

        return weight_of(self.kv).of_outputs(own)


def output_spec(cfg: ModelConfig, head: int) -> ParamSpec:
    """The projection of heads of values, of size `head`, back to the residual stream."""
    shape = cfg.attention.num_attention_heads, head, cfg.hidden_size
    axes = "heads", "head_dim", "embed"
    return matrix(shape, axes, "self_attn.o_proj.weight", inputs=2, matmul="attn_proj")


def heads_of_cache(cfg: ModelConfig, tp: int) -> int:
    """The kv heads of a cache: on each tp device those that it projects (`_local_kv_heads`)."""
    sizes = cfg.attention
    return held_groups(sizes.num_key_value_heads, sizes.num_attention_heads, tp)


def _local_kv_heads(w: jax.Array, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """The kv heads (axis -2) of `w` that this device's query heads use."""
    kv_heads = cfg.attention.num_key_value_heads
    if kv_heads % parallel.tp == 0:
        return w  # already this device's share
    axis = w.ndim - 2
    heads = cfg.attention.num_attention_heads // parallel.tp
    group = cfg.attention.num_attention_heads // kv_heads
    first = parallel.index("tp") * heads
    if group % heads == 0:  # all query heads of the device read one kv head
        return jax.lax.dynamic_slice_in_dim(w, first // group, 1, axis)
    kv_head = (first + jnp.arange(heads)) // group
    return jnp.take(w, kv_head, axis=axis)
