"""Blending corpora by weight, in Megatron-LM's exact order.

At step i the dataset with the largest deficit, weight * max(i, 1) - taken, gives its next sample;
ties go to the first. Invariant: `blend_indices` equals that loop bit for bit, in double precision.
Source: Megatron-LM `helpers.cpp` (`build_blending_indices`), `blended_dataset.py`.

Weights may change within a run. The loop then starts anew and each dataset goes on with its next
sample. Datasets then repeat epoch by epoch (`Epochs`), whatever the run's length. So
invariant: what is drawn up to a step depends on no weights that begin after it.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mjax.errors import UserError

SURPLUS = 0.005  # share of spare samples built per dataset, Megatron's


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights that sum to one, computed as Megatron does."""
    w = np.asarray(weights, np.float64)
    if w.ndim != 1 or len(w) == 0 or not np.isfinite(w).all() or (w <= 0).any():
        raise UserError(f"data.weights {list(weights)}: give numbers > 0, one per dataset")
    if len(w) > 32767:
        raise UserError(f"data.paths: {len(w)} datasets; a blend holds at most 32767")
    return (w / w.sum()).tolist()


def sizes_per_dataset(weights: Sequence[float], size: int, surplus: float = 0.0) -> list[int]:
    """Samples to build of each dataset for a blend of `size` (normalized weights)."""
    return [math.ceil(math.ceil(size * w) * (1 + surplus)) for w in weights]


def blend_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset gives sample i (int16 [size]), and its how-manieth (int64 [size]).

    Weights are used as they are if they sum to one, else normalized. The loop is sequential, but
    it forgets where it started: cut into chunks that run side by side from guessed counts, every
    chunk soon ends as it should. Chunks are rerun until each starts where its predecessor ended;
    chunk 0 starts right, so then all are right, whatever the guesses were.
    """
    w = np.asarray(normalize(weights))
    if abs(float(np.sum(weights)) - 1) < 1e-6:
        w = np.asarray(weights, np.float64)
    length = min(max(1024, math.isqrt(size)), max(size, 1))
    chunks = -(-size // length)
    picks = np.empty((length, chunks), np.int16)
    start = _guess(w, np.arange(chunks, dtype=np.int64) * length)
    stale = np.arange(chunks)
    while len(stale):
        after = _run_chunks(w, start, stale, picks)
        following = stale + 1 < chunks
        stale, after = stale[following] + 1, after[following]
        changed = (start[stale] != after).any(axis=1)
        start[stale] = after
        stale = stale[changed]
    dataset = np.ascontiguousarray(picks.T).reshape(-1)[:size]
    order = np.argsort(dataset, kind="stable")  # a radix sort: linear
    counts = np.bincount(dataset, minlength=len(w))
    sample = np.empty(size, np.int64)
    sample[order] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return dataset, sample


def _guess(w: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Counts [chunks, D] near weight * step that sum to the step: largest remainders round up."""
    exact = steps[:, None] * w
    counts = np.floor(exact).astype(np.int64)
    missing = steps - counts.sum(axis=1)
    by_remainder = np.argsort(counts - exact, axis=1, kind="stable")
    rank = np.argsort(by_remainder, axis=1)
    rounds_up = rank < missing[:, None]
    return counts + rounds_up


def _run_chunks(
    w: np.ndarray, start: np.ndarray, chunks: np.ndarray, picks: np.ndarray
) -> np.ndarray:
    """Run `chunks` in lockstep from `start`, filling their columns; the counts they end with."""
    length, rows = len(picks), np.arange(len(chunks))
    taken = start[chunks].astype(np.float64)  # exact: counts stay far below 2**53
    step = (chunks * length).astype(np.float64)[:, None]
    deficit = np.empty_like(taken)
    for i in range(length):
        np.multiply(w, np.maximum(step, 1.0), out=deficit)
        deficit -= taken
        best = deficit.argmax(axis=1)
        taken[rows, best] += 1.0
        picks[i, chunks] = best
        step += 1.0
    return taken.astype(np.int64)


