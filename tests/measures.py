"""What laws compare of a trainer on two meshes."""

import jax
import numpy as np

from mjax.train import Trainer
from mjax.train.step import LOSSES


def measured(trainer: Trainer, batch: dict[str, np.ndarray]) -> dict:
    """Losses and gradients of a step, and all measures of held-out data, on the host."""
    _, norm, gradients = trainer.grads(batch)
    sums, counts = trainer.run_program(LOSSES, batch)
    found = {"norm": norm, "gradients": gradients, "sums": sums, "counts": counts}
    return jax.device_get(found)
