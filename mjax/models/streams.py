"""What travels through the layers of a model with two sequences in place of one activation.

They are an encoder's and a decoder's, retrieved neighbors and the text that reads them, or images
and the text that they stand in or are compared with, of another width. The layers are one list.
Each works on its own stream and hands the other on. So a pipeline carries the encoder's output
beside the decoder's stream, and its cotangent back. The weights that all layers read travel along
too. A layer adds its part to their cotangents, which end at the embedding's device, whatever stage
the layer is on.
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
    decoder_norm: of what neighbors read of the decoder's stream, likewise.
    relative: biases of attention by distance, [N/tp, buckets], by the letter of the branch.
    """

    encoder_norm: tuple[jax.Array, jax.Array | None] | None
    decoder_norm: tuple[jax.Array, jax.Array | None] | None
    relative: dict[str, jax.Array]


@register_dataclass
@dataclass(frozen=True)
class Streams:
    """encoder [B, S/tp, D], or None where its keys are in caches; decoder [B, T/tp, D].

    Of images and texts that are compared, either may be None: what is not asked for.

    The neighbors of all chunks are rows of their own: encoder [B*C*n, R/tp, D] of C chunks with n
    neighbors of R tokens each, those of images [B*I, T/tp, D'].
    """

    encoder: jax.Array | None
    decoder: jax.Array | None
    shared: SharedWeights


# The activation between layers: [B, S/tp, D], or that of a model with two sequences.
Activation = jax.Array | Streams
