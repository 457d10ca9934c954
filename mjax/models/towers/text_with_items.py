"""Texts in which images or sounds stand in the place of tokens (LLaVA, arXiv 2304.08485)."""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import DECODER, DEEPSTACK
from mjax.models.base.context import Context, Tokens
from mjax.models.base.dropout import dropout
from mjax.models.base.streams import EMBEDDING_SALT, SOUND_SALT, TEXT_SALT, Streams
from mjax.models.runtime.run import Caches, LayersOutput
from mjax.models.towers.modalities import MODALITIES, beside_given
from mjax.models.towers.shared_weights import Joint
from mjax.models.towers.tiles import Tiled

_SALTS = {"vision": EMBEDDING_SALT, "audio": SOUND_SALT}


class ItemParts:
    """Streams of a text and of the items of each modality."""

    def declare_embedding(self, rngs: nnx.Rngs) -> None:
        for name in self.cfg.modalities:
            modality, sizes = MODALITIES[name], self.cfg.of_modality(name)
            setattr(self, modality.embedding, modality.module(sizes, rngs))
        super().declare_embedding(rngs)

    def declare_head(self, rngs: nnx.Rngs) -> None:
        super().declare_head(rngs)
        self.joint = Joint(self.cfg, rngs)

    def activations(
        self,
        tokens: jax.Array,
        info: Tokens,
        ctx: Context,
        images: jax.Array | Tiled | None = None,
        audio: jax.Array | None = None,
    ) -> jax.Array:
        """The final normed activations [B, S, D] of a text.

        `images` are [B, I, H, W, C], `Tiled` or `PackedImages`, `audio` is log-mel frames
        [B, I, F, M]. They stand in the places of `model.vision.image_token_id` and
        `model.audio.audio_token_id`, in order.
        """
        given = {"vision": images, "audio": audio}
        return self.hidden(tokens, info, ctx, given=given)[0]

    def hidden(
        self,
        tokens: jax.Array,
        info: Tokens,
        ctx: Context,
        caches: Caches | None = None,
        given: Mapping[str, jax.Array | Tiled | None] = MappingProxyType({}),
        count: jax.Array | None = None,
    ) -> LayersOutput:
        """(final normed activations [B, S, D], shares of statistics, new caches).

        Items [B, I, ...] are given by modality. Items that are not given are not in the text, or
        caches hold them. They stand in the first `count` tokens of a row, int32 [B], or in all.
        """
        places = tokens
        if count is not None:
            places = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, -1)
        rows, sizes = {}, {}
        for name in self.cfg.modalities:
            tower, items = self.cfg.tower(name), given.get(name)
            info, of_items, size = beside_given(places, info, name, tower, items)
            if of_items is not None:
                rows[name], sizes[name] = of_items, size
        x = self.embed_items(tokens, rows, sizes, info, ctx)
        return self.run(x, info, ctx, caches)

    def embed_words(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """Zeros where an item stands, to which a projector adds it."""
        x = super().embed_words(tokens, info, ctx)
        for features in info.features.values():
            first = features.reshape(*tokens.shape, -1)[..., 0]
            is_text = ctx.parallel.shard_seq(first) < 0
            x = jnp.where(is_text[..., None], x, 0)
        return x

    def embed_items(
        self,
        tokens: jax.Array,
        rows: Mapping[str, jax.Array],
        sizes: Mapping[str, int | None],
        info: Tokens,
        ctx: Context,
    ) -> Streams:
        """The input of the first layer, of tokens [B, S] and rows [B*I, T, N] of their items.

        `rows` and `sizes` of items are by modality. Without rows a stream is left out.
        """
        streams = {DECODER: self.embed(tokens, info, ctx, salt=TEXT_SALT)}
        for name in rows:
            module = getattr(self, MODALITIES[name].embedding)
            grid = self.cfg.tower(name).grid(sizes[name])
            own, tokens_of_items = ctx.of(name), info.of(name)
            x = module(rows[name], tokens_of_items, own, grid)
            rate = self.cfg.hidden_dropout
            streams[name] = x = dropout(x, rate, tokens_of_items, own, _SALTS[name])
            kept = len(self.cfg.vision.deepstack_visual_indexes)
            if kept and name == "vision":
                streams[DEEPSTACK] = jnp.zeros_like(jnp.tile(x, kept))
        return Streams(streams, self.joint.weights())
