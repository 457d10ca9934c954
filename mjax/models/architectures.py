"""THE table of architectures: a decoder, and the parts that others put before it.

A part extends the methods of the classes after it. They declare parameters before and after the
layers, embed inputs, and apply heads. So the names of parameters, and the order in which they are
drawn, are those of one flat class. A part lies in the folder of its subject. An architecture offers
the calls that its parts can answer.
"""

from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.models.decoder import Decoder
from mjax.models.heads.encoder_decoder import EncoderDecoderParts
from mjax.models.heads.encoder_heads import ClassifierParts, EncoderParts
from mjax.models.heads.multi_token import MultiTokenParts
from mjax.models.retrieval.neighbors import NeighborParts
from mjax.models.towers.image_models import ImageParts, PairParts
from mjax.models.towers.text_with_items import ItemParts


class MultiTokenDecoder(MultiTokenParts, Decoder):
    """A decoder that is trained to predict tokens further ahead, too (DeepSeek-V3)."""


class Encoder(ClassifierParts, EncoderParts, Decoder):
    """BERT and its kin, and decoders with a part of theirs."""


class EncoderDecoder(ClassifierParts, EncoderParts, EncoderDecoderParts, Decoder):
    """T5 and BART."""


class NeighborDecoder(ClassifierParts, EncoderParts, NeighborParts, Decoder):
    """RETRO: a decoder that reads texts retrieved for it."""


class TextWithItems(ClassifierParts, EncoderParts, ItemParts, Decoder):
    """LLaVA: a decoder of texts with images, sounds or both."""


class DualEncoder(PairParts, ItemParts, Decoder):
    """CLIP and SigLIP: images and texts, embedded apart and compared."""


class ImageEncoder(ClassifierParts, ImageParts, Decoder):
    """ViT: images, and their classes."""


# By `Architecture.name`.
ARCHITECTURES: dict[str, type[Decoder]] = {
    "decoder": Decoder,
    "multi_token_decoder": MultiTokenDecoder,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
    "retro": NeighborDecoder,
    "text_with_items": TextWithItems,
    "dual_encoder": DualEncoder,
    "image_encoder": ImageEncoder,
}


def build(cfg: ModelConfig, rngs: nnx.Rngs) -> Decoder:
    """The model of `cfg`, fp32 parameters drawn from `rngs`.

    `jax.jit(build(cfg.model, nnx.Rngs(0)))(tokens)`: int32 [B, S] -> fp32 logits [B, S, V]. The
    dtype of the computation is the dtype of the parameters.
    """
    return ARCHITECTURES[cfg.architecture.name](cfg, rngs)
