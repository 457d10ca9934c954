"""The divergence that kto subtracts, estimated from answers beside prompts that are not theirs."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.objectives.fields import Batch
from mjax.post.base.role_programs import placed_log_probs
from mjax.post.preferences.objective import sums_of_answers
from mjax.sharding.collectives import DATA_AXES
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State


def kto_divergence(program: Program, state: State, batch: Batch) -> jax.Array:
    """max(0, mean of log(p / p_ref)), fp32 [b]: the same number for each row.

    The mean is over the answers of the global batch that stand beside prompts that are not theirs.
    Their value in "answer_values" is 0 (arXiv 2402.01306, as TRL computes it).
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


KTO_DIVERGENCE = ProgramKind(
    kto_divergence,
    outputs=lambda on: P(DATA_AXES),
)
