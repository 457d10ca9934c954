"""Programs of roles: log-probabilities of a placed batch, in the places of its labels.

Unlike `train/token_scores.py` they leave columns where context parallelism put them, so that the
result is a field of the same batch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from mjax.interop.adapters_of_run import without_adapters
from mjax.objectives.fields import Batch
from mjax.sharding.collectives import DATA_AXES
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State
from mjax.train.token_scores import scores_of_micro_batches


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
    found = scores_of_micro_batches(program, model, weights, batch, entropy=False).log_p
    return found.reshape(-1, found.shape[-1])


@cache
def kind_of_tokens(function: Callable[..., Any], **settings: Any) -> ProgramKind:
    """The program of `function` with these settings, which gives [b, S/cp, ...] of a batch."""
    return ProgramKind(partial(function, **settings), outputs=lambda on: P(DATA_AXES, "cp"))


LOG_PROBS = kind_of_tokens(placed_log_probs)
BASE_LOG_PROBS = kind_of_tokens(placed_log_probs, with_adapters=False)
