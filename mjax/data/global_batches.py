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

    With data.conversations.rows=longest, a batch is as narrow as its longest row allows. `batch`
    and `names` are those of the rows.
    """

    def __init__(self, rows: ConversationDataset | BlendedDataset, cfg: Config):
        self.rows = rows
        self.batch = rows.batch
        self.names = rows.names
        self.max_documents = rows.max_documents
        self.padded = rows.padded
        self.seq_length = cfg.data.seq_length
        self.is_narrow = cfg.data.conversations.rows == "longest"
        shares_of_cp = 2 * cfg.mesh.cp if cfg.mesh.cp > 1 else 1
        self.cuts = cfg.mesh.tp * shares_of_cp

    def __len__(self) -> int:
        return len(self.rows)

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


def balanced(costs: Sequence[int] | np.ndarray) -> np.ndarray:
    """An order of rows in which halves cost about the same, their halves, too, and so on.

    So do the shares of 2, 4, 8, .. devices. The order knows no mesh, so a batch is the same on all.
    """
    costs = np.asarray(costs).tolist()
    return np.array(_halves(sorted(range(len(costs)), key=lambda row: -costs[row]), costs))


def _halves(rows: list[int], costs: list[int]) -> list[int]:
    """Deals rows, the dearest first, to the cheaper of two halves, and each half again."""
    if len(rows) % 2 or not rows:
        return rows
    halves, ahead = ([], []), 0  # what the first half costs more than the second
    for row in rows:
        number = int(ahead > 0)
        if 2 * len(halves[number]) == len(rows):
            number = 1 - number
        halves[number].append(row)
        ahead += costs[row] * (1 - 2 * number)
    return [row for half in halves for row in _halves(half, costs)]
