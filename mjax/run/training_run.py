"""`TrainingRun`: all that a run consists of in this process, and how it is put together."""

import math
import os
from dataclasses import dataclass, field

import jax
import numpy as np

from mjax.config.load import dump
from mjax.config.schema.run import Config
from mjax.config.schema.vision import MERGED
from mjax.errors import UserError
from mjax.evaluate.tasks import TaskScores
from mjax.files import replace_text
from mjax.interop.adapters_of_run import wide_adapters
from mjax.kernels.nf4.parameters import as_weights
from mjax.models.base.context import Documents
from mjax.models.flops import flops_of_run
from mjax.objectives.fields import HostBatch
from mjax.run.batches import BatchStream, RunBatches
from mjax.run.evaluation import HeldOut
from mjax.run.faults.replicas import ReplicaCheck
from mjax.run.faults.run_lock import RunLock
from mjax.run.faults.saving import Saver, reserve_host_memory
from mjax.run.faults.supervisor import RESTART_NOTE
from mjax.run.faults.suspect import Figures, Judge, Suspects
from mjax.run.faults.watchdog import Watchdog
from mjax.run.monitor import metrics
from mjax.run.monitor.device_speed import SlowDeviceWatch
from mjax.run.monitor.diagnostics import Diagnostics
from mjax.run.monitor.goodput import GOODPUT_FILE, WallTime
from mjax.run.monitor.host_time import HostTime
from mjax.run.monitor.log_writer import reason, warn
from mjax.run.monitor.profile import Profiler
from mjax.run.rehearsal import STRUCK
from mjax.run.samples import Samples
from mjax.sharding.spec import count_frozen, count_parameters
from mjax.train.trainer import Trainer

# What else of a run is set aside with its checkpoints.
OF_RUN = (
    "metrics.jsonl",
    "config.yaml",
    GOODPUT_FILE,
    STRUCK,
    "wandb_id",
    "mlflow_id",
    "trackio_id",
)


@dataclass
class TrainingRun:
    """A training run in this process.

    batches: what it trains on, and more. held_out: evaluates on held-out data, or None without it.
    samples: what the model says to prompts, or None. tasks: scores tasks of lm-eval, or None.
    test: the batches whose loss is measured once, at the end, or None.
    wall: where the time of the job goes.
    start: steps completed before this process. last: the step to stop after.
    trained: steps of this process that changed the weights.
    data_error: why there are no more batches.
    """

    trainer: Trainer
    saver: Saver
    suspects: Suspects
    replicas: ReplicaCheck
    diagnostics: Diagnostics
    log: metrics.Log
    batches: RunBatches
    start: int
    last: int
    watchdog: Watchdog
    profiler: Profiler
    wall: WallTime
    devices: SlowDeviceWatch
    held_out: HeldOut | None = None
    test: BatchStream | None = None
    samples: Samples | None = None
    tasks: TaskScores | None = None
    clock: metrics.Clock = field(default_factory=metrics.Clock)
    host: HostTime = field(default_factory=HostTime)
    trained: int = 0
    data_error: UserError | None = None

    @property
    def cfg(self) -> Config:
        return self.trainer.cfg

    @property
    def stream(self) -> BatchStream:
        return self.batches.training


@dataclass(frozen=True)
class DispatchedStep:
    """A step that the device may still be computing.

    metrics: scalars on the device. stop_reason: GO_ON or why all processes stop, on the device.
    host: what all processes measured, on the device, if the step is logged.
    """

    step: int
    batch: HostBatch
    metrics: dict[str, jax.Array]
    stop_reason: jax.Array | int
    host: jax.Array | np.ndarray | None = None
    figures: Figures | None = None  # the metrics on the host, once the step is settled


def bound_documents(trainer: Trainer, batches: RunBatches) -> None:
    """Promise the trainer's programs how many documents and images the rows of a run hold at most.

    Without a bound of the data's, one process promises two documents and counts each batch's.
    Several promise the most that there may be.
    """
    model, is_alone = trainer.cfg.model, jax.process_count() == 1
    length = trainer.cfg.data.seq_length if is_alone else math.inf
    is_counted = is_alone or not model.vision.is_packed
    images = 0 if is_counted else 1 + model.vision.max_patches // MERGED
    padding = model.architecture.reads_target  # behind the documents of a row
    streams = batches.training, batches.held_out, batches.test, *batches.further.values()
    for stream in filter(None, streams):
        own = stream.documents
        padded = own.padded or (padding and own.most == 1)
        most = 2 if own.most >= length > 1 else own.most
        trainer.programs.bound_documents(Documents(most + padding, padded, own.images or images))


