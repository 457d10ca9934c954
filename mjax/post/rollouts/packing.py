"""Transcripts as rows of a batch, packed as conversations are, and figures of rows read back.

Position t of a field speaks of the token after it, as labels do. Invariant: `taken` gives back what
`laid_out` was given, but for the first token of a transcript, which no position speaks of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mjax.data.base.best_fit import packed
from mjax.data.conversations.rows import document_fields, rows_of_documents
from mjax.objectives.fields import HostBatch
from mjax.post.rollouts.transcript import Transcript

# Values of each token of each transcript, [n] each.
TokenValues = Sequence[np.ndarray]


@dataclass(frozen=True)
class PackedTranscripts:
    """Transcripts in rows of `width`; `rows` has their numbers, in order."""

    transcripts: Sequence[Transcript]
    rows: list[list[int]]
    width: int

    def batch(self, **fields: TokenValues) -> HostBatch:
        """The fields of the rows, with further ones of values of each token."""
        more: Mapping = {"sampler_log_probs": [t.log_probs for t in self.transcripts], **fields}
        documents = [
            document_fields(t.ids, t.is_sampled)
            | {name: np.asarray(values[n][1:], np.float32) for name, values in more.items()}
            for n, t in enumerate(self.transcripts)
        ]
        rows = [[documents[n] for n in row] for row in self.rows]
        return rows_of_documents(rows, self.width) | self._experts()

    def _experts(self) -> HostBatch:
        """The experts that tokens went to, int16 [B, S, layers, k], if they are known; else -1."""
        known = [t.experts for t in self.transcripts if t.experts is not None]
        if not known:
            return {}
        found = np.full((len(self.rows), self.width, *known[0].shape[1:]), -1, np.int16)
        for row, numbers in zip(found, self.rows, strict=True):
            begin = 0
            for transcript in (self.transcripts[number] for number in numbers):
                end = begin + len(transcript.ids) - 1
                if transcript.experts is not None:
                    row[begin:end] = transcript.experts
                begin = end
        return {"experts": found}

    def taken(self, values: np.ndarray) -> list[np.ndarray]:
        """The values [B, S] of each token of each transcript, [n] each; 0 of the first."""
        found = [np.zeros(len(t.ids), values.dtype) for t in self.transcripts]
        for row, numbers in zip(values, self.rows, strict=True):
            begin = 0
            for number in numbers:
                end = begin + len(found[number]) - 1
                found[number][1:] = row[begin:end]
                begin = end
        return found


def packed_transcripts(
    transcripts: Sequence[Transcript], rows: int, width: int
) -> PackedTranscripts:
    """Transcripts in `rows` rows, or in the least multiple of them that best fit needs."""
    found = packed([(len(t.ids) - 1,) for t in transcripts], (width,))
    empty = -len(found) % rows
    return PackedTranscripts(transcripts, [*found, *([] for _ in range(empty))], width)
