"""Which checkpoints of a run stay when a newer one is saved, as policies of orbax."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

LossOf = Callable[[int], float | None]  # step -> its held-out loss, or None


class SavedStep(NamedTuple):
    """A step on disk, as these policies look at it."""

    step: int


def retention(
    keep: int, keep_every: int | None, keep_best: int, loss_of: LossOf
) -> AnyPreservationPolicy:
    """Keep the newest `keep` steps, those `keep_every` divides, the `keep_best` of lowest loss."""
    multiples = [EveryNSteps(keep_every)] if keep_every else []
    best = [LowestLoss(keep_best, loss_of)] if keep_best else []
    return AnyPreservationPolicy([LatestN(keep), *multiples, *best])


@dataclass(frozen=True)
class LowestLoss:
    """The `count` steps of lowest loss; a step without a finite loss is none of them."""

    count: int
    loss_of: LossOf

    def should_preserve(self, checkpoints: Sequence, *, context: object) -> list[bool]:
        losses = {c.step: self.loss_of(c.step) for c in checkpoints}
        known = [s for s, loss in losses.items() if loss is not None and math.isfinite(loss)]
        best = sorted(known, key=losses.get)[: self.count]
        return [c.step in best for c in checkpoints]
