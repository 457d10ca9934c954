"""From the config to a stream of batches, prepared by grain's threads ahead of the step.

Invariant: the global batch of a step is a pure function of (config, seed, step). `batch_range`
says which samples a step takes and `rows` which of them this process reads, so a resumed run, or
one on other devices or hosts, sees the same stream; there is no loader state to save.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from mjax.config.schema import Config, DataConfig
from mjax.data.blend import SURPLUS, BlendedDataset, normalize, sizes_per_dataset
from mjax.data.gpt import Batch, GPTDataset
from mjax.data.mock import MockDataset
from mjax.data.text import prepare_text
from mjax.errors import UserError


class Dataset(Protocol):
    """What the loader reads: `GPTDataset`, `BlendedDataset` or `MockDataset`."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch: ...

    @property
    def max_documents(self) -> int: ...


class _Steps:
    """The random-access source that grain reads: item i is the batch of step first_step + i."""

    def __init__(self, dataset, batch_range, first_step, num_steps, rows, make_fields):
        self.dataset, self.batch_range, self.rows = dataset, batch_range, rows
        self.make_fields = make_fields
        self.first_step, self.num_steps = first_step, num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, i: int) -> Batch:
        step = self.first_step + i
        first, count = self.batch_range(step)
        rows = np.arange(count)
        if self.rows:
            rows = rows[self.rows(count)]
        batch = self.dataset.batch(first + rows)
        if self.make_fields:
            batch = batch | self.make_fields(batch, step, rows)
        return batch


def make_loader(
    dataset: Dataset,
    batch_range: Callable[[int], tuple[int, int]],
    first_step: int,
    num_steps: int,
    *,
    rows: Callable[[int], slice] | None = None,
    make_fields: Callable[[Batch, int, np.ndarray], Batch] | None = None,
    prefetch: int = 4,
    workers: int = 2,
) -> Iterator[Batch]:
    """Batches of steps [first_step, first_step + num_steps), [rows, S] numpy arrays per field.

    `batch_range(step)` gives (first sample, count) and must grow with the step; `rows(count)` the
    slice of them to read (None: all). `make_fields(batch, step, rows)` gives fields to add to those
    rows of a step. `workers` threads start on `prefetch` batches at once, before the first
    `next`. `close()` on the iterator stops them. Raises `UserError` if the dataset is too short,
    and, from `next`, whatever reading raised.
    """
    import grain  # imports jax: not for those who only read a corpus

    last = sum(batch_range(first_step + num_steps - 1)) if num_steps else 0
    if last > len(dataset):
        raise UserError(
            f"data: {len(dataset)} samples, but step {first_step + num_steps} takes number {last}: "
            "lower train.steps, shorten data.seq_length, set data.weights or add data"
        )
    source = _Steps(dataset, batch_range, first_step, num_steps, rows, make_fields)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=prefetch)
    batches = iter(grain.MapDataset.source(source).to_iter_dataset(options))
    batches.start_prefetch()
    return batches


def build_datasets(cfg: Config, num_train: int, num_valid: int) -> tuple[Dataset, Dataset | None]:
    """Training data of at least `num_train` samples, held-out data of `num_valid` (0: None).

    `data.text` is prepared first if need be. Raises `UserError` on anything unusable.
    """
    try:
        return _build_datasets(cfg, num_train, num_valid)
    except (MemoryError, OverflowError) as e:
        raise UserError(
            f"data: the order of {num_train:,} samples does not fit in memory; lower train.steps, "
            "train.max_tokens or train.global_batch_size"
        ) from e


def _build_datasets(cfg: Config, num_train: int, num_valid: int) -> tuple[Dataset, Dataset | None]:
    data, seed = cfg.data, cfg.run.seed
    given = [k for k in ("paths", "text", "mock") if getattr(data, k)]
    if len(given) != 1:
        what = "none is" if not given else f"{' and '.join(given)} are"
        raise UserError(f"data: set exactly one of data.paths, data.text, data.mock; {what} set")
    if data.mock:
        shape = cfg.model.vocab_size, data.seq_length
        training = MockDataset(*shape, num_train, seed)
        return training, MockDataset(*shape, num_valid, seed + 1) if num_valid else None
    paths = data.paths
    if data.text:
        corpus = prepare_text(data, Path(cfg.run.dir))
        if corpus.vocab_size > cfg.model.vocab_size:
            raise UserError(
                f"model.vocab_size {cfg.model.vocab_size} is less than the tokenizer's "
                f"{corpus.vocab_size} ({corpus.tokenizer_path}): raise it"
            )
        paths = [corpus.prefix]
    shares = [1.0, 0.0, 0.0] if data.valid_paths else data.split
    train = _blend(cfg, paths, data.weights, "train", shares, num_train)
    if not num_valid:
        return train, None
    if data.valid_paths:
        return train, _blend(cfg, data.valid_paths, None, "valid", [0.0, 1.0, 0.0], num_valid)
    return train, _blend(cfg, paths, data.weights, "valid", shares, num_valid)


def _blend(
    cfg: Config,
    paths: list[str],
    weights: list[float] | None,
    split: str,
    shares: list[float],
    size: int,
) -> Dataset:
    """One dataset as it is, several as a blend. Megatron's rules: given weights draw `size` with
    a surplus per dataset; without weights each dataset counts by its samples of one epoch. Where
    one epoch is too short Megatron stops; here every dataset repeats in that same proportion."""
    if len(paths) == 1 and weights is None:
        return _gpt(cfg, paths[0], split, shares, size)
    if weights is not None and len(weights) != len(paths):
        raise UserError(f"data.weights: {len(weights)} weights for {len(paths)} data.paths")
    if weights is None:
        epoch = [_gpt(cfg, path, split, shares, None) for path in paths]
        weights = [float(len(d)) for d in epoch]
        if size <= sum(weights):
            return BlendedDataset(epoch, weights, size)
    weights = normalize(weights)
    built = sizes_per_dataset(weights, size, SURPLUS)
    parts = [_gpt(cfg, path, split, shares, n) for path, n in zip(paths, built, strict=True)]
    return BlendedDataset(parts, weights, sum(sizes_per_dataset(weights, size)))


def _gpt(cfg: Config, path: str, split: str, shares: list[float], n: int | None) -> GPTDataset:
    data: DataConfig = cfg.data
    return GPTDataset(
        path,
        split,
        shares,
        data.seq_length,
        n,
        cfg.run.seed,
        cache_dir=data.cache_dir,
        document_mask=data.document_mask,
        reset_position_ids=data.reset_position_ids,
        eod_token_id=data.eod_token_id,
        eod_mask_loss=data.eod_mask_loss,
        vocab_size=cfg.model.vocab_size,
    )


def stream_hash(batch: Batch) -> str:
    """A short digest of every field's name, shape, dtype and bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array)
    return digest.hexdigest()
