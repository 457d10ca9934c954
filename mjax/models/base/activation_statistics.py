"""Statistics of each layer and its router for the log, from a forward pass of their own.

A layer adds its figures to the rows of arrays for all layers. They are sums over this device's
tokens, so they add up over devices and micro-batches.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import stream_of
from mjax.models.base.streams import Activation, Statistics, Streams, add_found


@dataclass(frozen=True)
class LayerFigures:
    """The figures of so many layers, and of so many experts, as a `Probe` finds them."""

    layers: int
    experts: int

    @property
    def nothing(self) -> Statistics:
        """The sums of no tokens, fp32.

        activations [L]: the numbers in each layer's output. activation_square, activation_fourth
        [L]: their second and fourth powers. expert_load [L, E]: the tokens of each expert.
        layer_tokens [L]: those of each layer with experts. layer_entropy [L]: the entropy of the
        router's probabilities, in nats. bias_range [L]: largest less smallest bias that chooses.
        The last two are summed over the layer's tokens.
        """
        names = ["activations", "activation_square", "activation_fourth"]
        if self.experts:
            names += ["layer_tokens", "layer_entropy", "bias_range"]
        sums = {name: jnp.zeros(self.layers, jnp.float32) for name in names}
        if self.experts:
            sums["expert_load"] = jnp.zeros((self.layers, self.experts), jnp.float32)
        return sums

    def begin(self, x: Activation) -> Statistics:
        """The sums before the first layer."""
        return self.nothing

    def after_layer(
        self, sums: Statistics, x: Activation, kind: str, layer: jax.Array | int
    ) -> Statistics:
        """The sums with the figures of a layer's output x."""
        return add_found(sums, see_activations(x, kind, layer, self.layers))


def see_activations(
    x: Activation, kind: str, layer: jax.Array | int, layers: int
) -> dict[str, jax.Array]:
    """The figures of a layer's output, as `LayerFigures.nothing` names them."""
    if isinstance(x, Streams):
        x = x.activations[stream_of(kind)]
    squares = jnp.square(x.astype(jnp.float32))
    found = {
        "activations": jnp.float32(x.size),
        "activation_square": squares.sum(),
        "activation_fourth": jnp.square(squares).sum(),
    }
    return in_row(found, layer, layers)


def in_row(
    found: dict[str, jax.Array], layer: jax.Array | int, layers: int
) -> dict[str, jax.Array]:
    """The figures of one layer in its row of arrays [L, ...] for all layers."""
    row = jax.nn.one_hot(layer, layers, dtype=jnp.float32)
    return {name: jnp.multiply.outer(row, value) for name, value in found.items()}
