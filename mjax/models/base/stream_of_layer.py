"""A layer of a model of several streams: it changes its own, and may read another."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import DECODER, DEEPSTACK, stream_of, stream_read_by
from mjax.config.schema.model import ModelConfig
from mjax.models.base.branch import BranchInputs, BranchOutput, Source
from mjax.models.base.context import PADDED_ROWS, Context, Documents
from mjax.models.base.streams import Streams


def run_on_stream(
    run: Callable[[jax.Array, BranchInputs], BranchOutput],
    x: Streams,
    inputs: BranchInputs,
    kind: str,
    cfg: ModelConfig,
) -> BranchOutput:
    """The streams after `run` on that of a layer of this kind, if it is present; others stay."""
    own, other = stream_of(kind), stream_read_by(kind)
    if own not in x.activations:
        return BranchOutput(x)
    tokens, ctx = inputs.tokens, inputs.ctx.of(own)
    if own != DECODER and not cfg.architecture.reads_target:  # an encoder's are texts
        ctx = replace(ctx, documents=documents_of_items(own, ctx, cfg))
    source = Source(x.activations.get(other), tokens.of(other))
    inputs = replace(inputs, tokens=tokens.of(own), ctx=ctx, shared=x.shared, source=source)
    output = run(x.activations[own], inputs)
    streams = x.with_stream(own, output.y)
    if own == "vision" and DEEPSTACK in x.activations:
        kept = deep_outputs(x.activations[DEEPSTACK], output.y, inputs.layer, cfg)
        streams = streams.with_stream(DEEPSTACK, kept)
    return output._replace(y=streams)


def documents_of_items(stream: str, ctx: Context, cfg: ModelConfig) -> Documents:
    """The content of a row of items: one item and padding, or several in a packed tower."""
    is_packed = stream in cfg.modalities and cfg.tower(stream).is_packed
    return Documents(ctx.documents.images) if is_packed else PADDED_ROWS


def deep_outputs(
    kept: jax.Array, y: jax.Array, layer: jax.Array | int, cfg: ModelConfig
) -> jax.Array:
    """`kept` [B, T/tp, n D'], with the output y [B, T/tp, D'] of a layer if it is one of the n."""
    numbers = jnp.asarray(cfg.vision.deepstack_visual_indexes)
    is_own = jnp.repeat(numbers == layer, y.shape[-1])
    return jnp.where(is_own, jnp.tile(y, len(numbers)), kept)
