"""The outputs of some layers, [N, B, S/tp, D], kept while layers run for an objective to read.

They travel among the statistics from layer to layer, in a loop as well as one after the other. A
layer writes its own row; the derivative of that needs none of the others.
"""

import jax
import jax.numpy as jnp

from mjax.models.base.streams import Activation, decoder_of

LAYER_OUTPUTS = "layer_outputs"


def no_outputs(x: Activation, layers: tuple[int, ...]) -> dict[str, jax.Array]:
    """The outputs before the first layer, whose input is x; {} if none are kept."""
    if not layers:
        return {}  # streams may have no decoder
    x = decoder_of(x)
    return {LAYER_OUTPUTS: jnp.zeros((len(layers), *x.shape), x.dtype)}


def with_output(
    kept: dict[str, jax.Array], x: Activation, number: jax.Array | int, layers: tuple[int, ...]
) -> dict[str, jax.Array]:
    """`kept` with the output x of a layer of this number, if it is among `layers`."""
    if not layers:
        return kept
    is_own = (jnp.array(layers) == number)[:, None, None, None]
    rows = jnp.where(is_own, decoder_of(x), kept[LAYER_OUTPUTS])
    return kept | {LAYER_OUTPUTS: rows}
