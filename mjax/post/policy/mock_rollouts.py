"""Rollouts with random fields in rows of random tokens, for speed tests and the proof of meshes."""

import numpy as np

from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import SINGLE
from mjax.post.policy.policy_losses import ADVANTAGES, OLD, REFERENCE, SAMPLER
from mjax.post.preferences.mock_answers import mock_answers


def mock_rollouts(batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
    """The fields of rollouts, and a critic's; the second half of each answer was not drawn."""
    answers = mock_answers(batch, SINGLE, seed, step, rows)
    fields = {name: answers[name] for name in ("segment_ids", "positions", "loss_mask")}
    names = ADVANTAGES, SAMPLER, OLD, REFERENCE, "values", "returns"
    fields |= {name: np.zeros(fields["loss_mask"].shape, np.float32) for name in names}
    for place, row in enumerate(rows):
        rng = np.random.default_rng((seed, step, int(row), 1))
        drawn = np.flatnonzero(fields["loss_mask"][place])
        of_trainer = rng.normal(-5.5, 0.4, len(drawn))
        fields[OLD][place, drawn] = of_trainer
        for name, spread in ((SAMPLER, 0.1), (REFERENCE, 0.5)):
            fields[name][place, drawn] = of_trainer + spread * rng.normal(size=len(drawn))
        for name in (ADVANTAGES, "values", "returns"):
            fields[name][place, drawn] = rng.normal(size=len(drawn))
    return fields
