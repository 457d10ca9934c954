"""What travels through the layers of an encoder-decoder in place of one activation.

The layers are one list: first those of the encoder, then those of the decoder. Each works on its
own stream and hands the others on. So a pipeline carries the encoder's output beside the decoder's
stream, and its cotangent back. The weights that all layers read travel along too. A layer adds its
part to their cotangents, which end at the embedding's device, whatever stage the layer is on.
"""

from dataclasses import dataclass

import jax
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class SharedWeights:
    """Weights that several layers read, fp32.

    encoder_norm: (gain, bias or None), each [D], of the norm of the encoder's output; None: it has
        none.
    relative: biases of attention by distance, [N/tp, buckets], by the letter of the branch.
    """

    encoder_norm: tuple[jax.Array, jax.Array | None] | None
    relative: dict[str, jax.Array]


@register_dataclass
@dataclass(frozen=True)
class Streams:
    """encoder [B, S/tp, D], or None where its keys are in caches; decoder [B, T/tp, D]."""

    encoder: jax.Array | None
    decoder: jax.Array
    shared: SharedWeights


# The activation between layers: [B, S/tp, D], or that of an encoder-decoder.
Activation = jax.Array | Streams
