"""The experts of a mixture: from routed tokens to the weighted sum of what their experts make.

Each device runs every expert it holds on all tokens of its ep group. It weights the result by the
token's gate, which is zero where the expert was not chosen. That is exact and has static shapes,
but does E/k times the work that is needed.
"""

import jax
import jax.numpy as jnp

from mjax.config.model_schema import ModelConfig
from mjax.models.mlp import activated, gated
from mjax.models.router import Routing
from mjax.sharding.collectives import Parallel


def run_experts(
    x: jax.Array,
    routing: Routing,
    up: jax.Array,
    down: jax.Array,
    cfg: ModelConfig,
    parallel: Parallel,
) -> jax.Array:
    """[B, S/tp, D] -> [B, S/tp, D]: the sum of each token's experts, weighted by its gates.

    `up` [E/ep, D, (2,) F/tp] and `down` [E/ep, F/tp, D] are this device's shards.
    """
    chosen = jax.nn.one_hot(routing.experts, cfg.moe.num_experts, dtype=jnp.float32)
    gates = jnp.sum(chosen * routing.gates[..., None], -2)
    x, gates = to_experts(x, gates, parallel)

    @jax.checkpoint  # or every expert's activations of all tokens would be kept
    def add_expert(total: jax.Array, expert: tuple) -> tuple[jax.Array, None]:
        up, down, gate = expert
        gate = gate[..., None].astype(x.dtype)
        h = hidden(x, up, cfg) * gate
        y = jnp.tensordot(h, down, 1, preferred_element_type=jnp.float32)
        return total + y, None

    zero = jnp.zeros(x.shape, jnp.float32)
    total, _ = jax.lax.scan(add_expert, zero, (up, down, jnp.moveaxis(gates, 2, 0)))
    return from_experts(total.astype(x.dtype), parallel)


def to_experts(x: jax.Array, gates: jax.Array, parallel: Parallel) -> tuple[jax.Array, jax.Array]:
    """(x [B*ep, S, D] of the ep group, gates [B*ep, S, E/ep] of this device's experts).

    They are gathered from x [B, S/tp, D] and gates [B, S/tp, E].
    """
    x = parallel.gather_seq(x)
    x = parallel.all_gather(x, "ep", 0)
    gates = parallel.gather_seq(gates)
    gates = parallel.all_gather(gates, "ep", 0)
    return x, parallel.shard(gates, "ep", 2)


def from_experts(y: jax.Array, parallel: Parallel) -> jax.Array:
    """The sums over all experts and ffn columns, [B, S/tp, D].

    `y` [B*ep, S, D] are the sums over this device's experts and ffn columns.
    """
    y = parallel.reduce_scatter(y, "ep", 0)
    return parallel.scatter_seq(y)


def hidden(x: jax.Array, up: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The activations [..., F] of one expert, from x [..., D]."""
    h = jnp.tensordot(x, up, 1)
    if cfg.mlp_gated:
        return gated(h, cfg.hidden_act)
    return activated(h, None, cfg.hidden_act)


def reference(
    x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """The output [T, D] of a block for x [T, D] on one device, token by token, for tests."""

    def token(x: jax.Array) -> jax.Array:
        logits = router.T @ x
        best = jnp.argsort(-logits)[: cfg.moe.num_experts_per_tok]
        if cfg.moe.norm_topk_prob:
            gates = jax.nn.softmax(logits[best])
        else:
            gates = jax.nn.softmax(logits)[best]
        outputs = []
        for expert in best:
            h = hidden(x, up[expert], cfg)
            outputs.append(h @ down[expert])
        return gates @ jnp.stack(outputs)

    return jax.lax.map(token, x)
