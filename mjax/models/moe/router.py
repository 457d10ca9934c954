"""The router of a mixture of experts: which experts a token goes to, and with what weight.

The router follows Switch Transformer (arXiv 2101.03961), Mixtral and Qwen3-MoE with softmax scores,
DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437) with groups and sigmoid scores. Its losses are in
`router_losses.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import roles_of
from mjax.config.schema.model import ModelConfig
from mjax.kernels.matmul.exact import multiply_exactly
from mjax.models.base.context import Tokens
from mjax.sharding.collectives import Parallel


class Router(NamedTuple):
    """The parameters of a router.

    weight: [D, E]. bias: [E] of the logits, or None.
    expert_bias: fp32 [E], added to the scores that choose, or None (Wang et al., arXiv 2408.15664).
    """

    weight: jax.Array
    bias: jax.Array | None = None
    expert_bias: jax.Array | None = None


class Routing(NamedTuple):
    """Destinations of tokens [B, S], each of which goes to k of E experts.

    experts: int32 [B, S, k], different for a token. Number E is none: that pair goes nowhere.
    gates: fp32 [B, S, k], the weights of their outputs.
    probs: fp32 [B, S, E], the scores of all experts; their sum is 1. logits: fp32 [B, S, E].
    is_dropped: bool [B, S, k], pairs that go nowhere for lack of capacity; None: there are none.
    is_text: bool [B, S], tokens that are not padding; None: all count as text.
    """

    experts: jax.Array
    gates: jax.Array
    probs: jax.Array
    logits: jax.Array
    is_dropped: jax.Array | None = None
    is_text: jax.Array | None = None

    @property
    def chosen(self) -> jax.Array:
        """1 where an expert was chosen, else 0: fp32 [B, S, E]."""
        return one_where(self.experts, self.probs.shape[-1])

    def of_text(self, values: jax.Array) -> jax.Array:
        """Values [B, S, ..] of tokens, 0 for padding."""
        if self.is_text is None:
            return values
        ones = (1,) * (values.ndim - 2)
        is_text = self.is_text.reshape(*values.shape[:2], *ones)
        return jnp.where(is_text, values, 0)


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
    columns = parallel.shard_seq(tokens.columns, 0)
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


def replayed(
    routing: Routing, tokens: Tokens, layer: jax.Array | int, cfg: ModelConfig, parallel: Parallel
) -> Routing:
    """The routing of layer `layer` to the experts that `Tokens.experts` names, where it does.

    Gates are those of the router, with their gradients (router replay, arXiv 2510.11370).
    """
    if tokens.experts is None:
        return routing
    ranks = jnp.cumsum(jnp.array(["experts" in roles_of(kind) for kind in cfg.layer_kinds])) - 1
    given = parallel.shard_seq(tokens.experts[:, :, ranks[layer]]).astype(jnp.int32)
    return rerouted(routing, jnp.where(given < 0, routing.experts, given), cfg)


def expert_layer_count(cfg: ModelConfig) -> int:
    """The layers with experts, without those of multi-token prediction."""
    return sum("experts" in roles_of(kind) for kind in cfg.layer_kinds)


def without_padding(routing: Routing, tokens: Tokens, parallel: Parallel) -> Routing:
    """The routing in which tokens of segment 0 go nowhere and count in no loss."""
    routing = padding_marked(routing, tokens, parallel)
    if routing.is_text is None:
        return routing
    nowhere = routing.probs.shape[-1]
    experts = jnp.where(routing.is_text[..., None], routing.experts, nowhere)
    return routing._replace(experts=experts)


def padding_marked(routing: Routing, tokens: Tokens, parallel: Parallel) -> Routing:
    """The routing in which tokens of segment 0 count in no loss."""
    if tokens.segments is None:
        return routing
    return routing._replace(is_text=parallel.shard_seq(tokens.segments) != 0)


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
    chosen = one_where(experts, len(expert_bias))
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
        gates = jax.nn.softmax(_of_experts(logits, experts), -1)
    else:
        gates = _of_experts(scores, experts)
        if moe.norm_topk_prob:
            gates = _normalized(gates)
    return gates * moe.routed_scaling_factor


def _of_experts(values: jax.Array, experts: jax.Array) -> jax.Array:
    """The entries [B, S, k] of fp32 [B, S, E] at each of `experts`.

    It compares instead of looking up: the transpose of a lookup would add one entry at a time.
    """
    count = values.shape[-1]
    numbers = jnp.arange(count)
    is_one = experts[..., None] == numbers
    of_all = values[..., None, :]
    return jnp.sum(of_all, -1, where=is_one)


def _normalized(scores: jax.Array) -> jax.Array:
    """Scores divided by their sum along the last axis."""
    total = scores.sum(-1, keepdims=True)
    return scores / (total + 1e-20)


def _logits(x: jax.Array, router: Router) -> jax.Array:
    """fp32 [B, S, E] of x [B, S, D]."""
    logits = multiply_exactly(x, router.weight)
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
    is_chosen = one_where(chosen, groups) > 0
    within = jnp.where(is_chosen[..., None], of_groups, -jnp.inf)
    return within.reshape(ranked.shape)


def one_where(numbers: jax.Array, count: int) -> jax.Array:
    """fp32 [.., count] with 1 at each of int32 [.., k] numbers, else 0."""
    rows = jax.nn.one_hot(numbers, count, dtype=jnp.float32)
    return rows.sum(-2)
