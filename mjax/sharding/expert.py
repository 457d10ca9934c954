"""Token exchange over the expert axis, without drops and with static shapes.

Every device of an ep group gets all tokens of the group and the gates of the experts it holds; it
returns a partial sum for each token, and a reduce-scatter gives each device the sum of its own.
Invariant: what comes back is what one device with all experts would compute; the transposes of the
collectives are the backward pass (share convention, `sharding/collectives.py`). Volume grows with
ep, so this suits ep up to about num_experts_per_tok ("ring of experts" in MaxText, grug's ep_ring).
"""

import jax

from mjax.sharding.collectives import Parallel


def to_experts(x: jax.Array, gates: jax.Array, parallel: Parallel) -> tuple[jax.Array, jax.Array]:
    """x [B, S/tp, D] and gates [B, S/tp, E] -> [B*ep, S, D] and [B*ep, S, E/ep] of own experts."""
    x = parallel.gather(parallel.gather_seq(x), "ep", 0)
    gates = parallel.gather(parallel.gather_seq(gates), "ep", 0)
    return x, parallel.shard(gates, "ep", 2)


def from_experts(y: jax.Array, parallel: Parallel) -> jax.Array:
    """Partial sums [B*ep, S, D] over own experts and ffn columns -> whole sums [B, S/tp, D]."""
    return parallel.scatter_seq(parallel.scatter(y, "ep", 0))
