"""Rows that hold several texts with their images and sounds, packed by what they cost.

A text costs its tokens and its items of each modality; a row has room for `data.seq_length` tokens
and for as many items as the model's towers. Texts are packed once, the longest first, each into the
row with the least room that takes it (best fit decreasing; Johnson 1974). Each is a document of its
own: it sees no other, and its positions begin at 0. Invariant: row n is a pure function of (files,
settings, seed, n), and every text is in one row.
"""

from collections.abc import Sequence

import numpy as np

from mjax.data.base.best_fit import packed
from mjax.data.corpus.gpt import FieldArrays
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.sentences.labelled import shuffled
from mjax.models.towers.modalities import MODALITIES

# The fields of a text that are copied to its place in a row.
_OF_TOKENS = "tokens", "labels", "loss_mask", "positions"


class PackedTexts:
    """`size` rows (None: an epoch) of an epoch of `texts`.

    `batch(indices)` gives that one's fields. `segment_ids` number the texts of a row from 1 on, and
    `row_label` is -1 where none of them can be used.
    """

    padded = False

    def __init__(self, texts: ImageTextDataset, size: int | None):
        self.texts = texts
        cfg, model = texts.cfg, texts.cfg.model
        room = cfg.data.seq_length, *(model.tower(name).max_items for name in model.modalities)
        costs = [
            (len(line.ids) - 1, *(len(line.items[name]) for name in model.modalities))
            for line in texts.lines
        ]
        self.rows = packed(costs, room)
        self.size = len(self.rows) if size is None else size
        self.seed = cfg.run.seed

    def __len__(self) -> int:
        return self.size

    @property
    def max_documents(self) -> int:
        """The most texts of a row, and padding."""
        return 1 + max(map(len, self.rows))

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The files of rows `indices`, with what is wrong with them, if anything."""
        chosen = [self.rows[n] for n in shuffled(indices, len(self.rows), self.seed)]
        described, lines = self.texts.skipped.described, self.texts.lines
        return [", ".join(described(lines[n].names) for n in row) for row in chosen]

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Rows `indices`, stacked."""
        chosen = [self.rows[n] for n in shuffled(indices, len(self.rows), self.seed)]
        texts = self.texts.rows_of([self.texts.lines[n] for row in chosen for n in row])
        whole = {
            name: np.zeros((len(chosen), *of.shape[1:]), of.dtype) for name, of in texts.items()
        }
        whole["row_label"] -= 1
        number = 0
        for row, members in enumerate(chosen):
            place, counts = 0, dict.fromkeys(self.texts.readers, 0)
            for document, member in enumerate(members, 1):
                if texts["row_label"][number] >= 0:
                    length = int(texts["segment_ids"][number].sum())
                    columns = slice(place, place + length)
                    for name in _OF_TOKENS:
                        whole[name][row, columns] = texts[name][number, :length]
                    whole["segment_ids"][row, columns] = document
                    whole["row_label"][row] = 0
                    place += length
                    for name, first in counts.items():
                        more = len(self.texts.lines[member].items[name])
                        field = MODALITIES[name].field
                        whole[field][row, first : first + more] = texts[field][number, :more]
                        counts[name] += more
                number += 1
        return whole
