"""From the config to a stream of batches, prepared by grain's threads ahead of the step.

Invariant: the global batch of a step is a pure function of (config, seed, step). `batch_range`
says which samples a step takes and `rows` which of them this process reads, so a resumed run, or
one on other devices or hosts, sees the same stream; there is no loader state to save.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from mjax.config.schema.run import Config, DataConfig
from mjax.data.base.tokenizer import load_tokenizer, require_vocabulary, word_continuations
from mjax.data.blend import SURPLUS, BlendedDataset, normalize, sizes_per_dataset
from mjax.data.conversations.answer_rows import AnswerDataset
from mjax.data.conversations.rows import ConversationDataset
from mjax.data.corpus.fim import FillInTheMiddle, fill_in_the_middle
from mjax.data.corpus.gpt import FieldArrays, GPTDataset
from mjax.data.corpus.retro import NeighborDataset
from mjax.data.corpus.text import prepare_text, require_tokenizer
from mjax.data.global_batches import GlobalBatches
from mjax.data.mock import MockDataset
from mjax.data.sentences.labelled import LabelledDataset
from mjax.data.sentences.masked import MaskedDataset, frame_of_pairs
from mjax.errors import UserError, or_user_error
from mjax.optim.schedule import consumed_samples, final_step, held_out_samples


class Dataset(Protocol):
    """A dataset as the loader reads it: `GPTDataset`, or another of this room.

    `padded` is whether a row is one document, and then maybe padding.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays: ...

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Sources of samples, for messages: a file, or a corpus and numbers in its index."""

    @property
    def max_documents(self) -> int: ...

    @property
    def padded(self) -> bool: ...


def make_loader(
    dataset: Dataset,
    batch_range: Callable[[int], tuple[int, int]],
    first_step: int,
    num_steps: int,
    *,
    rows: Callable[[int], slice] | None = None,
    make_fields: Callable[[FieldArrays, int, np.ndarray], FieldArrays] | None = None,
    prefetch: int = 4,
    workers: int = 2,
) -> Iterator[FieldArrays]:
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

    def batch_of(step: int) -> FieldArrays:
        first, count = batch_range(step)
        mine = rows(count) if rows else slice(None)
        numbers = np.arange(count)
        if isinstance(dataset, GlobalBatches):
            batch = dataset.global_batch(first + numbers, mine)
        else:
            batch = dataset.batch(first + numbers[mine])
        return batch | make_fields(batch, step, numbers[mine]) if make_fields else batch

    steps = grain.MapDataset.range(first_step, first_step + num_steps).map(batch_of)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=prefetch)
    batches = iter(steps.to_iter_dataset(options))
    batches.start_prefetch()
    return batches


def describe_data(dataset: Dataset, indices: Sequence[int], most: int) -> str:
    """Words for where samples come from; of many, the first `most`."""
    names = list(dict.fromkeys(dataset.names(indices[:most])))
    more = len(indices) - most
    return ", ".join(names) + (f" and {more} more samples" if more > 0 else "")


def build_datasets(
    cfg: Config, num_train: int, num_valid: int, trained_with: str | None = None
) -> tuple[Dataset, Dataset | None]:
    """Training data of at least `num_train` samples, held-out data of `num_valid` (0: None).

    `data.text` is prepared first if need be. `trained_with`: digest of the tokenizer of the weights
    that go on, if any. Raises `UserError` on anything unusable, and for another tokenizer.
    """
    name = cfg.data.tokenizer
    if trained_with is not None and name is not None and not name.startswith("train:"):
        require_tokenizer(name, load_tokenizer(name), trained_with)
    wrong = (
        f"data: the order of {num_train:,} samples does not fit in memory; lower train.steps, "
        "train.max_tokens or train.global_batch_size"
    )
    with or_user_error(wrong, (MemoryError, OverflowError)):
        train, valid = _build_datasets(cfg, num_train, num_valid, trained_with)
    if not cfg.model.architecture.reads_neighbors or cfg.data.mock:
        return train, valid
    training = NeighborDataset(train, num_train, train, cfg)
    if valid is None:
        return training, None
    return training, NeighborDataset(valid, num_valid, train, cfg)


def run_datasets(cfg: Config) -> tuple[tuple[int, int], tuple[Dataset, Dataset | None]]:
    """(the samples that a run takes, its data) for training and held out, without neighbors."""
    counts = consumed_samples(cfg.train, final_step(cfg)), held_out_samples(cfg)
    return counts, _build_datasets(cfg, *counts)


def _build_datasets(
    cfg: Config, num_train: int, num_valid: int, trained_with: str | None = None
) -> tuple[Dataset, Dataset | None]:
    data, seed = cfg.data, cfg.run.seed
    given = [k for k in ("paths", "text", "mock") if getattr(data, k)]
    if data.images.path is not None and not given:
        return _image_datasets(cfg, num_train, num_valid)
    if data.conversations.path is not None and not given:
        return _conversation_datasets(cfg, num_train, num_valid)
    if len(given) != 1:
        what = "none is" if not given else f"{' and '.join(given)} are"
        raise UserError(f"data: set exactly one of data.paths, data.text, data.mock; {what} set")
    if data.mock:
        shape = cfg.model.vocab_size, tokens_to_read(cfg)
        training = MockDataset(*shape, num_train, seed)
        return training, MockDataset(*shape, num_valid, seed + 1) if num_valid else None
    paths, tokenizer_path = data.paths, None
    if _dataset_kind(cfg) == "labelled":
        paths, make = [data.text], _labelled(cfg)
    else:
        if data.text:
            corpus = prepare_text(data, Path(cfg.run.dir), trained_with)
            require_vocabulary(corpus.vocab_size, cfg.model, corpus.tokenizer_path)
            paths, tokenizer_path = [corpus.prefix], corpus.tokenizer_path
        fim = fill_in_the_middle(data, seed, cfg.model.vocab_size, tokenizer_path)
        make = partial(_dataset, cfg, fim)
    return _blends(make, paths, data.valid_paths, data, (num_train, num_valid))


def _image_datasets(cfg: Config, num_train: int, num_valid: int) -> tuple[Dataset, Dataset | None]:
    """The images of a run, and held-out ones."""
    from mjax.data.multimodal.image_text import ImageTextDataset  # they import jax, as grain does
    from mjax.data.multimodal.images import ImageDataset
    from mjax.data.multimodal.packed import PackedTexts

    images, make = cfg.data.images, partial(ImageDataset, cfg=cfg)
    if cfg.model.modalities:
        make = partial(ImageTextDataset, cfg=cfg, tokenizer=load_tokenizer(cfg.data.tokenizer))
    if images.packed:
        make_texts = make

        def make(path: str, split: str, shares: list[float], size: int | None) -> Dataset:
            return PackedTexts(make_texts(path, split, shares, None), size)

    others = [] if images.valid_path is None else [images.valid_path]
    return _blends(make, images.paths, others, cfg.data, (num_train, num_valid))


def _conversation_datasets(
    cfg: Config, num_train: int, num_valid: int
) -> tuple[Dataset, Dataset | None]:
    """The conversations of a run, and held-out ones."""
    data, sizes = cfg.data, (num_train, num_valid)
    given = {"cfg": cfg, "tokenizer": load_tokenizer(data.tokenizer)}
    make = partial(ConversationDataset, **given)
    if (kind := _dataset_kind(cfg)) != "tokens":
        make = partial(AnswerDataset, kind=kind, reads_last=cfg.model.num_labels > 0, **given)
    train, valid = _blends(make, data.conversations.paths, data.valid_paths, data, sizes)
    return GlobalBatches(train, cfg), None if valid is None else GlobalBatches(valid, cfg)


def _blends(
    make: Callable[..., Dataset],
    paths: list[str],
    valid_paths: list[str],
    data: DataConfig,
    sizes: tuple[int, int],
) -> tuple[Dataset, Dataset | None]:
    """Training data of `paths`, and held-out data of `valid_paths`, or else of the split."""
    shares = [1.0, 0.0, 0.0] if valid_paths else data.split
    train = _blend(make, paths, data.weights, "train", shares, sizes[0])
    if not sizes[1]:
        return train, None
    if valid_paths:
        return train, _blend(make, valid_paths, None, "valid", [0.0, 1.0, 0.0], sizes[1])
    return train, _blend(make, paths, data.weights, "valid", shares, sizes[1])


def _labelled(cfg: Config) -> Callable[..., Dataset]:
    """Makes the dataset of texts with classes in a file."""
    tokenizer, files = load_tokenizer(cfg.data.tokenizer), len(cfg.data.valid_paths)
    if files > 1:
        raise UserError(
            f"data.valid_paths names {files} files, but train.objective={cfg.train.objective} "
            "reads one; put them into one"
        )
    return partial(LabelledDataset, cfg=cfg, tokenizer=tokenizer)


def _blend(
    make: Callable[..., Dataset],
    paths: list[str],
    weights: list[float] | None,
    split: str,
    shares: list[float],
    size: int,
) -> Dataset:
    """One dataset as it is, several as a blend; `make` is `_dataset` of a config.

    Megatron's rules: given weights draw `size` with a surplus per dataset; without weights each
    dataset counts by its samples of one epoch. If one epoch is too short, Megatron stops; here
    every dataset repeats in that same proportion.
    """
    if len(paths) == 1 and weights is None:
        return make(paths[0], split, shares, size)
    if weights is not None and len(weights) != len(paths):
        raise UserError(f"data.weights: {len(weights)} weights for {len(paths)} sources of data")
    if weights is None:
        epoch = [make(path, split, shares, None) for path in paths]
        weights = [float(len(d)) for d in epoch]
        if size <= sum(weights):
            return BlendedDataset(epoch, weights, size)
    weights = normalize(weights)
    built = sizes_per_dataset(weights, size, SURPLUS)
    parts = [make(path, split, shares, n) for path, n in zip(paths, built, strict=True)]
    return BlendedDataset(parts, weights, sum(sizes_per_dataset(weights, size)))


def _dataset(
    cfg: Config,
    fim: FillInTheMiddle | None,
    path: str,
    split: str,
    shares: list[float],
    n: int | None,
) -> Dataset:
    data: DataConfig = cfg.data
    if data.masked.sentences:
        return _sentence_dataset(cfg, path, split, shares, n)
    of_documents = {"document_mask", "reset_position_ids", "eod_token_id", "eod_mask_loss"}
    options = data.model_dump(include={"cache_dir", *of_documents})
    given = path, split, shares, tokens_to_read(cfg), n, cfg.run.seed
    return GPTDataset(*given, **options, vocab_size=cfg.model.vocab_size, fim=fim)


def _sentence_dataset(
    cfg: Config, path: str, split: str, shares: list[float], n: int | None
) -> Dataset:
    """Samples of whole sentences, with hidden spans or masked words."""
    given = path, split, shares, n, cfg.run.seed, cfg.data, cfg.model.vocab_size
    name = cfg.data.tokenizer
    if cfg.data.text:
        name = prepare_text(cfg.data, Path(cfg.run.dir)).tokenizer_path
    continues = word_continuations(name) if cfg.data.masked.whole_words else None
    if _dataset_kind(cfg) == "spans":
        from mjax.data.sentences.spans import SpanDataset  # imports jax, as grain does

        start = cfg.model.decoder_start_token_id
        return SpanDataset(*given, continues=continues, start_token=start)
    bert = cfg.model.bert
    framed = frame_of_pairs(load_tokenizer(name) if name else None, bert)
    return MaskedDataset(*given, pairs=bert.num_labels > 0, framed=framed, continues=continues)


def _dataset_kind(cfg: Config) -> str:
    """The kind of dataset that the objective trains on: TOKENS or another of `objective.py`."""
    from mjax.objectives.objective import dataset_kind  # imports jax, as grain does

    return dataset_kind(cfg)


def tokens_to_read(cfg: Config) -> int:
    """The tokens of a row of a stream: more than `data.seq_length` where spans are cut out of it.

    Raises `UserError` where the spans of such a row have too few sentinels.
    """
    data = cfg.data
    if _dataset_kind(cfg) != "spans":
        return data.seq_length
    from mjax.objectives.span_fields import sentinels_of, span_counts, stream_length

    sizes = data.masked.probability, data.masked.mean_span
    length = stream_length(data.seq_length, data.target_length, *sizes)
    sentinels_of(data, span_counts(length, *sizes)[1])
    return length
