"""The decoder: embedding, a pattern of blocks, final norm, head. Follows GPT-2 and Llama.

One code path serves a researcher's `jax.jit(model)(tokens)` outside any mesh and the manual train
step inside one. Between blocks activations are [B, S/tp, D]. Blocks of equal parameter shapes are
stacked and scanned; a scan's body spells out one period of the layer pattern.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.pattern import STACK_OF, expand
from mjax.config.schema import ModelConfig
from mjax.kernels.cross_entropy import Terms, cross_entropy
from mjax.models.attention import Attention, Cache
from mjax.models.context import Context, Tokens, dropout, tokens_of
from mjax.models.execution import Execution, plain_layers
from mjax.models.layers import LayerInputs, Layers
from mjax.models.mlp import MLP
from mjax.models.moe import MoE
from mjax.models.norm import Norm
from mjax.models.params import declare, normal, split, stack
from mjax.models.positions import rope_tables
from mjax.sharding.spec import ParamSpec

_EMBED_SALT = 0  # dropout call sites; blocks use 1 + 3 * layer + {0, 1, 2}


class Block(nnx.Module):
    """Attention and feed-forward, each normed and residual. One layer of any kind in `stack`."""

    def __init__(self, cfg: ModelConfig, stack: str, rngs: nnx.Rngs):
        self.cfg = cfg
        scale = (2 * cfg.num_hidden_layers) ** -0.5 if cfg.scaled_output_init else 1.0
        out_std = cfg.initializer_range * scale
        norm = functools.partial(Norm, cfg, (cfg.hidden_size,), ("embed",), rngs=rngs)
        before = cfg.norm_placement in ("pre", "sandwich")
        after = cfg.norm_placement in ("post", "sandwich")
        self.attention_norm = norm("input_layernorm") if before else None
        self.attention = Attention(cfg, out_std, rngs)
        self.attention_post_norm = norm("post_attention_layernorm") if after else None
        name = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        self.mlp_norm = norm(name) if before else None
        self.mlp = (MoE if stack == "moe" else MLP)(cfg, out_std, rngs)
        self.mlp_post_norm = norm("post_feedforward_layernorm") if after else None

    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        ctx: Context,
        *,
        kind: str,
        rope: dict[str, tuple[jax.Array, jax.Array]],
        layer: jax.Array | int = 0,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, jax.Array, Cache | None]:
        """The new x, this device's share of the block's auxiliary loss, the new cache."""
        cfg = self.cfg
        salt = _EMBED_SALT + 1 + 3 * layer
        h, x = _forked(self.attention_norm, x)
        h, cache = self.attention(
            h,
            tokens,
            ctx,
            window=cfg.sliding_window if kind == "L" else None,
            rope=rope.get(kind),
            salt=salt,
            cache=cache,
        )
        h = _scaled(_normed(self.attention_post_norm, h), cfg.residual_multiplier)
        h = ctx.tap("attention", h)
        x = x + dropout(h, cfg.hidden_dropout, tokens, ctx, salt + 1)
        h, x = _forked(self.mlp_norm, x)
        h, aux = self.mlp(h, ctx)
        h = _scaled(_normed(self.mlp_post_norm, h), cfg.residual_multiplier)
        h = ctx.tap("mlp", h)
        return x + dropout(h, cfg.hidden_dropout, tokens, ctx, salt + 2), aux, cache


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _forked(norm: Norm | None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a branch reads, and the stream that passes it by."""
    return (x, x) if norm is None else norm.fork(x)


def _scaled(x: jax.Array, factor: float | None) -> jax.Array:
    return x if factor is None else x * jnp.asarray(factor, x.dtype)


