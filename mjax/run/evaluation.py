"""The held-out loss of a run, and that of a bigram table, which is said with it at the end.

Invariant: every evaluation reads the same batches, so that its figures compare.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import numpy as np

from mjax.config.load import load
from mjax.config.schema.run import Config
from mjax.data.corpus.bigram import bigram_cross_entropy
from mjax.data.corpus.gpt import split_tokens
from mjax.data.corpus.text import prepared_prefix
from mjax.errors import UserError
from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import NEXT_TOKEN
from mjax.run.batches import BatchSource, BatchStream, RowsOf, RunBatches, from_config
from mjax.run.early_stop import EarlyStop
from mjax.run.monitor.metrics import Record
from mjax.run.resume import restored_record
from mjax.sharding.collectives import DATA_AXES
from mjax.sharding.mesh import make_mesh
from mjax.train.step import LOSSES
from mjax.train.trainer import Trainer

MAX_BIGRAM_TOKENS = 20_000_000  # training tokens that the bigram table is made from


@dataclass
class HeldOut:
    """Evaluates a trainer on data that it is not trained on.

    further: further sets by name.
    measure: measures instead of the losses of `stream`, if it is not None.
    early_stop: sees each loss of `stream`.
    last_step, last_loss: the step evaluated last and its loss.
    """

    trainer: Trainer
    stream: BatchStream | None
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    further: Mapping[str, BatchStream] = field(default_factory=dict)
    last_step: int = -1
    last_loss: float | None = None
    measure: Callable[[Callable[[], None]], Record] | None = None

    def loss(self, beat: Callable[[], None]) -> Record:
        """The result of `losses_of` as `eval_loss` and so on; of further sets `eval_loss/NAME`."""
        steps = self.trainer.cfg.train.eval_steps
        measure = self.measure or partial(losses_of, self.trainer, self.stream, steps)
        found = measure(beat)
        record = {f"eval_{name}": value for name, value in found.items()}
        for name, stream in self.further.items():
            record[f"eval_loss/{name}"] = losses_of(self.trainer, stream, steps, beat)["loss"]
        self.last_step, self.last_loss = self.trainer.step_number, record["eval_loss"]
        self.early_stop.see(self.last_loss)
        return record

    def nothing(self) -> str:
        """A line on held-out samples of which none counts."""
        train = self.trainer.cfg.train
        names = self.stream.describe(0, train.eval_steps, 3)
        return f"held-out loss: there is none, for nothing of its samples counts: {names}"

    def batches(self, rows: RowsOf = None) -> Iterator[HostBatch]:
        """The batches of an evaluation, numpy [B, S] fields; `rows`: the part of this process."""
        return self.stream.batches(0, self.trainer.cfg.train.eval_steps, rows)

    def bigram_line(self, loss: float) -> str | None:
        """A line with `loss` beside what a table of token pairs reaches; None where not comparable.

        Only the loss of next tokens on `data.text` is.
        """
        cfg = self.trainer.cfg
        if cfg.train.objective != NEXT_TOKEN or not cfg.data.text or cfg.data.stream:
            return None
        prefix = prepared_prefix(cfg.run.dir)  # its text may be another one by now
        training_tokens = split_tokens(prefix, "train", cfg.data.split)
        rows = []
        for batch in self.batches():
            last_label = batch["labels"][:, -1]
            rows.append(np.column_stack([batch["tokens"], last_label]))
        bigram = bigram_cross_entropy(
            training_tokens[:MAX_BIGRAM_TOKENS], np.concatenate(rows), cfg.model.vocab_size
        )
        return (
            f"held-out loss {loss:.4f}, bigram cross-entropy of the same tokens {bigram:.4f} nats"
        )


def losses_of(
    trainer: Trainer, stream: BatchStream, count: int, beat: Callable[[], None] = lambda: None
) -> Record:
    """The losses and measures of so many batches by name, `loss` first; `tokens`, its count.

    A loss or measure with no counted entry is None. `beat` is called after every batch.
    """
    found: list = []
    for batch in stream.batches(0, count, trainer.local_rows):
        found.append(trainer.run_program(LOSSES, batch))
        beat()
        if len(found) > 1:  # one late, so that no more than two batches wait on the device
            found[-2] = jax.device_get(found[-2])
    totals, counts = jax.tree.map(lambda *x: np.sum(x, dtype=np.float64), *jax.device_get(found))
    record = {"loss": None, "tokens": int(counts["loss"])}
    for name, count in counts.items():
        record[name] = float(totals[name] / count) if count else None
    return record


def held_out_of(trainer: Trainer, batches: RunBatches, record: dict) -> HeldOut | None:
    """The evaluation of a run that goes on from a checkpoint with `record`, {} for a new run.

    Checkpoints record what the batches and the early stop need; None without held-out data.
    """
    early_stop = EarlyStop(trainer.cfg.train.early_stop)
    early_stop.restore(record.get("batches", {}))
    trainer.checkpoints.batches_at = lambda step: batches.record_at(step) | early_stop.record()
    if batches.held_out is None and batches.measure is None:
        return None
    held_out = HeldOut(trainer, batches.held_out, early_stop, batches.further)
    held_out.measure = batches.measure
    return held_out


def _on_these_devices(cfg: Config, rows_of_run: int | str) -> Config:
    """A config with the micro-batch of its run, if these devices can divide the batch so."""
    if rows_of_run == "auto" or cfg.train.micro_batch_size != "auto" or cfg.distill.teacher_mesh:
        return cfg
    shape = make_mesh(cfg.mesh).shape
    rows = cfg.train.global_batch_size // math.prod(shape[axis] for axis in DATA_AXES)
    if rows % rows_of_run:
        return cfg
    train = cfg.train.model_copy(update={"micro_batch_size": rows_of_run})
    return cfg.model_copy(update={"train": train})


def loss_of_split(
    folder: Path,
    split: str,
    steps: int | None,
    overrides: list[str],
    batch_source: BatchSource = from_config,
) -> Record:
    """The losses of a run's newest checkpoint on its "test" or "valid" data, or on one of its sets.

    steps: batches to take; None: as many as the run does. Raises `UserError` for unknown data.
    No role has devices of its own, but for a teacher whose student has a pipeline.
    """
    own = load(folder / "config.yaml", [f"run.dir={folder}"])
    free = ["train.micro_batch_size=auto", *overrides, f"run.dir={folder}"]
    cfg = load(folder / "config.yaml", free)
    is_test = split == "test"
    of_run = (is_test and cfg.train.test_steps) or cfg.train.eval_steps
    count = of_run if steps is None else steps
    train = {"test_steps": count, "eval_interval": None}
    if not is_test:
        train = {"test_steps": 0, "eval_interval": 1, "eval_steps": count}
    changed = {
        "run": cfg.run.model_copy(update={"rehearse": []}),
        "train": cfg.train.model_copy(update={"early_stop": None, **train}),
        "data": cfg.data.model_copy(update={"eval_sets": {}} if is_test else {}),
        "checkpoint": cfg.checkpoint.model_copy(update={"keep_best": 0}),
        "reinforce": cfg.reinforce.model_copy(update={"engine": {}}),
    }
    if cfg.mesh.pp == 1:
        changed["distill"] = cfg.distill.model_copy(update={"teacher_mesh": {}})
    cfg = cfg.model_copy(update=changed)
    trainer = Trainer(_on_these_devices(cfg, own.train.micro_batch_size))
    step = trainer.restore()
    batches = batch_source(trainer, restored_record(trainer))
    streams = {"test": batches.test, "valid": batches.held_out, **batches.further}
    if streams.get(split) is None:
        known = ", ".join(name for name, stream in streams.items() if stream is not None)
        raise UserError(f"--split {split}: {folder} has no such data; it has {known or 'none'}")
    losses = losses_of(trainer, streams[split], count)
    return {"run": str(folder), "split": split, "step": step, **losses}
