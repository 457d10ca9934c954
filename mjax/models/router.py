"""The router of a mixture of experts: which experts a token goes to, and with what weight.

The router follows Switch Transformer (arXiv 2101.03961), Mixtral and Qwen3-MoE with softmax scores,
DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437) with groups and sigmoid scores. Its losses are
means over tokens or sequences of the global batch, so they depend on neither the mesh nor
micro-batches. Masked tokens count in them too, because they load the experts alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.config.model_schema import ModelConfig
from mjax.config.pattern import branches_of
from mjax.models.context import Tokens
from mjax.sharding.collectives import DATA_AXES, Parallel


class Router(NamedTuple):
    """The parameters of a router.

    weight: [D, E]. bias: [E] of the logits, or None.
    expert_bias: fp32 [E], added to the scores that choose, or None (Wang et al., arXiv 2408.15664).
    """

    weight: jax.Array
    bias: jax.Array | None = None
    expert_bias: jax.Array | None = None


class Routing(NamedTuple):
    """Where tokens [B, S] go, each to k of E experts.

    experts: int32 [B, S, k], different for a token. Number E is none: that pair goes nowhere.
    gates: fp32 [B, S, k], the weights of their outputs.
    probs: fp32 [B, S, E], the scores of all experts; their sum is 1. logits: fp32 [B, S, E].
    is_dropped: bool [B, S, k], pairs that go nowhere for lack of capacity; None: there are none.
    """

    experts: jax.Array
    gates: jax.Array
    probs: jax.Array
    logits: jax.Array
    is_dropped: jax.Array | None = None

    @property
    def chosen(self) -> jax.Array:
        """1 where an expert was chosen, else 0: fp32 [B, S, E]."""
        return _one_where(self.experts, self.probs.shape[-1])


def route(x: jax.Array, router: Router, cfg: ModelConfig) -> Routing:
    """The routing of x [B, S, D]. Equal scores go to the expert of the lower number."""
    logits = _logits(x, router)
    scores, probs = _scores(logits, cfg)
    ranked = jax.lax.stop_gradient(scores)
    if router.expert_bias is not None:
        ranked = ranked + jax.lax.stop_gradient(router.expert_bias)
    if cfg.moe.n_group > 1:
        ranked = _within_best_groups(ranked, cfg)
    _, experts = jax.lax.top_k(ranked, cfg.moe.num_experts_per_tok)
    return Routing(experts, gates_of(experts, logits, scores, cfg), probs, logits)


def balanced(routing: Routing, tokens: Tokens, cfg: ModelConfig, parallel: Parallel) -> Routing:
    """The routing with experts that take turns along each sequence, for benchmarks.

    A token's experts follow from its place in the global batch alone. Gates are those of the
    router.
    """
    count = cfg.moe.num_experts_per_tok
    columns = parallel.shard(tokens.columns, "tp", 0)
    first = count * (tokens.rows[:, None] + columns)
    turns = first[..., None] + jnp.arange(count)
    return rerouted(routing, turns % cfg.moe.num_experts, cfg)


def rerouted(
    routing: Routing,
    experts: jax.Array,
    cfg: ModelConfig,
) -> Routing:
    """The routing to other `experts` int32 [B, S, k], with the router's gates of those."""
    scores, _ = _scores(routing.logits, cfg)
    gates = gates_of(experts, routing.logits, scores, cfg)
    return routing._replace(experts=experts, gates=gates)


def counted(routing: Routing, expert_bias: jax.Array) -> Routing:
    """The routing; in a backward the cotangent of `expert_bias` [E] counts the choices of each.

    A choice has no gradient. So the place of one carries the counts through layers, pipelines and
    micro-batches, which add gradients up.
    """
    gates = _count_choices(routing.gates, expert_bias, routing.experts)
    return routing._replace(gates=gates)


@jax.custom_vjp
def _count_choices(gates: jax.Array, expert_bias: jax.Array, experts: jax.Array) -> jax.Array:
    return gates


def _count_choices_forward(
    gates: jax.Array, expert_bias: jax.Array, experts: jax.Array
) -> tuple[jax.Array, tuple]:
    return gates, (expert_bias, experts)


def _count_choices_backward(saved: tuple, d_gates: jax.Array) -> tuple:
    expert_bias, experts = saved
    chosen = _one_where(experts, len(expert_bias))
    return d_gates, chosen.sum((0, 1)), None


_count_choices.defvjp(_count_choices_forward, _count_choices_backward)


