"""Models of images: one classifies them (ViT), another compares them with texts (CLIP)."""

from dataclasses import replace

import jax
from flax import nnx

from mjax.config.languages.layer_pattern import DECODER
from mjax.errors import UserError
from mjax.models.base.context import Context, Tokens, tokens_of
from mjax.models.base.dropout import dropout
from mjax.models.base.streams import EMBEDDING_SALT, Streams
from mjax.models.towers.joint_embedding import ImagePooler, JointEmbedding, vectors_of_texts
from mjax.models.towers.shared_weights import Joint
from mjax.models.towers.vision import PatchEmbedding, rows_of_images


class _Patches:
    """The embedding of whole images, each a row of its own."""

    @jax.named_scope("embed")
    def embed_patches(
        self,
        patches: jax.Array,
        info: Tokens,
        ctx: Context,
        grid: int,
    ) -> jax.Array:
        """The input of the first layer, [B, S/tp, D], of patches [B, S, C*P*P].

        `grid` is the number of patches along a side of an image.
        """
        x = self.patch_embedding(patches, info, ctx, grid)
        rate = self.cfg.hidden_dropout
        return dropout(x, rate, info, ctx, EMBEDDING_SALT)

    def embed_images(self, images: jax.Array) -> tuple[jax.Array, Tokens]:
        """The input of the first layer for images [B, H, W, C], and facts about its tokens.

        Learned positions are resized where H is not `model.vision.image_size`.
        """
        vision = self.cfg.vision
        size = images.shape[1]
        length = vision.num_tokens(size)
        patches = rows_of_images(images, vision, length)
        info = tokens_of(patches.shape[:2])
        grid = vision.grid(size)
        x = self.embed_patches(patches, info, Context(), grid)
        return x, info


class ImageParts(_Patches):
    """Images in the place of tokens, without a vocabulary."""

    def declare_embedding(self, rngs: nnx.Rngs) -> None:
        self.patch_embedding = PatchEmbedding(self.cfg, rngs)

    def declare_head(self, rngs: nnx.Rngs) -> None:
        pass

    def embed_words(self, *args: object) -> jax.Array:
        raise UserError("this model reads images (model.vision), not tokens; call classify_images")

    def classify_images(self, images: jax.Array) -> jax.Array:
        """Images [B, H, W, C], H = W -> fp32 logits [B, C'] of their classes."""
        ctx = Context()
        x, info = self.embed_images(images)
        x, _, _ = self.layers(x, info, ctx)
        return self.row_logits(x, info, ctx)


class PairParts(_Patches):
    """Images and texts, each embedded as one vector of a space that they share."""

    def declare_head(self, rngs: nnx.Rngs) -> None:
        self.joint = Joint(self.cfg, rngs)
        tower = self.cfg.of_modality("vision")
        self.image_pooler = ImagePooler(tower, rngs)
        self.joint_embedding = JointEmbedding(self.cfg, rngs)

    def __call__(self, *args: object, **others: object) -> jax.Array:
        raise UserError(
            "this model compares images with texts and predicts no token; call "
            "image_embeddings, text_embeddings and pair_logits"
        )

    def image_embeddings(self, images: jax.Array) -> jax.Array:
        """Images [B, H, W, C], H = W -> fp32 unit vectors [B, P] (CLIP, SigLIP)."""
        ctx = Context()
        x, info = self.embed_images(images)
        x = Streams({"vision": x}, self.joint.weights())
        info = replace(info, others={"vision": info})
        x, _, _ = self.layers(x, info, ctx)
        return self.embedded_images(x, info, ctx)

    def text_embeddings(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """tokens int32 [B, S] -> fp32 unit vectors [B, P]; `segments` as for a decoder."""
        ctx = Context()
        info = tokens_of(tokens.shape, segments=segments)
        x = self.embed(tokens, info, ctx)
        x = Streams({DECODER: x}, self.joint.weights())
        x, _, _ = self.layers(x, info, ctx)
        return self.embedded_texts(x, tokens, info, ctx)

    def pair_logits(self, images: jax.Array, texts: jax.Array) -> jax.Array:
        """fp32 [B, B'] of unit vectors of images [B, P] and of texts [B', P]."""
        return self.joint_embedding.logits(images, texts)

    def embedded_images(self, x: Streams, info: Tokens, ctx: Context) -> jax.Array:
        """Unit vectors of images, fp32 [B, P], equal over cp and tp; x leaves the last layer."""
        images = x.activations["vision"]
        tokens = info.of("vision")
        pooled = self.image_pooler(images, tokens, ctx)
        return self.joint_embedding.images(pooled)

    def embedded_texts(self, x: Streams, ids: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """`embedded_images` of texts with ids [B, S]."""
        eos = self.cfg.contrastive.eos_token_id
        text = self.normed(x.decoder)
        vectors = vectors_of_texts(text, ids, info, eos, ctx)
        return self.joint_embedding.texts(vectors)
