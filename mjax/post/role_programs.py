"""Programs of roles: log-probabilities of a placed batch, in the places of its labels.

Unlike `train/token_scores.py` they leave columns where context parallelism put them, so that the
result is a field of the same batch.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.interop.adapters_of_run import without_adapters
from mjax.objectives.fields import Batch
from mjax.post.preferences.objective import sums_of_answers
from mjax.sharding.collectives import DATA_AXES
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State, split_batch
from mjax.train.token_scores import micro_batch_scores


def placed_log_probs(
    program: Program,
    state: State,
    batch: Batch,
    with_adapters: bool = True,
    temperature: float = 1.0,
) -> jax.Array:
    """log p of each label without dropout, fp32 [b, S/cp]; without adapters that of the base.

    Logits are divided by `temperature`.
    """
    model = program.model.for_evaluation(program.evaluation)
    model = replace(model, ctx=model.ctx.in_training(temperature=temperature))
    weights = model.load(state["params"], state.get("buffers", {}))
    if not with_adapters:
        weights = without_adapters(weights)

    def log_probs(micro_batch: Batch) -> jax.Array:
        return micro_batch_scores(model, weights, micro_batch, entropy=False).log_p

    found = jax.lax.map(log_probs, split_batch(batch, program.evaluation.micro_batches))
    return found.reshape(-1, found.shape[-1])


def divergence_of_mismatched(program: Program, state: State, batch: Batch) -> jax.Array:
    """kto's estimate, the same number fp32 [b] for each row: max(0, mean of log-ratios).

    The mean is over the answers of the global batch that belong to other prompts: their value is 0
    (arXiv 2402.01306, as TRL computes it).
    """
    log_probs = placed_log_probs(program, state, batch)
    answers, values = sums_of_answers(log_probs, batch, program.parallel)
    is_mismatched = (values == 0) & (answers.tokens > 0)
    total = jnp.sum(is_mismatched * answers.log_ratio)
    count = jnp.sum(is_mismatched)
    total = program.parallel.psum(total, *DATA_AXES)
    count = program.parallel.psum(count, *DATA_AXES)
    mean = total / jnp.maximum(count, 1)
    return jnp.full(len(log_probs), jnp.maximum(mean, 0))


@cache
def log_probs_kind(with_adapters: bool = True, temperature: float = 1.0) -> ProgramKind:
    """The program of `placed_log_probs` with these settings."""
    return ProgramKind(
        partial(placed_log_probs, with_adapters=with_adapters, temperature=temperature),
        inputs=lambda on: (on.weights, on.batch),
        outputs=lambda on: P(DATA_AXES, "cp"),
    )


LOG_PROBS, BASE_LOG_PROBS = log_probs_kind(), log_probs_kind(with_adapters=False)
MISMATCHED = ProgramKind(
    divergence_of_mismatched,
    inputs=lambda on: (on.weights, on.batch),
    outputs=lambda on: P(DATA_AXES),
)
