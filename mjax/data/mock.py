"""Random tokens for speed tests: one document per sample, uniform over the vocabulary.

Invariant: sample i is a pure function of (seed, i). The mixer is splitmix64's finaliser.
"""

from collections.abc import Sequence

import numpy as np


class MockDataset:
    """`size` samples with the fields of `GPTDataset`, without a file."""

    max_documents, padded = 1, False

    def __init__(self, vocab_size: int, seq_length: int, size: int, seed: int):
        self.vocab_size, self.seq_length, self.size, self.seed = vocab_size, seq_length, size, seed

    def __len__(self) -> int:
        return self.size

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The numbers of samples `indices`."""
        return [f"data.mock ({i})" for i in indices]

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Samples `indices`, stacked to [B, S]."""
        length = self.seq_length + 1
        first = np.asarray(indices, np.uint64) * np.uint64(length)
        places = first[:, None] + np.arange(length, dtype=np.uint64)
        text = self._tokens(places)
        ones = np.ones((len(text), self.seq_length), np.int32)
        return {
            "tokens": np.ascontiguousarray(text[:, :-1]),
            "labels": np.ascontiguousarray(text[:, 1:]),
            "loss_mask": ones.astype(np.float32),
            "segment_ids": ones,
            "positions": ones * np.arange(self.seq_length, dtype=np.int32),
        }

    def _tokens(self, places: np.ndarray) -> np.ndarray:
        """int32: the tokens at these places of the stream, by splitmix64."""
        offset = np.uint64(self.seed * 0xD1B54A32D192ED03 % 2**64)
        x = places * np.uint64(0x9E3779B97F4A7C15)  # wraps, as intended
        x += offset
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        numbers = (x >> np.uint64(33)) % np.uint64(self.vocab_size)
        return numbers.astype(np.int32)
