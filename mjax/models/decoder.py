"""The model: embedding, a pattern of blocks, final norm, head. Follows GPT-2, Llama and BERT.

One code path serves a researcher's `jax.jit(model)(tokens)` outside any mesh and the manual train
step inside one. Between blocks activations are [B, S/tp, D]. Blocks of equal parameter shapes are
stacked and scanned; a scan's body spells out one period of the layer pattern.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    DECODER,
    ENCODER,
    branches_of,
    stack_of,
    stacks_of,
    stream_of,
)
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.kernels.loss.cross_entropy import Terms, count_hits, cross_entropy
from mjax.models.attention.positions import look_up, rope_tables
from mjax.models.base.branch import BranchOutput, Rope, branch_class
from mjax.models.base.context import Context, Tokens, dropout, tokens_of
from mjax.models.base.norm import Norm
from mjax.models.base.params import StatisticCount, as_edge, declare, normal, split, stack
from mjax.models.base.streams import Activation, Streams, WithLoads
from mjax.models.block import Block, scaled
from mjax.models.heads.encoder_heads import Classifier, MaskedHead
from mjax.models.heads.multi_token import PredictionLayer
from mjax.models.moe.router_losses import balance_of_loads, beside_loads
from mjax.models.retrieval.chunked_attention import beside_neighbors, neighbor_rows
from mjax.models.runtime.execution import Execution, plain_layers
from mjax.models.runtime.layers import Caches, LayerInputs, Layers
from mjax.models.towers.joint_embedding import ImagePooler, JointEmbedding, vectors_of_texts
from mjax.models.towers.modalities import MODALITIES, beside_given, embeddings
from mjax.models.towers.shared_weights import Joint
from mjax.models.towers.tiles import Tiled
from mjax.models.towers.vision import rows_of_images
from mjax.sharding.spec import ParamSpec

# dropout call sites; those of layers are in `block.py`
_EMBED_SALT = 0
_TARGET_SALT = 1 << 24  # of what a decoder reads beside an encoder
_ITEM_SALTS = {"vision": _EMBED_SALT, "audio": 2 << 24}


def _table(cfg: ModelConfig, rows: int, axis: str | None, of: str) -> ParamSpec:
    """The declaration of a table of embeddings."""
    return ParamSpec(
        shape=(rows, cfg.hidden_size),
        axes=(axis, "embed"),
        role="embedding",
        hf=(f"model.embed_{of}.weight",),
    )


class Decoder(nnx.Module):
    """A language model of one stack of layers: a decoder, or an encoder where they see ahead.

    `model(tokens)` gives fp32 logits [B, S, vocab_size].
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.kinds = cfg.layer_kinds
        init = normal(cfg.initializer_range)
        table = _table(cfg, cfg.padded_vocab_size, "vocab", "tokens")
        for name, module in embeddings(cfg, rngs).items():
            setattr(self, name, module)
        if not cfg.reads_images:
            self.embedding = declare(rngs, table, init)
        if cfg.position_embedding == "learned" and not cfg.reads_images:
            positions = _table(cfg, cfg.max_position_embeddings, "positions", "positions")
            self.position_embedding = declare(rngs, positions, init)
        norm = functools.partial(Norm, cfg, (cfg.hidden_size,), ("embed",), rngs=rngs)
        if cfg.bert.type_vocab_size:
            types = _table(cfg, cfg.bert.type_vocab_size, None, "types")
            self.type_embedding = declare(rngs, types, init)
        if cfg.bert.embedding_norm:
            self.embedding_norm = norm("model.embed_norm")
        self.stacks = stacks_of(self.kinds)  # names of attributes
        for name in self.stacks:
            kinds = [kind for kind in self.kinds if stack_of(kind) == name]
            make_block = functools.partial(Block, cfg, kinds[0])
            layers = stack(make_block, len(kinds), rngs)
            setattr(self, name, layers)
        normed = cfg.norm_placement == "post_residual"  # the last layer's output is
        self.final_norm = None if normed else norm("model.norm")
        for depth, kind in enumerate(cfg.prediction_kinds, 1):
            block = Block(cfg, kind, rngs)
            layer = PredictionLayer(cfg, kind, block, rngs)
            number = cfg.num_hidden_layers + depth - 1
            setattr(self, f"mtp_{depth}", as_edge(layer, f"model.layers.{number}."))
        if not (cfg.tie_word_embeddings or cfg.reads_images or cfg.is_dual_encoder):
            head = replace(table, role="head", hf=("lm_head.weight",))
            self.head = declare(rngs, head, init)
        if cfg.has_two_streams:
            self.joint = Joint(cfg, rngs)
        if cfg.is_dual_encoder:
            self.image_pooler = ImagePooler(cfg.of_modality("vision"), rngs)
            self.joint_embedding = JointEmbedding(cfg, rngs)
        if cfg.bert.mlm_head:
            self.masked_head = MaskedHead(cfg, rngs)
        if cfg.bert.num_labels or cfg.vision.num_labels:
            self.classifier = Classifier(cfg, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        types: jax.Array | None = None,
        target: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        neighbors: jax.Array | None = None,
        images: jax.Array | Tiled | None = None,
        audio: jax.Array | None = None,
        ctx: Context = Context(),  # noqa: B008 - frozen
    ) -> jax.Array:
        """tokens int32 [B, S] -> fp32 logits [B, S, vocab_size] (not inside a tp mesh).

        `segments` and `types` are as in `Tokens`; padding is a segment of its own. An
        encoder-decoder reads `tokens` and gives logits [B, T, V] of its decoder's tokens, `target`
        int32 [B, T], with segments of their own. RETRO reads `neighbors` int32 [B, C*n, R] of each
        of the C chunks of a row, -1 for padding. A model with towers reads `images` [B, I, H, W, C]
        (or `Tiled`) and `audio`, log-mel frames [B, I, F, M], in the places of tokens
        `model.vision.image_token_id` and `model.audio.audio_token_id`, in order.
        """
        assert ctx.parallel.tp == 1, "inside a tp mesh use hidden() and head_loss()"
        if (target is not None) != self.cfg.is_encoder_decoder:
            raise UserError(
                f"model.layer_pattern={self.cfg.layer_pattern}: target is for encoder-decoders, "
                "which need it: the tokens that the decoder reads"
            )
        if (neighbors is not None) != self.cfg.is_retro:
            raise UserError(
                f"model.layer_pattern={self.cfg.layer_pattern}: neighbors are for RETRO (R), which "
                "needs them: the texts that were retrieved for each chunk"
            )
        if self.cfg.is_dual_encoder:
            raise UserError(
                "this model compares images with texts and predicts no token; call "
                "image_embeddings, text_embeddings and pair_logits"
            )
        if target is not None and (segments is None) != (target_segments is None):
            raise UserError(
                "segments and target_segments go together: a token of the target sees those tokens "
                "that have its segment; give both or neither"
            )
        info = replace(tokens_of(tokens.shape, positions, segments), types=types)
        if self.cfg.modalities:
            given = {"vision": images, "audio": audio}
            return self.logits(self.read(tokens, given, info, ctx)[0])
        if neighbors is not None:
            info, target = beside_neighbors(info, neighbors), tokens
            tokens = neighbor_rows(neighbors)
        elif target is not None:
            text = tokens_of(target.shape, segments=target_segments)
            info = replace(text, others={ENCODER: info})
        x, _, _ = self.hidden(tokens, info, ctx, target=target)
        return self.logits(x)

    def read(
        self,
        tokens: jax.Array,
        given: Mapping[str, jax.Array | Tiled | None],
        info: Tokens,
        ctx: Context,
        caches: Caches | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array], Caches | None]:
        """`hidden` of tokens beside what is given of each modality, [B, I, ...].

        What is not given is not in the text, or caches hold it.
        """
        rows, sizes = {}, {}
        for name in self.cfg.modalities:
            tower, items = self.cfg.tower(name), given.get(name)
            info, of_items, size = beside_given(tokens, info, name, tower, items)
            if of_items is not None:
                rows[name], sizes[name] = of_items, size
        x = self.embed_items(tokens, rows, sizes, info, ctx)
        x, statistics, caches = self.layers(x, info, ctx, caches)
        x = ctx.parallel.gather_seq(self.normed(x.decoder))
        return x, statistics, caches

    def classify(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        types: jax.Array | None = None,
    ) -> jax.Array:
        """tokens int32 [B, S] -> fp32 logits [B, C] of rows' classes; else as `__call__`."""
        info, ctx = replace(tokens_of(tokens.shape, segments=segments), types=types), Context()
        x, _, _ = self.layers(self.embed(tokens, info, ctx), info, ctx)
        return self.row_logits(x, info, ctx)

    def classify_images(self, images: jax.Array) -> jax.Array:
        """Images [B, H, W, C], H = W -> fp32 logits [B, C'] of their classes."""
        x, info = self._embed_images(images)
        return self.row_logits(self.layers(x, info, Context())[0], info, Context())

    def image_embeddings(self, images: jax.Array) -> jax.Array:
        """Images [B, H, W, C], H = W -> fp32 unit vectors [B, P] (CLIP, SigLIP)."""
        x, info = self._embed_images(images)
        x = Streams({"vision": x}, self.joint.weights())
        info = replace(info, others={"vision": info})
        x, _, _ = self.layers(x, info, Context())
        return self.embedded_images(x, info, Context())

    def _embed_images(self, images: jax.Array) -> tuple[jax.Array, Tokens]:
        """The input of the first layer for images [B, H, W, C], and facts about its tokens.

        Learned positions are resized where H is not `model.vision.image_size`.
        """
        vision, size = self.cfg.vision, images.shape[1]
        patches = rows_of_images(images, vision, vision.num_tokens(size))
        info = tokens_of(patches.shape[:2])
        return self.embed_patches(patches, info, Context(), vision.grid(size)), info

    def text_embeddings(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """tokens int32 [B, S] -> fp32 unit vectors [B, P]; `segments` as in `__call__`."""
        info, ctx = tokens_of(tokens.shape, segments=segments), Context()
        x = Streams({DECODER: self.embed(tokens, info, ctx)}, self.joint.weights())
        x, _, _ = self.layers(x, info, ctx)
        return self.embedded_texts(x, tokens, info, ctx)

    def pair_logits(self, images: jax.Array, texts: jax.Array) -> jax.Array:
        """fp32 [B, B'] of unit vectors of images [B, P] and of texts [B', P]."""
        return self.joint_embedding.logits(images, texts)

    def embedded_images(self, x: Streams, info: Tokens, ctx: Context) -> jax.Array:
        """Unit vectors of images, fp32 [B, P], equal over cp and tp; x leaves the last layer."""
        images = x.activations["vision"]
        return self.joint_embedding.images(self.image_pooler(images, info.of("vision"), ctx))

    def embedded_texts(self, x: Streams, ids: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """`embedded_images` of texts with ids [B, S]."""
        eos = self.cfg.contrastive.eos_token_id
        vectors = vectors_of_texts(self.normed(x.decoder), ids, info, eos, ctx)
        return self.joint_embedding.texts(vectors)

    def hidden(
        self,
        tokens: jax.Array | None,
        info: Tokens,
        ctx: Context,
        caches: Caches | None = None,
        target: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array], Caches | None]:
        """(final normed activations [B, S, D], shares of statistics, new caches).

        `tokens` are int32 [B, S]. The shares are this device's, fp32, summed over layers and
        sequences. There is a cache for each layer. An encoder-decoder gives the activations of its
        decoder's tokens, `target` [B, T]; without `tokens` it takes what it read from the caches.
        """
        if self.cfg.modalities:
            return self.read(tokens, {}, info, ctx, caches)
        if target is None:
            x = self.embed(tokens, info, ctx)
        else:
            x = self.embed_streams(tokens, target, info, ctx)
        x, statistics, caches = self.layers(x, info, ctx, caches)
        x = x.decoder if isinstance(x, Streams) else x
        x = ctx.parallel.gather_seq(self.normed(x))
        return x, statistics, caches

    def normed(self, x: jax.Array) -> jax.Array:
        """The last layer's output after the final norm, if the model has one."""
        return x if self.final_norm is None else self.final_norm(x)

    def layers(
        self, x: Activation, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> tuple[Activation, dict[str, jax.Array], Caches | None]:
        """`hidden` from the first layer's input x [B, S/tp, D] to the last one's output.

        The layers are those that this module holds, stacked. They run in scans, and with caches one
        after the other.
        """
        blocks, weights = {}, {}
        for name in self.stacks:
            blocks[name], weights[name] = split(getattr(self, name))
        execution = Execution(plain_layers(self.kinds), unroll=1 if caches is None else 0)
        inputs = LayerInputs(info, self.rope(info, ctx))
        layers = Layers(blocks, execution, ctx, statistics=tuple(self.statistics))
        if caches is None:
            x = beside_loads(x, len(info.rows), self.cfg)
        x, statistics, caches = layers.run(weights, x, inputs, caches=caches)
        if isinstance(x, WithLoads):
            statistics["aux_loss"] = balance_of_loads(x.loads, self.cfg, ctx.parallel)
            x = x.x
        return x, statistics, caches

    @property
    def statistics(self) -> dict[str, StatisticCount]:
        """The names of the statistics of the layers, and what each is divided by."""
        found: dict[str, StatisticCount] = {}
        for word in sorted(self.cfg.branches):
            found |= branch_class(word).statistics(self.cfg)
        return found

    @jax.named_scope("head")
    def head_loss(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """The sum of mask * cross-entropy, fp32 [], equal on all tp devices.

        x [B, S/tp, D] is the last layer's output, `labels` int32 and `mask` fp32 are [B, S].
        """
        return self.token_loss(self.normed(x), labels, mask, ctx)

    def token_loss(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """`head_loss` of x [B, S/tp, D] that is normed already."""
        return self._of_tokens(cross_entropy, x, labels, mask, ctx)

    @jax.named_scope("head")
    def token_hits(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """The sum of mask where the likeliest token is the label; arguments as `head_loss`."""
        return self._of_tokens(count_hits, self.normed(x), labels, mask, ctx)

    def _of_tokens(self, function, x, labels, mask, ctx: Context) -> jax.Array:
        """A function of tokens' logits, given what they are made from; x is normed."""
        x = ctx.parallel.gather_seq(self._head_input(x))
        terms = Terms(
            self.cfg.vocab_size,
            self.cfg.final_logit_softcapping,
            ctx.label_smoothing,
            ctx.z_loss,
        )
        return function(
            x.reshape(-1, x.shape[-1]),
            self.head_table(),
            labels.reshape(-1),
            mask.reshape(-1),
            bias=self.head_bias(),
            terms=terms,
            parallel=ctx.parallel,
            chunk=ctx.loss_chunk,
            few=self.cfg.bert.mlm_head,
        )

    @jax.named_scope("classifier")
    def row_logits(self, x: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """fp32 logits [B, C] of each row's class, from the last layer's output x [B, S/tp, D].

        They mean something on cp devices that hold the first column, and are equal over tp.
        """
        return self.classifier(self.normed(x), info, ctx)

    @jax.named_scope("mtp")
    def predict(
        self, depth: int, x: jax.Array, tokens: jax.Array, info: Tokens, ctx: Context
    ) -> BranchOutput:
        """The normed output [B, S/tp, D] of a depth of multi-token prediction; its statistics.

        x [B, S/tp, D] is the normed output of the depth before. `tokens` int32 [B, S] are those
        that lie `depth` places ahead, `info` is about those of the model itself.
        """
        embedding = self.embed(tokens, info, ctx, salt=_EMBED_SALT + (depth << 24))
        layer = getattr(self, f"mtp_{depth}")
        number = self.cfg.num_hidden_layers + depth - 1
        rope = self.rope(info, ctx)
        return layer(x, embedding, info, ctx, rope=rope, layer=number)

    @jax.named_scope("embed")
    def embed(
        self, tokens: jax.Array, info: Tokens, ctx: Context, salt: int = _EMBED_SALT
    ) -> jax.Array:
        """The input of the first layer, [B, S/tp, D], of int32 tokens [B, S].

        Each tp device looks up its part of the vocabulary; the sum is scattered over the sequence.
        `salt` keys dropout.
        """
        cfg, parallel = self.cfg, ctx.parallel
        if cfg.reads_images:
            raise UserError(
                "this model reads images (model.vision), not tokens; call classify_images"
            )
        table = self.embedding[...]
        rows = table.shape[0]
        row = tokens - parallel.index("tp") * rows
        is_local = (row >= 0) & (row < rows)
        # The rows of other devices are spread: GPUs add the gradients of one row one by one.
        x = look_up(table, row % rows)
        x = jnp.where(is_local[..., None], x, 0)
        x = parallel.scatter_seq(x)
        x = scaled(x, cfg.embedding_multiplier)
        for features in info.features.values():  # a projector adds what stands there
            is_text = parallel.shard_seq(features.reshape(*tokens.shape, -1)[..., 0]) < 0
            x = jnp.where(is_text[..., None], x, 0)
        if cfg.position_embedding == "learned":
            positions = parallel.shard_seq(info.positions) + cfg.bert.position_offset
            x = x + look_up(self.position_embedding[...], positions)
        if cfg.bert.type_vocab_size:
            types = jnp.zeros_like(tokens) if info.types is None else info.types
            # A product, whose backward sums all tokens' gradients at once: there are few rows.
            table = self.type_embedding[...]
            one_hot = jax.nn.one_hot(parallel.shard_seq(types), len(table), dtype=table.dtype)
            x = x + jnp.matmul(one_hot, table, precision="highest")
        if cfg.bert.embedding_norm:
            x = self.embedding_norm(x)
        return dropout(x, cfg.hidden_dropout, info, ctx, salt)

    @jax.named_scope("embed")
    def embed_patches(self, patches: jax.Array, info: Tokens, ctx: Context, grid: int) -> jax.Array:
        """The input of the first layer, [B, S/tp, D], of patches [B, S, C*P*P].

        `grid` is the number of patches along a side of an image.
        """
        x = self.patch_embedding(patches, info, ctx, grid)
        return dropout(x, self.cfg.hidden_dropout, info, ctx, _EMBED_SALT)

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
        streams = {DECODER: self.embed(tokens, info, ctx, salt=_TARGET_SALT)}
        for name in rows:
            module = getattr(self, MODALITIES[name].embedding)
            grid = self.cfg.tower(name).grid(sizes[name])
            own = ctx.of(name)
            x = module(rows[name], info.of(name), own, grid)
            rate, salt = self.cfg.hidden_dropout, _ITEM_SALTS[name]
            streams[name] = dropout(x, rate, info.of(name), own, salt)
        return Streams(streams, self.joint.weights())

    def embed_streams(
        self, tokens: jax.Array | None, target: jax.Array, info: Tokens, ctx: Context
    ) -> Streams:
        """The input of the first layer of an encoder-decoder, of tokens [B, S] and target [B, T].

        Without tokens the encoder's stream is left out.
        """
        streams = {DECODER: self.embed(target, info, ctx, salt=_TARGET_SALT)}
        if tokens is not None:
            streams[ENCODER] = self.embed(tokens, info.of(ENCODER), ctx)
        return Streams(streams, self.joint.weights())

    def head_table(self) -> jax.Array:
        """The weight of the head, [V/tp, D]: the embedding's, if they are tied."""
        table = self.embedding if self.cfg.tie_word_embeddings else self.head
        return table[...]

    def head_bias(self) -> jax.Array | None:
        """The bias of the logits, [V/tp], if the model has one."""
        return self.masked_head.bias[...] if self.cfg.bert.mlm_head else None

    def _head_input(self, x: jax.Array) -> jax.Array:
        if self.cfg.bert.mlm_head:
            x = self.masked_head(x)
        if self.cfg.logits_scaling is None:
            return x
        return scaled(x, 1 / self.cfg.logits_scaling)

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., D] -> fp32 [..., vocab_size], for evaluation and generation outside tp."""
        w = self.head_table()
        x = self._head_input(x)
        z = jnp.einsum("...d,vd->...v", x, w, preferred_element_type=jnp.float32)
        bias = self.head_bias()
        z = z if bias is None else z + bias.astype(jnp.float32)
        z = z[..., : self.cfg.vocab_size]  # not w: cutting a sharded table would move it
        cap = self.cfg.final_logit_softcapping
        if cap is None:
            return z
        return cap * jnp.tanh(z / cap)

    def rope(self, info: Tokens, ctx: Context) -> Rope:
        """The tables (cos, sin) of each kind of branch that rotates its queries and keys."""
        if self.cfg.position_embedding != "rope":
            return {}
        tables = {}
        for kind in self.kinds:
            side = info.of(stream_of(kind)) if self.cfg.has_two_streams else info
            for word in branches_of(kind):
                if BRANCHES[word].rotary and word not in tables:
                    tables[word] = rope_tables(self.cfg, side.positions, word, ctx.parallel)
        return tables
