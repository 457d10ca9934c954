"""Rows that hold several texts with their images and sounds, packed by what they cost.

A text costs its tokens and its items of each modality; a row has room for `data.seq_length` tokens
and for as many items as the model's towers. Texts are packed once, the longest first, each into the
row with the least room that takes it (best fit decreasing; Johnson 1974). Each is a document of its
own: it sees no other, and its positions begin at 0. Invariant: row n is a pure function of (files,
settings, seed, n), and every text is in one row.
"""

from collections.abc import Sequence

import numpy as np

from mjax.config.schema.vision import MERGED, VisionConfig
from mjax.data.base.best_fit import packed
from mjax.data.corpus.gpt import FieldArrays
from mjax.data.multimodal.image_text import ImageTextDataset, TokenizedSample
from mjax.data.multimodal.pictures import tokens_of_picture
from mjax.data.sentences.labelled import shuffled
from mjax.errors import UserError
from mjax.models.towers.image_places import FRAME
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
        film = next((line.videos[0].name for line in texts.lines if line.videos), None)
        if film is not None:
            raise UserError(
                f"data.images.packed: what {film} costs is known once it is decoded; leave it out "
                "for texts with videos"
            )
        if model.vision.is_packed:
            room = cfg.data.seq_length, model.vision.max_patches
            costs = [_cost_of_packed(line, model.vision) for line in texts.lines]
        else:
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

    @property
    def max_images(self) -> int:
        """The most images of a row, and padding."""
        counts = [len(line.items.get("vision", ())) for line in self.texts.lines]
        return 1 + max(sum(counts[n] for n in row) for row in self.rows)

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
        if "vision_features" in whole:
            whole["vision_features"] -= 1
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
                    if "patch_places" in whole:
                        _add_packed(whole, texts, row, number, columns)
                        counts = {}
                    for name, first in counts.items():
                        more = len(self.texts.lines[member].items[name])
                        field = MODALITIES[name].field
                        whole[field][row, first : first + more] = texts[field][number, :more]
                        counts[name] += more
                number += 1
        return whole


def _cost_of_packed(line: TokenizedSample, vision: VisionConfig) -> tuple[int, int]:
    """The tokens and the patches of a line, by the sizes of its pictures."""
    tokens = [tokens_of_picture(item, vision) for item in line.items["vision"]]
    return len(line.ids) - 1 + sum(tokens) - len(tokens), MERGED * sum(tokens)


def _add_packed(
    whole: FieldArrays, texts: FieldArrays, row: int, number: int, columns: slice
) -> None:
    """Add the packed images of a text to a row, in which it stands at `columns`."""
    places, own = whole["patch_places"][row], texts["patch_places"][number]
    first, count = (int((of[:, FRAME] > 0).sum()) for of in (places, own))
    before = places[:, FRAME:].max(0)
    here = slice(first, first + count)
    places[here] = own[:count]
    places[here, FRAME:] += before
    whole["patches"][row, 0, here] = texts["patches"][number, 0, :count]
    length = columns.stop - columns.start
    features = texts["vision_features"][number, :length]
    moved = np.where(features >= 0, features + first // MERGED, -1)
    whole["vision_features"][row, columns] = moved
    whole["position_axes"][row, columns] = texts["position_axes"][number, :length]
