"""Self-attention with grouped heads, tensor-parallel over query heads.

A device holds N/tp query heads. Where tp divides the kv heads it holds its share of them; where it
does not, k and v weights are replicated over tp and each device projects only the kv heads that
its query heads use: the gradient rule sums the parts. Caches hold keys after RoPE.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.kernels.attention.api import attention_of_products, reads_products
from mjax.kernels.attention.decode import decode_attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall, DropoutPlaces
from mjax.models.attention.context_parallel import context_attention
from mjax.models.attention.positions import apply_rope
from mjax.models.base.branch import BranchInputs, BranchModule, BranchOutput, CacheSpec, HeadSizes
from mjax.models.base.context import Context
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, declare_bias, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import Weight, weight_of
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec


class KeysValues(NamedTuple):
    """The cache: keys after RoPE, and values, each [B, K, T, H]."""

    keys: jax.Array
    values: jax.Array


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
        sizes: tuple[int, ...] = (self.cfg.attention.head_dim,)
        axes: tuple[str, ...] = ("head_dim",)
        if self.cfg.attention.qk_norm_all_heads:
            sizes, axes = (heads, *sizes), (axis, *axes)
        return Norm(self.cfg, sizes, axes, f"{self.hf_name}.{name}", rngs)

    def _hf_names(self, letters: str, kind: str) -> tuple[str, ...]:
        """Hugging Face names of the projections, one for each letter."""
        return tuple(f"{self.hf_name}.{letter}_proj.{kind}" for letter in letters)

    @jax.named_scope("attention")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: KeysValues | None = None
    ) -> BranchOutput:
        cfg, ctx, tokens = self.cfg, inputs.ctx, inputs.tokens
        parallel = ctx.parallel
        if cfg.attention.attention_in_multiplier is not None:
            x = x * cfg.attention.attention_in_multiplier
        scale = cfg.attention.attention_multiplier or cfg.attention.head_dim**-0.5
        call = attention_call(cfg, inputs, scale)
        if cache is None and self._reads_products(x, call, inputs):
            return self._returned(self._of_products(x, call, inputs), inputs)
        q, kv = self._project(x, ctx)
        q, (k, v) = self._biased_q(q), self.biased(kv, parallel)
        if cfg.attention.attention_output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if cfg.attention.key_multiplier is not None:
            k = k * cfg.attention.key_multiplier
        if cfg.attention.qk_norm:
            q = self.q_norm(q, parallel)
            k = self.k_norm(k, parallel)
        if inputs.letter in inputs.rope:
            tables = inputs.rope[inputs.letter]
            q = apply_rope(q, tables)
            k = apply_rope(k, tables)
        if self.keeps_what_attention_reads:
            q = checkpoint_name(q, weight_of(self.q).name)
            k, v = (checkpoint_name(a, weight_of(self.kv).name) for a in (k, v))
        sinks = self.sinks[...] if cfg.attention.attention_sinks else None
        if cache is not None:
            first = tokens.columns[0]
            keys = write_to_cache(cache.keys, k, first)
            values = write_to_cache(cache.values, v, first)
            cache = KeysValues(keys, values)
            k, v = keys.swapaxes(1, 2), values.swapaxes(1, 2)
            call = replace(call, implementation="xla")
        cached = None if cache is None else k.shape[1]
        arrays = attention_arrays(cfg, inputs, cached, sinks)
        if cache is not None and x.shape[1] == 1:
            out = decode_attention(q, *cache, call, arrays)
        else:
            out = context_attention(q, k, v, call, arrays, ctx)
        if cfg.attention.attention_output_gate:
            out = out * jax.nn.sigmoid(gate)
        return self._returned(out, inputs, cache)

    def _returned(
        self, out: jax.Array, inputs: BranchInputs, cache: KeysValues | None = None
    ) -> BranchOutput:
        y = self.output(out, inputs)
        if self.cfg.attention.attention_out_multiplier is not None:
            y = y * self.cfg.attention.attention_out_multiplier
        return BranchOutput(y, cache=cache)

    def _reads_products(self, x: jax.Array, call: AttentionCall, inputs: BranchInputs) -> bool:
        """Whether attention reads the products q and kv of x as they are."""
        cfg, parallel = self.cfg, inputs.ctx.parallel
        if parallel.cp > 1 or not adds_biases_only(cfg, inputs.letter):
            return False
        heads = cfg.attention.num_attention_heads // parallel.tp
        shape = len(x), parallel.tp * x.shape[1], heads, cfg.attention.head_dim
        q = jax.ShapeDtypeStruct(shape, x.dtype)
        return reads_products(q, call, attention_arrays(cfg, inputs))

    def _of_products(self, x: jax.Array, call: AttentionCall, inputs: BranchInputs) -> jax.Array:
        """Heads of values [B, S, N/tp, H], by attention that reads its products as they are.

        Where each head has keys of its own, they are one product.
        """
        cfg, ctx = self.cfg, inputs.ctx
        weights = weight_of(self.q), self.local_kv_weight(ctx.parallel)
        each_has_keys = cfg.attention.num_attention_heads == cfg.attention.num_key_value_heads
        if each_has_keys and can_join(*weights):
            weights = (one_weight(*weights),)
        biases = None
        if cfg.attention.attention_bias:
            biases = self.q_bias[...], self._local_kv_bias(ctx.parallel)
        products = column(x, weights, ctx, named=biases is None)
        with jax.named_scope("sdpa"):
            if biases is not None:  # the first is named where it gets its own
                rest = zip(products[1:], weights[1:], strict=True)
                products = products[0], *(checkpoint_name(p, w.name) for p, w in rest)
            arrays = attention_arrays(cfg, inputs)
            return attention_of_products(products, biases, call, arrays, weights[0].name)

    def output(self, out: jax.Array, inputs: BranchInputs) -> jax.Array:
        """Heads of values [B, S, N/tp, H] back in the residual stream, [B, S/tp, D]."""
        y = row(out, weight_of(self.out), inputs.ctx)
        return y + self.out_bias[...] if self.cfg.attention.attention_out_bias else y

    @staticmethod
    def flops(cfg: ModelConfig, letter: str, seq_length: int) -> float:
        """12 * N * H * (the mean number of keys that a query sees).

        That is s where a query sees all: those of its sequence, or of the source. In a window of
        w < s keys to either side it is 2w - w^2/s. Under a causal mask it is half of that. Document
        masks are not discounted.
        """
        window = seq_length
        if BRANCHES[letter].windowed and cfg.attention.sliding_window:
            window = min(cfg.attention.sliding_window, seq_length)
        keys = 2 * window - window * window / seq_length
        if BRANCHES[letter].mask == "causal":
            keys /= 2
        return 12.0 * cfg.attention.num_attention_heads * cfg.attention.head_dim * keys

    @staticmethod
    def heads(cfg: ModelConfig) -> HeadSizes:
        sizes = cfg.attention
        head = sizes.head_dim
        return HeadSizes(sizes.num_attention_heads, sizes.num_key_value_heads, head, head)

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> KeysValues:
        """Where tp does not divide the kv heads, the cache holds copies of each.

        So every device has those that its query heads use and no more.
        """
        heads = math.lcm(cfg.attention.num_key_value_heads, tp)
        shape = (batch, heads, length, cfg.attention.head_dim)
        spec = CacheSpec(shape, (None, "kv_heads", None, None))
        return KeysValues(spec, spec)

    @property
    def keeps_what_attention_reads(self) -> bool:
        """Whether a backward keeps q, k and v with their biases, not the products q and kv.

        It would otherwise add the biases again and copy k and v out of kv. A norm or a gate needs
        the products.
        """
        sizes = self.cfg.attention
        return sizes.attention_bias and not (sizes.qk_norm or sizes.attention_output_gate)

    def _project(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """q [B, S, N/tp, H or 2 H] and the kv [B, S, 2, K', H] that these query heads use."""
        kv_weight = self.local_kv_weight(ctx.parallel)
        named = not self.keeps_what_attention_reads
        return column(x, (weight_of(self.q), kv_weight), ctx, named)

    def _biased_q(self, q: jax.Array) -> jax.Array:
        return q + self.q_bias[...] if self.cfg.attention.attention_bias else q

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

        Where tp does not divide the kv heads it is a part of the weight that the device holds, and
        neither 8-bit forms nor running sums are made of it (`models/runtime/load.py`).
        """
        weight = weight_of(self.kv)
        value = _local_kv_heads(weight.value, self.cfg, parallel)
        return replace(weight, value=value)


def output_spec(cfg: ModelConfig, head: int) -> ParamSpec:
    """The projection of heads of values, of size `head`, back to the residual stream."""
    return ParamSpec(
        shape=(cfg.attention.num_attention_heads, head, cfg.hidden_size),
        axes=("heads", "head_dim", "embed"),
        role="matrix",
        inputs=2,
        matmul="attn_proj",
        hf=("self_attn.o_proj.weight",),
    )


def can_join(q: Weight, kv: Weight) -> bool:
    """Whether one matmul may have both weights: without scales, with two running sums or none."""
    if q.recipe or kv.recipe:
        return False
    return (q.grad_sum is None) == (kv.grad_sum is None)


def one_weight(q: Weight, kv: Weight) -> Weight:
    """One weight [D, 3, N, H] of q [D, N, H] and kv [D, 2, N, H]; its product bears kv's name."""

    def join(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
        return None if a is None else jnp.concatenate([a[:, None], b], axis=1)

    return replace(kv, value=join(q.value, kv.value), grad_sum=join(q.grad_sum, kv.grad_sum))


def adds_biases_only(cfg: ModelConfig, letter: str) -> bool:
    """Whether nothing but biases stands between the products q, kv and attention."""
    sizes = cfg.attention
    rotates = cfg.position_embedding == "rope" and bool(BRANCHES[letter].rotary)
    changed = sizes.qk_norm or sizes.attention_output_gate or sizes.attention_sinks
    return not (changed or rotates or sizes.key_multiplier is not None)


def attention_call(cfg: ModelConfig, inputs: BranchInputs, scale: float) -> AttentionCall:
    """What a branch of attention computes."""
    ctx, branch = inputs.ctx, BRANCHES[inputs.letter]
    return AttentionCall(
        scale=scale,
        window=cfg.attention.sliding_window if branch.windowed else None,
        softcap=cfg.attention.attn_logit_softcapping,
        mask=branch.mask,
        max_distance=cfg.relative.max_distance,
        dropout=cfg.attention.attention_dropout if ctx.dropout else 0.0,
        max_documents=ctx.max_documents,
        padded=ctx.padded,
        implementation=ctx.attention,
        deterministic=ctx.deterministic,
    )


def attention_arrays(
    cfg: ModelConfig,
    inputs: BranchInputs,
    cached: int | None = None,
    sinks: jax.Array | None = None,
) -> AttentionArrays:
    """What a branch of attention reads besides queries, keys and values.

    The keys are those of the same tokens, of a source, or of all slots of a cache for `cached`
    tokens.
    """
    tokens, ctx = inputs.tokens, inputs.ctx
    reads_source = BRANCHES[inputs.letter].mask == "cross"
    keys = inputs.source.tokens if reads_source else tokens
    key_columns, key_segments = keys.columns, keys.segments
    if cached is not None:
        key_columns = jnp.arange(cached, dtype=jnp.int32)
        key_segments = tokens.key_segments
    has_dropout = ctx.dropout and cfg.attention.attention_dropout > 0
    relative = {} if inputs.shared is None else inputs.shared.relative
    return AttentionArrays(
        columns=(tokens.columns, key_columns),
        segments=None if key_segments is None else (tokens.segments, key_segments),
        sinks=sinks,
        relative=relative.get(inputs.letter),
        dropout=_dropout_places(cfg, inputs) if has_dropout else None,
    )


def _dropout_places(cfg: ModelConfig, inputs: BranchInputs) -> DropoutPlaces:
    """What keys dropout on attention probabilities, of this device's query heads."""
    tokens, parallel = inputs.tokens, inputs.ctx.parallel
    local = cfg.attention.num_attention_heads // parallel.tp
    heads = parallel.index("tp") * local + jnp.arange(local)
    key = jax.random.fold_in(tokens.key, inputs.salt)
    return DropoutPlaces(key, tokens.rows, heads)


def write_to_cache(cache: jax.Array, new: jax.Array, first: jax.Array | int) -> jax.Array:
    """A cache [B, K, T, H] with the keys or values `new` [B, S, K', H] from column `first` on."""
    copies = cache.shape[1] // new.shape[2]  # of each kv head (`Attention.cache`)
    new = new.swapaxes(1, 2).astype(cache.dtype)
    if copies > 1:
        new = jnp.repeat(new, copies, 1)
    return jax.lax.dynamic_update_slice(cache, new, (0, 0, first, 0))


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
