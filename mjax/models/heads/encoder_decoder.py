"""An encoder and a decoder that reads it (T5, arXiv 1910.10683): two streams in one model."""

from collections.abc import Mapping
from dataclasses import replace

import jax
from flax import nnx

from mjax.config.languages.layer_pattern import DECODER, ENCODER
from mjax.errors import UserError
from mjax.models.base.context import Context, Tokens, tokens_of
from mjax.models.base.streams import TEXT_SALT, Streams
from mjax.models.runtime.run import Caches, LayersOutput
from mjax.models.towers.shared_weights import Joint


class EncoderDecoderParts:
    """Streams of what the encoder and the decoder read, embedded by one table."""

    def declare_head(self, rngs: nnx.Rngs) -> None:
        super().declare_head(rngs)
        self.joint = Joint(self.cfg, rngs)

    def activations(
        self,
        tokens: jax.Array,
        info: Tokens,
        ctx: Context,
        target: jax.Array,
        target_segments: jax.Array | None = None,
    ) -> jax.Array:
        """The final normed activations [B, T, D] of target int32 [B, T], which the decoder reads.

        It has segments of its own.
        """
        if (info.segments is None) != (target_segments is None):
            raise UserError(
                "segments and target_segments go together: a token of the target sees those tokens "
                "that have its segment; give both or neither"
            )
        text = tokens_of(target.shape, segments=target_segments)
        text = replace(text, others={ENCODER: info})
        return self.hidden(tokens, text, ctx, target=target)[0]

    def hidden(
        self,
        tokens: jax.Array | None,
        info: Tokens,
        ctx: Context,
        caches: Caches | None = None,
        target: jax.Array | None = None,
    ) -> LayersOutput:
        """(final normed activations of the target [B, T, D], shares of statistics, new caches).

        Without `tokens` the decoder takes what it read from the caches.
        """
        return self.run(self.embed_streams(tokens, target, info, ctx), info, ctx, caches)

    def extend(
        self, ids: jax.Array, info: Tokens, ctx: Context, caches: Caches, inputs: Mapping
    ) -> LayersOutput:
        source = inputs.get("source")
        if source is not None:
            text = tokens_of(source.shape, segments=inputs["real"])
            info = replace(info, others={ENCODER: text})
        return self.hidden(source, info, ctx, caches, target=ids)

    def embed_streams(
        self, tokens: jax.Array | None, target: jax.Array, info: Tokens, ctx: Context
    ) -> Streams:
        """The input of the first layer, of tokens [B, S] and target [B, T].

        Without tokens the encoder's stream is left out.
        """
        streams = {DECODER: self.embed(target, info, ctx, salt=TEXT_SALT)}
        if tokens is not None:
            streams[ENCODER] = self.embed(tokens, info.of(ENCODER), ctx)
        return Streams(streams, self.joint.weights())
