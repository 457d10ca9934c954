"""The static facts of an expert, and its activation function."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.elementwise.activation import activated, gated

GPT_OSS_SHARPNESS = 1.702  # of the sigmoid in gpt-oss's gate


class Expert(NamedTuple):
    """The static facts of an expert: `model.hidden_act`, and whether it is gated.

    limit: `model.swiglu_limit`. kernel: of its grouped matmuls (`kernels/matmul/grouped.py`).
    """

    hidden_act: str
    gated: bool
    limit: float | None = None
    kernel: str = "xla"

    def activate(self, h: jax.Array) -> jax.Array:
        """[..., F], of h [..., 2, F] (gate, up) if gated, else [..., F]."""
        if self.limit is not None:
            return _clamped(h, self.limit)
        if self.gated:
            return gated(h, self.hidden_act)
        return activated(h, None, self.hidden_act)

    def weighted(self, h: jax.Array, gates: jax.Array) -> jax.Array:
        """gate * act(h) of rows, [M, F]; gates fp32 [M]."""
        return self.activate(h) * gates[:, None].astype(h.dtype)


def _clamped(h: jax.Array, limit: float) -> jax.Array:
    """gpt-oss's gated activation of h [..., 2, F]: both halves clamped, 1 added to the second."""
    gate = jnp.minimum(h[..., 0, :], limit)
    up = jnp.clip(h[..., 1, :], -limit, limit)
    return gate * jax.nn.sigmoid(GPT_OSS_SHARPNESS * gate) * (up + 1)