def gates_of(
    experts: jax.Array, logits: jax.Array, scores: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """The weights fp32 [B, S, k] of the outputs of `experts` int32 [B, S, k].

    `logits` and `scores` are fp32 [B, S, E]. Normalized softmax scores are those of the chosen
    logits.
    """
    moe = cfg.moe
    if moe.norm_topk_prob and moe.scoring_func == "softmax":
        chosen = jnp.take_along_axis(logits, experts, -1)
        gates = jax.nn.softmax(chosen, -1)
    else:
        gates = jnp.take_along_axis(scores, experts, -1)
        if moe.norm_topk_prob:
            gates = _normalized(gates)
    return gates * moe.routed_scaling_factor


def _normalized(scores: jax.Array) -> jax.Array:
    """Scores divided by their sum along the last axis."""
    total = scores.sum(-1, keepdims=True)
    return scores / (total + 1e-20)


def _logits(x: jax.Array, router: Router) -> jax.Array:
    """fp32 [B, S, E] of x [B, S, D]."""
    logits = jnp.einsum(
        "bsd,de->bse",
        x.astype(jnp.float32),
        router.weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if router.bias is None:
        return logits
    return logits + router.bias.astype(jnp.float32)


def _scores(logits: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """(the scores of all experts, the same divided by their sum), fp32 [B, S, E]."""
    if cfg.moe.scoring_func == "softmax":
        probs = jax.nn.softmax(logits, -1)
        return probs, probs
    scores = jax.nn.sigmoid(logits)
    return scores, _normalized(scores)


def _within_best_groups(ranked: jax.Array, cfg: ModelConfig) -> jax.Array:
    """`ranked` [B, S, E] with minus infinity outside each token's best groups.

    A group is a range of experts. Its score is the sum of its `group_score_topk` best ones.
    """
    groups = cfg.moe.n_group
    of_groups = ranked.reshape(*ranked.shape[:-1], groups, -1)
    best, _ = jax.lax.top_k(of_groups, cfg.moe.group_score_topk)
    group_scores = best.sum(-1)
    _, chosen = jax.lax.top_k(group_scores, cfg.moe.topk_group)
    is_chosen = _one_where(chosen, groups) > 0
    within = jnp.where(is_chosen[..., None], of_groups, -jnp.inf)
    return within.reshape(ranked.shape)


def _one_where(numbers: jax.Array, count: int) -> jax.Array:
    """fp32 [.., count] with 1 at each of int32 [.., k] numbers, else 0."""
    rows = jax.nn.one_hot(numbers, count, dtype=jnp.float32)
    return rows.sum(-2)


# ---- statistics ----------------------------------------------------------------------------------


def balance_loss(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the balance loss, summed over its sequences: fp32 [].

    The loss is coef * E * sum_e f_e * P_e. f_e is the fraction of the choices that went to expert
    e, P_e the mean probability of e, each over a sequence (DeepSeek-V3; Megatron-LM's seq_aux_loss)
    or over the global batch (global_aux_loss). Balanced experts have coef. The choices are those of
    the best scores, whatever groups and expert bias make of them, as in both.

    The routing is of [B, S/cp/tp] tokens. Shares add up over all devices. f_e is constant and known
    before the backward, so with several micro-batches the loss over the global batch would need all
    choices before the first gradient: a second forward pass. The rule
    `global_balance_needs_one_micro_batch` refuses that.
    """
    moe, probs = cfg.moe, routing.probs
    rows, columns, experts = probs.shape
    constant = jax.lax.stop_gradient(probs)
    _, best = jax.lax.top_k(constant, moe.num_experts_per_tok)
    chosen = _one_where(best, experts)
    sequence = columns * parallel.size("cp", "tp")
    tokens = sequence
    counts = parallel.psum(chosen.sum(1), "cp", "tp")  # of all tokens of a sequence
    if moe.router_aux_loss_over == "global_batch":
        tokens *= rows * parallel.size(*DATA_AXES)
        counts = parallel.psum(counts.sum(0), *DATA_AXES)
    choices = tokens * moe.num_experts_per_tok
    fractions = counts / choices
    weighted = fractions * probs.sum(1)
    mean = jnp.sum(weighted) / sequence
    return moe.router_aux_loss_coef * experts * mean


def z_loss(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of coef * mean(logsumexp(logits)^2), summed over its sequences: fp32 [].

    It keeps logits small (ST-MoE, arXiv 2202.08906).
    """
    sizes = jax.nn.logsumexp(routing.logits, -1)
    mean = _mean_of_sequences(jnp.square(sizes), parallel)
    return cfg.moe.router_z_loss_coef * mean


def entropy(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the mean entropy of probabilities over E blocks, in nats: fp32 [].

    It is summed over the device's sequences, and moves nothing.
    """
    probs = jax.lax.stop_gradient(routing.probs)
    terms = jax.scipy.special.entr(probs)
    return _mean_of_sequences(terms.sum(-1), parallel) / _expert_blocks(cfg)


def dropped_share(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the part of all pairs that is dropped, a mean over E blocks: fp32 [].

    It is summed over the device's sequences.
    """
    if routing.is_dropped is None:
        return jnp.float32(0)
    of_tokens = jnp.mean(routing.is_dropped, -1, dtype=jnp.float32)
    return _mean_of_sequences(of_tokens, parallel) / _expert_blocks(cfg)


def _expert_blocks(cfg: ModelConfig) -> int:
    """The layers with experts, those of multi-token prediction among them."""
    kinds = *cfg.layer_kinds, *cfg.prediction_kinds
    return sum("E" in branches_of(kind) for kind in kinds)


def _mean_of_sequences(x: jax.Array, parallel: Parallel) -> jax.Array:
    """The mean over its tokens of each sequence of x [B, S/cp/tp], summed: a share, fp32 []."""
    tokens = x.shape[1] * parallel.size("cp", "tp")
    return jnp.sum(x) / tokens
