"""Stops a run whose held-out loss has ceased to fall (`train.early_stop`)."""

import math
from dataclasses import dataclass

RECORD = "early_stop"  # its key in the record of a checkpoint


@dataclass
class EarlyStop:
    """Counts evaluations in a row that were not better than the best before them.

    most: `train.early_stop`, or None: the run never stops for this.
    best: the lowest held-out loss.
    since: evaluations after that one.
    """

    most: int | None = None
    best: float = math.inf
    since: int = 0

    def see(self, loss: float | None) -> None:
        """Count an evaluation; one over no token (None) says nothing."""
        if loss is None:
            return
        if loss < self.best:  # NaN is not
            self.best, self.since = loss, 0
        else:
            self.since += 1

    @property
    def is_due(self) -> bool:
        """Whether the run has to stop."""
        return self.most is not None and self.since >= self.most

    def record(self) -> dict:
        """The count as a checkpoint keeps it, JSON."""
        if self.most is None or self.best == math.inf:
            return {}
        return {RECORD: {"best": self.best, "since": self.since}}

    def restore(self, record: dict) -> None:
        """Go on from what a checkpoint keeps."""
        found = record.get(RECORD, {})
        self.best, self.since = found.get("best", self.best), found.get("since", self.since)
