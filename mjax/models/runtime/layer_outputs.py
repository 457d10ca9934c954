"""The outputs of some layers, [N, B, S/tp, D], kept while layers run for an objective to read.

They travel among the statistics from layer to layer, in a loop as well as one after the other. A
layer writes its own row; the derivative of that needs none of the others.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mjax.models.base.streams import Activation, Statistics, decoder_of

LAYER_OUTPUTS = "layer_outputs"


@dataclass(frozen=True)
class KeptOutputs:
    """The outputs of the layers of these numbers, as a `Probe` keeps them."""

    numbers: tuple[int, ...]

    def begin(self, x: Activation) -> Statistics:
        """The outputs before the first layer, whose input is x."""
        x = decoder_of(x)
        return {LAYER_OUTPUTS: jnp.zeros((len(self.numbers), *x.shape), x.dtype)}

    def after_layer(
        self, sums: Statistics, x: Activation, kind: str, layer: jax.Array | int
    ) -> Statistics:
        """`sums` with the output x of a layer, if it is one of these."""
        is_own = (jnp.array(self.numbers) == layer)[:, None, None, None]
        rows = jnp.where(is_own, decoder_of(x), sums[LAYER_OUTPUTS])
        return sums | {LAYER_OUTPUTS: rows}


def own_outputs(layers: np.ndarray, outputs: tuple[int, ...]) -> np.ndarray:
    """Which of N `outputs` are of the layers [..., L]: int32 [..., M], N in places that are left.

    M is the largest number of them.
    """
    count = len(outputs)
    is_own = (layers[..., None] == np.array(outputs, np.int32)).any(-2)
    numbers = np.where(is_own, np.arange(count), count)
    return np.sort(numbers)[..., : is_own.sum(-1).max()]


def among_all(kept: jax.Array, own: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """(all `count` outputs, of which `kept` [M, ...] are those of `own_outputs`; which are so)."""
    whole = jnp.zeros((count, *kept.shape[1:]), kept.dtype)
    counted = jnp.zeros(count, bool)
    return whole.at[own].set(kept, mode="drop"), counted.at[own].set(True, mode="drop")
