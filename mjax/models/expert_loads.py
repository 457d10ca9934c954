"""What the routers of a model do, layer by layer: seen in a forward pass of its own, for the log.

A layer adds its figures to the rows of arrays for all layers. They are sums over this device's
tokens, so they add up over devices and micro-batches.
"""

import jax
import jax.numpy as jnp

from mjax.models.router import Routing


def nothing_seen(layers: int, experts: int) -> dict[str, jax.Array]:
    """The sums before the first layer, fp32.

    expert_load [L, E]: the tokens of each expert. layer_tokens [L]: those of each layer.
    layer_entropy [L]: the entropy of the router's probabilities, in nats. bias_range [L]: largest
    less smallest bias that chooses. The last two are summed over the layer's tokens.
    """
    names = "layer_tokens", "layer_entropy", "bias_range"
    sums = {name: jnp.zeros(layers, jnp.float32) for name in names}
    return sums | {"expert_load": jnp.zeros((layers, experts), jnp.float32)}


def see_experts(
    routing: Routing,
    expert_bias: jax.Array | None,
    layer: jax.Array | int,
    sizes: tuple[int, int],
) -> dict[str, jax.Array]:
    """The figures of one layer, as `nothing_seen` names them; `sizes` are (layers, experts)."""
    entropy = jax.scipy.special.entr(routing.probs)
    of_tokens = jnp.ones(routing.probs.shape[:2], jnp.float32)
    tokens = routing.of_text(of_tokens).sum()
    bias_range = jnp.float32(0)
    if expert_bias is not None:
        bias_range = jnp.ptp(expert_bias.astype(jnp.float32))
    found = {
        "expert_load": routing.chosen.sum((0, 1)),
        "layer_tokens": tokens,
        "layer_entropy": routing.of_text(entropy).sum(),
        "bias_range": tokens * bias_range,
    }
    row = jax.nn.one_hot(layer, sizes[0], dtype=jnp.float32)
    return {name: jnp.multiply.outer(row, value) for name, value in found.items()}
