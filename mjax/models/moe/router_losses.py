"""The losses of a router and what the log says of it, from the routing of a layer.

Each is a mean over the tokens of every sequence of the global batch, so it depends on neither the
mesh nor micro-batches. Masked tokens count in it too, because they load the experts alike; padding
does not if `model.moe.skip_padding` says so, and never in the balance loss of all layers together.
A sequence of padding alone has 0.
"""

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import roles_of
from mjax.config.schema.model import ModelConfig
from mjax.models.base.streams import Activation, WithLoads
from mjax.models.moe.router import Routing, one_where
from mjax.sharding.collectives import DATA_AXES, Parallel


def balance_loss(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of a layer's balance loss, summed over its sequences: fp32 []."""
    return balance_of_loads(expert_loads(routing, cfg), cfg, parallel)


def expert_loads(routing: Routing, cfg: ModelConfig) -> jax.Array:
    """Choices of each expert, sums of its probabilities, and tokens: fp32 [3, B, E].

    They are of this device's tokens of each sequence; the loads of layers add up. The choices are
    those of the best scores, whatever groups and expert bias make of them, as in Megatron-LM,
    DeepSeek-V3 and transformers. They are constant.
    """
    probs = routing.probs
    constant = jax.lax.stop_gradient(probs)
    _, best = jax.lax.top_k(constant, cfg.moe.num_experts_per_tok)
    chosen = one_where(best, probs.shape[-1])
    of_tokens = chosen, probs, jnp.ones_like(constant)
    sums = [routing.of_text(values).sum(1) for values in of_tokens]
    return jnp.stack(sums)


def balance_of_loads(loads: jax.Array, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the balance loss, summed over its sequences: fp32 [].

    The loss is coef * E * sum_e f_e * P_e, each over a sequence (DeepSeek-V3; Megatron-LM's
    seq_aux_loss) or over the global batch (global_aux_loss). P_e is the mean probability of expert
    e. f_e is the part of the choices that went to it, or with `mean_over_layers` of the tokens:
    then they sum to k, and `loads` are those of all layers. Balanced experts have coef, or k times
    that.

    Shares add up over all devices. f_e is constant and known before the backward, so with several
    micro-batches the loss over the global batch would need all choices before the first gradient:
    a second forward pass. The rule `global_balance_needs_one_micro_batch` refuses that.
    """
    moe = cfg.moe
    probs = loads[1]
    constant = jax.lax.stop_gradient(loads[::2])
    constant = parallel.psum(constant, "cp", "tp")  # of all tokens of a sequence
    weight = 1
    if moe.router_aux_loss_over == "global_batch":
        constant = parallel.psum(constant.sum(1), *DATA_AXES)
        weight = len(probs) * parallel.size(*DATA_AXES)  # sums are divided by the sequences
    counts, tokens = constant
    tokens = jnp.maximum(tokens, 1)
    fractions = counts / tokens
    if not averages_layers(cfg):
        fractions = fractions / moe.num_experts_per_tok
    means = weight * probs / tokens
    total = jnp.sum(fractions * means)
    return moe.router_aux_loss_coef * moe.num_experts * total


def averages_layers(cfg: ModelConfig) -> bool:
    """Whether the balance loss is one of all layers together, as transformers has it."""
    return cfg.moe.router_aux_loss_type == "mean_over_layers"


def beside_loads(x: Activation, rows: int, cfg: ModelConfig) -> Activation:
    """The input of the first layer, with the loads of no layer yet where a loss averages layers."""
    if cfg.moe.router_aux_loss_coef == 0 or not averages_layers(cfg):
        return x
    shape = 3, rows, cfg.moe.num_experts
    return WithLoads(x, jnp.zeros(shape, jnp.float32))


def balance_of_layers(
    x: Activation, cfg: ModelConfig, parallel: Parallel
) -> tuple[Activation, dict[str, jax.Array]]:
    """(the output of the last layer alone, the balance loss of the loads that came beside it)."""
    if not isinstance(x, WithLoads):
        return x, {}
    return x.x, {"aux_loss": balance_of_loads(x.loads, cfg, parallel)}


def z_loss(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of coef * mean(logsumexp(logits)^2), summed over its sequences: fp32 [].

    It keeps logits small (ST-MoE, arXiv 2202.08906).
    """
    sizes = jax.nn.logsumexp(routing.logits, -1)
    squares = jnp.square(sizes)
    mean = _mean_of_sequences(squares, routing, parallel)
    return cfg.moe.router_z_loss_coef * mean


def entropy(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the mean entropy of probabilities over E blocks, in nats: fp32 [].

    It is summed over the device's sequences, and moves nothing.
    """
    probs = jax.lax.stop_gradient(routing.probs)
    terms = jax.scipy.special.entr(probs)
    of_tokens = terms.sum(-1)
    mean = _mean_of_sequences(of_tokens, routing, parallel)
    return mean / _expert_blocks(cfg)


def dropped_share(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the part of all pairs that is dropped, a mean over E blocks: fp32 [].

    It is summed over the device's sequences.
    """
    if routing.is_dropped is None:
        return jnp.float32(0)
    of_tokens = jnp.mean(routing.is_dropped, -1, dtype=jnp.float32)
    mean = _mean_of_sequences(of_tokens, routing, parallel)
    return mean / _expert_blocks(cfg)


def gathered_share(
    gathered: jax.Array, routing: Routing, cfg: ModelConfig, parallel: Parallel
) -> jax.Array:
    """This device's share of the part of exchanges that fell back to the gather: fp32 [].

    `gathered` is 1 where this block's did. The mean is over E blocks and sequences, as above.
    """
    rows = len(routing.experts) / (parallel.cp * parallel.tp)
    return gathered * rows / _expert_blocks(cfg)


def _expert_blocks(cfg: ModelConfig) -> int:
    """The layers with experts, those of multi-token prediction among them."""
    kinds = *cfg.layer_kinds, *cfg.prediction_kinds
    return sum("experts" in roles_of(kind) for kind in kinds)


def _mean_of_sequences(x: jax.Array, routing: Routing, parallel: Parallel) -> jax.Array:
    """The mean over its tokens of each sequence of x [B, S/cp/tp], summed: a share, fp32 []."""
    x = routing.of_text(x)
    of_sequences = x.sum(1)
    lengths = _text_of_sequences(routing, parallel)
    means = of_sequences / lengths
    return jnp.sum(means)


def _text_of_sequences(routing: Routing, parallel: Parallel) -> jax.Array:
    """The tokens of each sequence that count, over cp and tp, or 1 where none does: fp32 [B]."""
    rows, columns, _ = routing.probs.shape
    if routing.is_text is None:
        length = columns * parallel.size("cp", "tp")
        return jnp.full(rows, length, jnp.float32)
    is_text = routing.is_text.astype(jnp.float32)
    mine = is_text.sum(1)
    lengths = parallel.psum(mine, "cp", "tp")
    return jnp.maximum(lengths, 1)
