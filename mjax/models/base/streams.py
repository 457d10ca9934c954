"""Streams: the activations of a model whose layers work on several sequences.

They are an encoder's and a decoder's; neighbors' and those of the text that reads them; or those of
images, sounds and a text. Each has its own width. The layers are one list. Each works on its own
stream and hands the others on. So a pipeline carries an encoder's
output beside the decoder's stream, and its cotangent back. The weights that all layers read travel
along too. A layer adds its part to their cotangents, which end at the embedding's device, whatever
stage the layer is on.
"""

from dataclasses import dataclass, replace

import jax
from jax.tree_util import register_dataclass

from mjax.config.languages.layer_pattern import DECODER

# The numbers that key the dropout of embeddings: of the first stream or the only one, of the text
# beside it, and of sounds. Those of layers are in `models/block.py`.
EMBEDDING_SALT, TEXT_SALT, SOUND_SALT = 0, 1 << 24, 2 << 24


@register_dataclass
@dataclass(frozen=True)
class SharedWeights:
    """Weights that several layers read, fp32.

    encoder_norm: (gain, bias or None), each [D], of the norm of the encoder's output; None: it has
        none.
    decoder_norm: of what neighbors read of the decoder's stream, likewise.
    relative: biases of attention by distance, [N/tp, buckets], by the word of the branch.
    """

    encoder_norm: tuple[jax.Array, jax.Array | None] | None
    decoder_norm: tuple[jax.Array, jax.Array | None] | None
    relative: dict[str, jax.Array]


@register_dataclass
@dataclass(frozen=True)
class Streams:
    """activations: [B, S/tp, D] by stream (`layer_pattern.py`); one is the decoder's.

    An encoder's is left out where its keys are in caches, and one of those that are compared where
    it is not asked for. The neighbors of all chunks are rows of their own: [B*C*n, R/tp, D] of C
    chunks with n neighbors of R tokens each. So are the items of a modality, [B*I, T/tp, D'].
    """

    activations: dict[str, jax.Array]
    shared: SharedWeights

    @property
    def decoder(self) -> jax.Array:
        return self.activations[DECODER]

    def with_stream(self, name: str, x: jax.Array) -> "Streams":
        """The streams, one of them changed."""
        return replace(self, activations=self.activations | {name: x})


@register_dataclass
@dataclass(frozen=True)
class WithLoads:
    """An activation, and the loads of the experts of the layers before (`router_losses.py`).

    The loads travel along because a balance loss over all layers together is made at the end.
    """

    x: jax.Array | Streams
    loads: jax.Array


def decoder_of(x: jax.Array | Streams) -> jax.Array:
    """The activations of a decoder's stream, or of the only one, [B, S/tp, D]."""
    return x.decoder if isinstance(x, Streams) else x


# The activation between layers: [B, S/tp, D], or those of a model with several sequences.
Activation = jax.Array | Streams | WithLoads

# The loads of experts, where they are among the statistics of layers.
EXPERT_LOADS = "expert_loads"

Statistics = dict[str, jax.Array]


def add_found(statistics: Statistics, found: Statistics) -> Statistics:
    """The sums of statistics with those that one layer found; others are left out."""
    return {
        name: total + found[name] if name in found else total for name, total in statistics.items()
    }


def split_loads(x: Activation, statistics: Statistics) -> tuple[Activation, Statistics]:
    """(the activation alone, the statistics with the loads that were beside it, if any)."""
    if not isinstance(x, WithLoads):
        return x, statistics
    return x.x, statistics | {EXPERT_LOADS: x.loads}


def join_loads(x: Activation, statistics: Statistics) -> tuple[Activation, Statistics]:
    """The inverse of `split_loads`."""
    if EXPERT_LOADS not in statistics:
        return x, statistics
    rest = {name: value for name, value in statistics.items() if name != EXPERT_LOADS}
    return WithLoads(x, statistics[EXPERT_LOADS]), rest
