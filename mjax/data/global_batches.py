"""Global batches of rows of conversations, whose cost of attention devices share evenly.

Invariant: a global batch has the same rows in the same order on every mesh.
"""

from collections.abc import Sequence

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.blend import BlendedDataset
from mjax.data.conversations.rows import ConversationDataset
from mjax.data.corpus.gpt import FieldArrays


class GlobalBatches:
    """Rows whose order in a global batch spreads attention's cost evenly over devices.

    With data.conversations.rows=longest, a batch is as narrow as its longest row allows.
    """

    def __init__(self, rows: ConversationDataset | BlendedDataset, cfg: Config):
        self.rows, self.seq_length = rows, cfg.data.seq_length
        self.is_narrow = cfg.data.conversations.rows == "longest"
        self.cuts = cfg.mesh.tp * (2 * cfg.mesh.cp if cfg.mesh.cp > 1 else 1)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Rows `indices` in this order, of the full width."""
        return self.rows.batch(indices)

    def global_batch(self, samples: np.ndarray, mine: slice) -> FieldArrays:
        """The part `mine` of the global batch of these rows, in an order that `balanced` gives."""
        sizes = self.rows.sizes(samples)
        batch = self.rows.batch(samples[balanced(sizes[:, 1])][mine])
        width = self._width(sizes[:, 0].max())
        return {name: array[:, :width] for name, array in batch.items()}

    def _width(self, longest: int) -> int:
        """The full width, halved while the longest row fits: each width is compiled once."""
        width = self.seq_length
        while self.is_narrow and longest <= width // 2 and width % (16 * self.cuts) == 0:
            width //= 2
        return width

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The files and lines of rows `indices`."""
        return self.rows.names(indices)

    @property
    def max_documents(self) -> int:
        return self.rows.max_documents

    @property
    def padded(self) -> bool:
        return self.rows.padded


def balanced(costs: Sequence[int] | np.ndarray) -> np.ndarray:
    """An order of rows in which halves cost about the same, their halves, too, and so on.

    So do the shares of as many devices as divide the rows, best where that is a power of two. The
    order knows no mesh, so a batch is the same on all.
    """
    costs = np.asarray(costs)
    return np.array(_dealt(np.argsort(-costs, kind="stable").tolist(), costs.tolist()), np.int64)


def _dealt(rows: list[int], costs: list[int]) -> list[int]:
    """Deals rows, the dearest first, to equal groups, each to the cheapest with room."""
    count = len(rows)
    parts = next((n for n in range(2, count) if count % n == 0), count)
    groups: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for row in rows:
        free = [k for k in range(parts) if len(groups[k]) < count // parts]
        cheapest = min(free, key=totals.__getitem__)
        groups[cheapest].append(row)
        totals[cheapest] += costs[row]
    if parts == count:
        return [row for group in groups for row in group]
    return [row for group in groups for row in _dealt(group, costs)]
