"""Calls of attention kernels: what a branch computes, and the arrays beside q, k and v."""

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.vision import VisionConfig
from mjax.kernels.base.attention_call import (
    AttentionArrays,
    AttentionCall,
    DropoutPlaces,
    SharedKeys,
)
from mjax.models.base.branch import BranchInputs

IN_ORDER = "in_order"  # `AttentionCall.implementation` of caches (`documents.py`)


def attention_call(cfg: ModelConfig, inputs: BranchInputs, scale: float) -> AttentionCall:
    """Describes the attention that a branch computes: its mask, scale and dropout."""
    ctx, branch = inputs.ctx, BRANCHES[inputs.word]
    window = cfg.attention.sliding_window if branch.windowed else None
    most = ctx.documents.most
    # Windows are many and short: a bound on the distance is tighter than one on their number.
    if branch.within == "windows":
        window, most = patches_of_window(cfg.vision), 0
    return AttentionCall(
        scale=scale,
        window=window,
        softcap=cfg.attention.attn_logit_softcapping,
        mask=branch.mask,
        max_distance=cfg.relative.max_distance,
        dropout=cfg.attention.attention_dropout if ctx.training.dropout else 0.0,
        max_documents=most,
        padded=ctx.documents.padded,
        implementation=ctx.kernels.attention,
        deterministic=ctx.kernels.deterministic,
        shared=inputs.tokens.prefixes is not None and branch.mask == "causal",
        eight_bits=ctx.training.rounds_attention,
    )


def patches_of_window(vision: VisionConfig) -> int:
    """The most patches of one window; they are adjacent in the row."""
    return (vision.window_size // vision.patch_size) ** 2


def attention_arrays(
    cfg: ModelConfig,
    inputs: BranchInputs,
    sinks: jax.Array | None = None,
) -> AttentionArrays:
    """Returns the arrays that attention reads besides queries, keys and values.

    The keys are those of the same tokens or of a source; a cache puts its own in their place.
    """
    tokens, ctx = inputs.tokens, inputs.ctx
    reads_source = BRANCHES[inputs.word].mask == "cross"
    keys = inputs.source.tokens if reads_source else tokens
    within = BRANCHES[inputs.word].within
    of_queries, of_keys = getattr(tokens, within), getattr(keys, within)
    shared = None
    if tokens.prefixes is not None and not reads_source:
        shared = SharedKeys(tokens.prefixes, (tokens.positions, tokens.positions))
    has_dropout = ctx.training.dropout and cfg.attention.attention_dropout > 0
    relative = {} if inputs.shared is None else inputs.shared.relative
    return AttentionArrays(
        columns=(tokens.columns, keys.columns),
        segments=None if of_keys is None else (of_queries, of_keys),
        sinks=sinks,
        relative=relative.get(inputs.word),
        dropout=_dropout_places(cfg, inputs) if has_dropout else None,
        shared=shared,
    )


def _dropout_places(cfg: ModelConfig, inputs: BranchInputs) -> DropoutPlaces:
    """Returns the places that key dropout on probabilities of this device's query heads."""
    tokens, parallel = inputs.tokens, inputs.ctx.parallel
    local = cfg.attention.num_attention_heads // parallel.tp
    heads = parallel.index("tp") * local + jnp.arange(local)
    key = jax.random.fold_in(tokens.key, inputs.salt)
    return DropoutPlaces(key, tokens.rows, heads)