def start_run(
    trainer: Trainer,
    lock: RunLock,
    log: metrics.Log,
    wall: WallTime,
    batches: RunBatches,
    last: int,
) -> TrainingRun:
    """Returns the run up to step `last`; an earlier run's files stay until a step is trained."""
    cfg, store, start = trainer.cfg, trainer.store, trainer.step_number
    store.read_sources()
    if jax.process_index() == 0:
        store.remove_remains()
    log.open(cfg, lock.path.parent, last, start)
    for line in filter(None, (os.environ.get(RESTART_NOTE), lock.note)):
        log.event(start, line)
    if cfg.checkpoint.async_save:
        reserve_host_memory(trainer.abstract_state())
    watchdog = Watchdog(cfg.train.step_timeout_minutes)
    limit = cfg.checkpoint.max_failed_saves
    saver = Saver(trainer, lock, log, watchdog, cfg.checkpoint.interval, limit)
    interval = cfg.train.check_replicas_interval
    replicas = ReplicaCheck(trainer, interval, saver.last_checkpoint, log.event)
    describe = batches.training.describe
    suspects = Suspects(trainer, Judge(cfg.train), saver, replicas, log, watchdog, describe)
    profiler = Profiler(lock.path.parent, cfg.log.profile_steps, last, log.event)
    return TrainingRun(
        trainer=trainer,
        saver=saver,
        suspects=suspects,
        replicas=replicas,
        diagnostics=Diagnostics(trainer, log, cfg.log.diagnostics_interval),
        profiler=profiler,
        log=log,
        batches=batches,
        start=start,
        last=last,
        watchdog=watchdog,
        wall=wall,
        devices=SlowDeviceWatch(cfg.log.device_check_interval),
        test=batches.test,
    )


def take_folder(run: TrainingRun) -> None:
    """Set aside what an earlier run left, if asked to, once a step has been trained."""
    checkpoints = run.trainer.checkpoints
    if run.cfg.checkpoint.resume == "never":
        old = checkpoints.store.set_aside(*OF_RUN)
        if old is not None:
            run.log.event(run.start, f"earlier checkpoints are now in {old}, their log beside it")
    if checkpoints.source is not checkpoints.local:
        checkpoints.clear_local()
    checkpoints.claim_local()
    if jax.process_index() == 0:
        write_config(run)
        run.wall.write_to(run.saver.lock.path.with_name(GOODPUT_FILE))


def write_config(run: TrainingRun) -> None:
    """Keep the config of a run that has trained a step, and what of it was chosen for "auto"; not
    worth ending it for.
    """
    file = run.saver.lock.path.with_name("config.yaml")
    chosen = [f"# {line}\n" for line in (run.trainer.why or "").splitlines()]
    try:
        replace_text(file, "".join(chosen) + dump(run.cfg))
    except OSError as e:
        warn(f"{file} cannot be written ({reason(e)}); training goes on")


def trained_nothing(run: TrainingRun) -> str:
    """A line on a start that trained nothing, for all of its steps were left out, or ""."""
    if run.trained:
        return ""
    count, precision = run.trainer.step_number - run.start, run.cfg.precision
    line = f"WARNING: none of {count} steps changed a weight: all were left out"
    if precision.compute == "float16":
        line += (
            "; gradients overflowed while the loss scale came down: train for more steps, or "
            f"lower precision.initial_loss_scale={precision.initial_loss_scale:g}"
        )
    return line


def run_summary(trainer: Trainer) -> str:
    """Lines on the model and the mesh of a run, and on what was chosen for "auto"."""
    cfg, mesh = trainer.cfg, trainer.mesh
    flops = flops_of_run(cfg)
    axes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    shape = " ".join(axes) or "one device"
    weights = as_weights(trainer.specs)
    parameters = f"{count_parameters(weights):,} parameters"
    if cfg.train.freeze or cfg.lora.rank:
        parameters += f" ({count_frozen(weights):,} frozen)"
    lines = [
        f"{parameters}, {flops:.4g} FLOPs a token, "
        f"{cfg.train.global_batch_size} x {cfg.data.seq_length} tokens a step",
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({shape}), folder {cfg.run.dir}",
    ]
    if cfg.model.moe.force_balanced:
        lines.append(
            "WARNING: model.moe.force_balanced=true: experts take turns, for benchmarks; what is "
            "trained is of no use"
        )
    lines += wide_adapters(trainer.specs)
    if trainer.why:
        lines.append(trainer.why)
    return "\n".join(lines)