class Decoder(nnx.Module):
    """A decoder-only language model; `model(tokens)` gives fp32 logits [B, S, vocab_size]."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.kinds = expand(cfg.layer_pattern, cfg.num_hidden_layers)
        init = normal(cfg.initializer_range)
        table = (cfg.padded_vocab_size, cfg.hidden_size), ("vocab", "embed")
        spec = ParamSpec(*table, "embedding", hf=("model.embed_tokens.weight",))
        self.embedding = declare(rngs, spec, init)
        if cfg.position_embedding == "learned":
            shape, hf = (
                (cfg.max_position_embeddings, cfg.hidden_size),
                ("model.embed_positions.weight",),
            )
            spec = ParamSpec(shape, ("positions", "embed"), "embedding", hf=hf)
            self.position_embedding = declare(rngs, spec, init)
        self.stacks = tuple(sorted({STACK_OF[kind] for kind in self.kinds}))  # .dense, .moe
        for name in self.stacks:
            count = sum(STACK_OF[kind] == name for kind in self.kinds)
            setattr(self, name, stack(functools.partial(Block, cfg, name), count, rngs))
        self.final_norm = Norm(cfg, (cfg.hidden_size,), ("embed",), "model.norm", rngs)
        if not cfg.tie_word_embeddings:
            self.head = declare(rngs, ParamSpec(*table, "head", hf=("lm_head.weight",)), init)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        ctx: Context = Context(),  # noqa: B008 - frozen
    ) -> jax.Array:
        """tokens int32 [B, S] -> fp32 logits [B, S, vocab_size] (not inside a tp mesh)."""
        assert ctx.parallel.tp == 1, "inside a tp mesh use hidden() and loss()"
        info = tokens_of(tokens.shape, positions, segments)
        return self.logits(self.hidden(tokens, info, ctx)[0])

    def hidden(
        self, tokens: jax.Array, info: Tokens, ctx: Context, caches: Cache | None = None
    ) -> tuple[jax.Array, jax.Array, Cache | None]:
        """tokens [B, S] -> final normed activations [B, S, D], whole along tp.

        Also returns this device's share of the auxiliary losses, summed over layers and sequences,
        and the updated caches, whose leaves are [L, B, T, K, H].
        """
        x, aux, caches = self.layers(self.embed(tokens, info, ctx), info, ctx, caches)
        return ctx.parallel.gather_seq(self.final_norm(x)), aux, caches

    def layers(
        self, x: jax.Array, info: Tokens, ctx: Context, caches: Cache | None = None
    ) -> tuple[jax.Array, jax.Array, Cache | None]:
        """[B, S/tp, D] through the layers that this module holds, stacked, in scans."""
        stacks = {name: split(getattr(self, name)) for name in self.stacks}
        blocks = {name: definition for name, (definition, _) in stacks.items()}
        weights = {name: params for name, (_, params) in stacks.items()}
        layers = Layers(blocks, Execution(plain_layers(self.kinds)), ctx)
        return layers.run(weights, x, LayerInputs(info, self.rope(info, ctx)), caches=caches)

    def loss(
        self, batch: dict[str, jax.Array], info: Tokens, ctx: Context, chunk: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """(sum of loss_mask * nll over [B, S], share of the auxiliary losses), fp32.

        The first is equal on all tp devices. The second is this device's share, summed over layers
        and sequences.
        """
        x, aux, _ = self.layers(self.embed(batch["tokens"], info, ctx), info, ctx)
        return self.head_loss(x, batch, ctx, chunk), aux

    @jax.named_scope("head")
    def head_loss(
        self, x: jax.Array, batch: dict[str, jax.Array], ctx: Context, chunk: int | None
    ) -> jax.Array:
        """Sum of loss_mask * loss of the last block's output [B, S/tp, D]."""
        x = self._head_input(ctx.parallel.gather_seq(self.final_norm(x)))
        return cross_entropy(
            x.reshape(-1, x.shape[-1]),
            self.head_table(),
            batch["labels"].reshape(-1),
            batch["loss_mask"].reshape(-1),
            terms=Terms(
                self.cfg.vocab_size,
                self.cfg.final_logit_softcapping,
                ctx.label_smoothing,
                ctx.z_loss,
            ),
            parallel=ctx.parallel,
            chunk=chunk,
        )

    @jax.named_scope("embed")
    def embed(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """[B, S] -> [B, S/tp, D]: vocabulary-parallel look-up, reduced into the sequence shards."""
        cfg, par = self.cfg, ctx.parallel
        table = self.embedding[...]
        place = tokens - par.index("tp") * table.shape[0]
        here = (place >= 0) & (place < table.shape[0])
        x = jnp.take(table, jnp.where(here, place, 0), axis=0)
        x = par.scatter_seq(jnp.where(here[..., None], x, 0))
        x = _scaled(x, cfg.embedding_multiplier)
        if cfg.position_embedding == "learned":
            positions = par.shard_seq(info.positions)
            x = x + jnp.take(self.position_embedding[...], positions, axis=0)
        return dropout(x, cfg.hidden_dropout, info, ctx, _EMBED_SALT)

    def head_table(self) -> jax.Array:
        """[V/tp, D]."""
        return (self.embedding if self.cfg.tie_word_embeddings else self.head)[...]

    def _head_input(self, x: jax.Array) -> jax.Array:
        return _scaled(x, None if self.cfg.logits_scaling is None else 1 / self.cfg.logits_scaling)

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., D] -> fp32 [..., vocab_size], for evaluation and generation outside tp."""
        w, x = self.head_table(), self._head_input(x)
        z = jnp.einsum("...d,vd->...v", x, w, preferred_element_type=jnp.float32)
        z = z[..., : self.cfg.vocab_size]  # not w: cutting a sharded table would move it
        cap = self.cfg.final_logit_softcapping
        return z if cap is None else cap * jnp.tanh(z / cap)

    def rope(self, info: Tokens, ctx: Context) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Tables of each kind of block that turns its queries and keys."""
        if self.cfg.position_embedding != "rope":
            return {}
        kinds = sorted(set(self.kinds) - {"N"})
        return {k: rope_tables(self.cfg, info.positions, k == "L", ctx.parallel) for k in kinds}