def scheduled_indices(
    schedule: Mapping[int, Sequence[float]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """`blend_indices` with weights that change: those of key n hold from sample n on.

    The first key is 0. A weight of 0 leaves a dataset out until the next change.
    """
    bounds = [*(min(first, size) for first in schedule), size]
    drawn = [np.zeros(0, np.int16)]
    for number, weights in enumerate(schedule.values()):
        (given,) = np.nonzero(weights)
        count = bounds[number + 1] - bounds[number]
        if count == 0:
            continue
        positive = normalize([weights[k] for k in given])
        drawn.append(given[blend_indices(positive, count)[0]].astype(np.int16))
    dataset = np.concatenate(drawn)
    sample = np.empty(size, np.int64)
    for k in np.unique(dataset):
        (places,) = np.nonzero(dataset == k)
        sample[places] = np.arange(len(places))
    return dataset, sample


def require_same_past(
    before: list[float] | Mapping | None, now: list[float] | Mapping | None, step: int
) -> None:
    """Raise `UserError` unless two values of data.weights agree on the steps up to `step`.

    Weights that do not change by step may be others from here on, as before: their order is new.
    """
    if not isinstance(before, Mapping) and not isinstance(now, Mapping):
        return
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        raise UserError(
            "data.weights: only a run that began with weights by step, as in {0: [1, 1]}, goes on "
            "with such; set them back, or choose another run.dir"
        )
    old, new = ({int(k): list(map(float, w)) for k, w in x.items()} for x in (before, now))
    for first in sorted({*old, *new}):
        if first < step and old.get(first) != new.get(first):
            raise UserError(
                f"data.weights: the entry of step {first} is not what the run was trained with up "
                f"to step {step} ({old.get(first)}, now {new.get(first)}); set it back and add an "
                f"entry from {step} on"
            )


class Epochs:
    """A dataset of one epoch, repeated without end; each epoch after the first in another order."""

    def __init__(self, dataset, seed: int):
        self.dataset, self.seed = dataset, seed
        self.max_documents, self.padded = dataset.max_documents, dataset.padded
        self._order = functools.lru_cache(2)(self._draw)

    def __len__(self) -> int:
        return np.iinfo(np.int64).max

    def _draw(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        n = len(self.dataset)
        return np.arange(n) if epoch == 0 else rng.permutation(n)

    def within(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The samples of the dataset that these are."""
        epochs, places = np.divmod(np.asarray(indices, np.int64), len(self.dataset))
        pairs = zip(epochs.tolist(), places.tolist(), strict=True)
        return np.array([self._order(epoch)[place] for epoch, place in pairs], np.int64)

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return self.dataset.names(self.within(indices))

    def sizes(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.dataset.sizes(self.within(indices))

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        return self.dataset.batch(self.within(indices))


class BlendedDataset:
    """`size` samples drawn from `datasets` by `weights`; fields and shapes are the datasets'.

    weights: a list, or lists by the first sample that each holds for (`scheduled_indices`).
    """

    def __init__(self, datasets: Sequence, weights: Sequence[float] | Mapping, size: int):
        self.datasets = list(datasets)
        if isinstance(weights, Mapping):
            drawn = scheduled_indices(weights, size)
        else:
            drawn = blend_indices(normalize(weights), size)
        self.dataset_index, self.dataset_sample_index = drawn
        for k, need in enumerate(np.bincount(self.dataset_index, minlength=len(datasets))):
            if need > len(datasets[k]):
                raise UserError(
                    f"blend: dataset {k} has {len(datasets[k])} samples, the blend takes {need}: "
                    f"build it with more than the surplus of {SURPLUS:.1%}, or lower its weight"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Names of samples `indices`, each from its data set."""
        drawn = ((self.dataset_index[i], self.dataset_sample_index[i]) for i in indices)
        return [self.datasets[k].names([sample])[0] for k, sample in drawn]

    def sizes(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Sizes of samples `indices`, each from its data set, which must know them."""
        drawn = ((self.dataset_index[i], self.dataset_sample_index[i]) for i in indices)
        return np.concatenate([self.datasets[k].sizes([sample]) for k, sample in drawn])

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Samples `indices`, stacked to [B, S]."""
        chosen = self.dataset_index[np.asarray(indices, np.int64)]
        sample = self.dataset_sample_index[np.asarray(indices, np.int64)]
        out: dict[str, np.ndarray] = {}
        for k in np.unique(chosen):
            rows = np.flatnonzero(chosen == k)
            for name, part in self.datasets[k].batch(sample[rows]).items():
                if name not in out:
                    out[name] = np.empty((len(chosen), *part.shape[1:]), part.dtype)
                out[name][rows] = part
        return out

    @property
    def max_documents(self) -> int:
        """The most segments that any sample of any dataset has."""
        return max(d.max_documents for d in self.datasets)

    @property
    def padded(self) -> bool:
        return all(d.padded for d in self.datasets)
