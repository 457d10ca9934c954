"""The batches of a run: a stream for training, one for evaluation, and their record on resume.

`loop.train` takes a `BatchSource`. Its default, `from_config`, reads the datasets that the config
names. Conversations, pairs or rollouts come from another source, and the loop stays as it is.
Invariant: a batch of training is a function of its step and of what an earlier checkpoint records.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from mjax.config.schema.run import Config
from mjax.data.blend import require_same_past
from mjax.data.corpus.stream import StreamedText
from mjax.data.held_out import eval_datasets, third_share
from mjax.data.loader import Dataset, build_datasets, describe_data, make_loader
from mjax.models.base.context import Documents
from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import Objective
from mjax.optim.schedule import batch_range, consumed_samples, final_step, held_out_samples
from mjax.train.batch import field_maker
from mjax.train.trainer import Trainer

# Returns the rows to read, of so many in a global batch; None: all of them.
RowsOf = Callable[[int], slice] | None


class BatchStream(Protocol):
    """The batches of training, or those of an evaluation.

    documents: what the rows hold. `most` is the bound on their tokens where there is no other, and
        `images` 0 where nobody has counted.
    """

    @property
    def documents(self) -> Documents: ...

    def batches(self, start: int, count: int, rows: RowsOf) -> Iterator[HostBatch]:
        """Batch numbers start to start + count - 1, the first of a run being 0.

        A batch holds the fields of the objective and of the layers. In training it has as many rows
        as `batch_range` counts for its step. The iterator has `close()`, as a generator has.
        """

    def describe(self, start: int, count: int, most: int) -> str:
        """Words for messages on what these batches are made of; of many sources, `most`."""


def record_nothing(step: int) -> dict:
    """The record of streams whose batches are functions of the config and the step."""
    return {}


def no_line(step: int) -> str:
    """No line on any batch."""
    return ""


@dataclass(frozen=True)
class RunBatches:
    """The batches of a run.

    held_out: those of an evaluation, which takes `train.eval_steps` from the first; or None.
    further: those of further held-out sets, by name, of which it takes as many.
    test: those whose loss is measured at the end, over `train.test_steps`; or None.
    is_live: whether a batch depends on the weights that the step before it left. The loop then
        ends each step before it asks for the next batch.
    figures_at: returns further figures of a step that has just ended, for the log.
    line_at: returns a line on its batch, "" for none.
    measure: measures held-out data in another way than by the loss of `held_out`, as `losses_of`
        gives it; or None.
    record_at: returns what a checkpoint of a step must keep for the batches after it, as JSON. The
        loop reads ahead, so it is asked about a step whose following batches are read already. It
        ends what is drawn ahead: Orbax saves with programs on all devices, an engine's, too.
    """

    training: BatchStream
    held_out: BatchStream | None = None
    record_at: Callable[[int], dict] = record_nothing
    further: Mapping[str, BatchStream] = field(default_factory=dict)
    test: BatchStream | None = None
    is_live: bool = False
    figures_at: Callable[[int], dict] = record_nothing
    line_at: Callable[[int], str] = no_line
    measure: Callable[[Callable[[], None]], dict] | None = None


# Makes the batches of a run from its trainer, which has its state if the run goes on, and from the
# record of the checkpoint that it goes on from, {} for a new run. `record["batches"]` is what
# `record_at` gave.
BatchSource = Callable[[Trainer, dict], RunBatches]


@dataclass(frozen=True)
class DatasetStream:
    """The batches of a dataset.

    range_of: (first sample, count) of a batch.
    """

    data: Dataset
    cfg: Config
    objective: Objective
    range_of: Callable[[int], tuple[int, int]]

    @property
    def documents(self) -> Documents:
        images = getattr(self.data, "max_images", 0)  # of texts with images
        return Documents(self.data.max_documents, self.data.padded, images)

    def batches(self, start: int, count: int, rows: RowsOf) -> Iterator[HostBatch]:
        return make_loader(
            self.data,
            self.range_of,
            start,
            count,
            rows=rows,
            make_fields=field_maker(self.cfg, self.objective),
            prefetch=self.cfg.data.prefetch,
            workers=self.cfg.data.workers,
        )

    def describe(self, start: int, count: int, most: int) -> str:
        first, _ = self.range_of(start)
        end = sum(self.range_of(start + count - 1))
        return describe_data(self.data, range(first, end), most)


def from_config(trainer: Trainer, record: dict) -> RunBatches:
    """The batches of the datasets that `data` names.

    Raises `UserError` as `build_datasets` does.
    """
    cfg, objective = trainer.cfg, trainer.objective
    size = cfg.train.global_batch_size
    samples = consumed_samples(cfg.train, final_step(cfg)), held_out_samples(cfg)
    tokenizer = record.get("text_digests", {}).get("tokenizer")
    past = record.get("config", {}).get("data", {}).get("weights")
    require_same_past(past if record else cfg.data.weights, cfg.data.weights, trainer.step_number)
    train, held_out = build_datasets(cfg, *samples, tokenizer)
    record_at = record_nothing
    if isinstance(train, StreamedText):
        record_at = position_recorder(train, cfg, record.get("batches", {}))

    def evaluated(data: Dataset) -> DatasetStream:
        return DatasetStream(data, cfg, objective, lambda batch: (batch * size, size))

    return RunBatches(
        DatasetStream(train, cfg, objective, partial(batch_range, cfg.train)),
        None if held_out is None else evaluated(held_out),
        record_at,
        further={name: evaluated(data) for name, data in eval_datasets(cfg, samples[1]).items()},
        test=evaluated(third_share(cfg)) if cfg.train.test_steps else None,
    )


def position_recorder(stream: StreamedText, cfg: Config, record: dict) -> Callable[[int], dict]:
    """The `record_at` of a stream of text, which goes on from the `record` of a checkpoint."""
    if "stream" in record:
        stream.go_on(record["stream"])

    def record_at(step: int) -> dict:
        return {"stream": stream.record_of(consumed_samples(cfg.train, step))}

    return record_at
