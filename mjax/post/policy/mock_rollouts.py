"""Rollouts with random fields in rows of random tokens, for speed tests and the proof of meshes."""

import numpy as np

from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import SINGLE
from mjax.post.policy.policy_losses import ADVANTAGES, OLD, REFERENCE, SAMPLER
from mjax.post.preferences.mock_answers import mock_answers

RANDOM = ADVANTAGES, "values", "returns"


def mock_rollouts(batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
    """The fields of rollouts, and those of a critic."""
    answers = mock_answers(batch, SINGLE, seed, step, rows)
    fields = {name: answers[name] for name in ("segment_ids", "positions", "loss_mask")}
    shape = fields["loss_mask"].shape
    for name in (*RANDOM, OLD, SAMPLER, REFERENCE):
        fields[name] = np.zeros(shape, np.float32)
    for place, row in enumerate(rows):
        rng = np.random.default_rng((seed, step, int(row), 1))
        drawn = np.flatnonzero(fields["loss_mask"][place])
        old = rng.normal(-5.5, 0.4, len(drawn))
        for name, spread in ((OLD, 0), (SAMPLER, 0.1), (REFERENCE, 0.5)):
            fields[name][place, drawn] = old + spread * rng.normal(size=len(drawn))
        for name in RANDOM:
            fields[name][place, drawn] = rng.normal(size=len(drawn))
    return fields
