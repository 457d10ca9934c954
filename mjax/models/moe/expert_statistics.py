"""Figures of a layer's router for the log; `base/activation_statistics.py` names and adds them."""

import jax
import jax.numpy as jnp

from mjax.models.base.activation_statistics import in_row
from mjax.models.moe.router import Routing


def see_experts(
    routing: Routing,
    expert_bias: jax.Array | None,
    layer: jax.Array | int,
    layers: int,
) -> dict[str, jax.Array]:
    """The figures of a layer's router, as `LayerFigures.nothing` names them."""
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
    return in_row(found, layer, layers)
