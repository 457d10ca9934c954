"""A layer of a model of several streams: it changes its own, and may read another."""

from collections.abc import Callable
from dataclasses import replace

import jax

from mjax.config.languages.layer_pattern import DECODER, stream_of, stream_read_by
from mjax.config.schema.model import ModelConfig
from mjax.models.base.branch import BranchInputs, BranchOutput, Source
from mjax.models.base.context import PADDED_ROWS
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
    # A row of another stream is one item and padding; an encoder's are texts.
    if own != DECODER and not cfg.architecture.reads_target:
        ctx = replace(ctx, documents=PADDED_ROWS)
    source = Source(x.activations.get(other), tokens.of(other))
    inputs = replace(inputs, tokens=tokens.of(own), ctx=ctx, shared=x.shared, source=source)
    output = run(x.activations[own], inputs)
    return output._replace(y=x.with_stream(own, output.y))
