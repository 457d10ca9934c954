"""The training run, top to bottom: folder, state, data, steps, held-out loss, checkpoints, end.

Invariants: The batch of a step is a pure function of (config, seed, step), so a resumed run needs
the step number alone. Metrics are fetched one step late, so the device always has the next step
queued. Checkpoints and log lines come from steps that have passed the check for finite numbers.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from mjax.checkpoint.base.orbax_messages import quiet_saves
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.evaluate.tasks import tasks_of
from mjax.objectives.fields import Batch, HostBatch
from mjax.optim.schedule import batch_range, final_step, rates_of_step
from mjax.run.batches import BatchSource, from_config
from mjax.run.evaluation import held_out_of, losses_of
from mjax.run.faults.run_lock import RunLock
from mjax.run.faults.stopping import GO_ON, NO_BETTER, REASONS, SIGNALED, Stopper
from mjax.run.folder import run_folder
from mjax.run.monitor import metrics
from mjax.run.monitor.console import duration
from mjax.run.monitor.goodput import GOODPUT_FILE, TRAINING, WallTime
from mjax.run.monitor.host_time import figures_of
from mjax.run.monitor.spans import Spans, require_opentelemetry
from mjax.run.monitor.trackers import require_trackers
from mjax.run.out_of_memory import explained
from mjax.run.rehearsal import trainer_of
from mjax.run.resume import changes, restored_record, resume
from mjax.run.samples import samples_of
from mjax.run.training_run import (
    DispatchedStep,
    TrainingRun,
    bound_documents,
    run_summary,
    start_run,
    take_folder,
    trained_nothing,
)
from mjax.train.batch import AheadBatch, placed_ahead, placed_when_due

# Metrics of a step that a record has in places of their own, or not at all.
STEP_METRICS = frozenset({"loss", "grad_norm", "tokens", "finite", "accepted", "skipped"})


def train(
    cfg: Config,
    mesh: Mesh | None = None,
    batch_source: BatchSource = from_config,
    devices: Sequence[jax.Device] | None = None,
) -> None:
    """Train as `cfg` says until steps, tokens, time or a signal end it, resuming if run.dir can.

    The batches are those of `batch_source`, by default of the datasets that `cfg.data` names. Mesh
    and devices are those of `Trainer`. Raises `UserError` for mistakes of the user, `NonFiniteLoss`
    when training diverges and `ReplicasDiffer` when a device errs.
    """
    stopper = Stopper(cfg.train.max_minutes)
    require_trackers(cfg.log)
    require_opentelemetry(cfg.log.opentelemetry)
    wall = WallTime(Spans(cfg.run.dir if cfg.log.opentelemetry else None))
    trainer = trainer_of(cfg, mesh, devices)
    cfg = trainer.cfg  # mesh: auto is resolved in it
    with (
        run_folder(cfg) as folder,
        RunLock(folder) as lock,
        quiet_saves(),
        contextlib.closing(metrics.Log()) as log,
        contextlib.closing(wall),
        explained(trainer),
    ):
        note = resume(trainer)
        last = final_step(cfg)
        record = restored_record(trainer)
        batches = batch_source(trainer, record)
        held_out = held_out_of(trainer, batches, record)
        bound_documents(trainer, batches)
        samples = samples_of(trainer)
        tasks = tasks_of(cfg, trainer.definition, trainer.mesh)
        is_resumed = trainer.step_number > 0
        if trainer.state is None:
            trainer.init()
        log.say(run_summary(trainer))
        log.say(note)
        is_stopped = held_out is not None and held_out.early_stop.is_due
        if trainer.step_number >= last or is_stopped:
            key = "train.early_stop" if is_stopped else "train.steps"
            log.say(f"nothing left to train: step {trainer.step_number} of {last}; raise {key}")
            trainer.store.apply_retention()  # of a run that was killed as it ended
            return
        if cfg.checkpoint.resume != "never":
            wall.go_on(folder / GOODPUT_FILE, trainer.step_number)
        run = start_run(trainer, lock, log, wall, batches, last)
        run.held_out, run.samples, run.tasks = held_out, samples, tasks
        if is_resumed:
            log.keep_event(run.start, note)
        if is_resumed and (line := changes(trainer)):
            log.event(run.start, line)
        with stopper, run.watchdog, run.profiler:
            stop_reason = train_steps(run, stopper)
            loss = finish(run, stop_reason)
        if stop_reason != SIGNALED:
            say_results(run, loss)
        log.say(wall.line())


def say_results(run: TrainingRun, loss: float | None) -> None:
    """Compare the held-out loss at the end, if there is one, and show samples."""
    is_first = jax.process_index() == 0
    if loss is not None and is_first and (line := run.held_out.bigram_line(loss)):
        run.log.say(line)
    say_samples(run)


def train_steps(run: TrainingRun, stopper: Stopper) -> int:
    """Run steps start + 1 to last; returns GO_ON, or the reason for stopping before."""
    trainer, judge, devices = run.trainer, run.suspects.judge, run.trainer.mesh.devices.flatten()
    batches = run.stream.batches(run.start, run.last - run.start, trainer.local_rows)
    previous: DispatchedStep | None = None
    with contextlib.closing(batches):
        if run.batches.is_live:  # to make a batch is work of the run
            ahead = placed_when_due(partial(placed_by, run), batches)
        else:
            waited = run.host.waiting(run.wall.waiting(batches))
            ahead = placed_ahead(partial(placed_by, run), waited)
        ready = until_data_fails(run, ahead)
        for step, (batch, placed) in enumerate(ready, start=run.start + 1):
            run.profiler.begin(step)
            # Behind a step that is not accepted this one is held back.
            is_open = True if previous is None else previous.metrics["accepted"]
            run.diagnostics.ask_if_due(step, batch)
            run.watchdog.doing(f"dispatching step {step}")
            computed = dispatch(run, step, placed, is_open)
            host = run.host.gather(devices) if is_logged(run, step) else None
            agreed = stopper.ask(devices, run.saver.news())
            current = DispatchedStep(step, batch, computed, agreed, host)
            run.watchdog.dispatched(step)
            # The device computes the current step meanwhile.
            previous, is_settled = settle(run, previous)
            if is_settled:
                run.diagnostics.ask_if_due(step, batch)
                computed = trainer.step(batch, judge.most_loss())  # placed anew, in case
                current = dataclasses.replace(current, metrics=computed)
            stop_reason = complete(run, previous)
            run.replicas.ask_if_due(step)
            previous = current
            # The first step compiles, so the clock starts after it.
            must_settle = is_looked_at(run, step) or is_saved(run, step) or step == run.start + 1
            if stop_reason != GO_ON or must_settle or run.batches.is_live:
                stop_reason = max(stop_reason, complete(run, settle(run, current)[0]))
                previous = None
                if stop_reason != GO_ON:
                    return stop_reason  # `finish` evaluates and saves
                with run.clock.paused():
                    loss = look_at(run, step)
                    if is_saved(run, step):
                        save(run, step, loss)
                if loss is not None and run.held_out.early_stop.is_due:
                    return NO_BETTER
        complete(run, settle(run, previous)[0])
    return GO_ON


def dispatch(
    run: TrainingRun, step: int, batch: Batch, is_open: jax.Array | bool
) -> dict[str, jax.Array]:
    """The metrics of a step that the device goes on to compute; the first is compiled, and says so.

    `is_open`: see `Trainer.step`.
    """
    if is_first := step == run.start + 1:
        run.wall.switch("compile")
        run.log.say("compiling the training step, which takes minutes for a large model")
    began = time.monotonic()
    with run.host.dispatching():
        computed = run.trainer.step(batch, run.suspects.judge.most_loss(), is_open)
    run.wall.idle.dispatched(computed["loss"])
    if is_first:
        run.log.say(f"compiled in {duration(time.monotonic() - began)}; running step {step}")
    return computed


def placed_by(run: TrainingRun, batch: HostBatch) -> Batch:
    """`Trainer.place`; its time counts as that of dispatching."""
    with run.host.dispatching():
        return run.trainer.place(batch)


def is_evaluated(run: TrainingRun, step: int) -> bool:
    """Whether held-out data is evaluated after a step, but for the last, which `finish` does."""
    return _is_due(step, run.cfg.train.eval_interval) and step != run.last


def is_sampled(run: TrainingRun, step: int) -> bool:
    """Whether samples follow a step, but for the last."""
    return _is_due(step, run.cfg.train.sample_interval) and step != run.last


def is_scored(run: TrainingRun, step: int) -> bool:
    """Whether tasks are scored after a step, but for the last."""
    return _is_due(step, run.cfg.train.eval_tasks_interval) and step != run.last


def is_looked_at(run: TrainingRun, step: int) -> bool:
    """Whether the model is measured after a step, or its devices are."""
    is_measured = is_evaluated(run, step) or is_sampled(run, step) or is_scored(run, step)
    return is_measured or run.devices.is_due(step)


def look_at(run: TrainingRun, step: int) -> float | None:
    """Measure what is due after a step; returns the held-out loss, if it is."""
    loss = evaluate(run) if is_evaluated(run, step) else None
    if is_sampled(run, step):
        say_samples(run)
    if is_scored(run, step):
        score_tasks(run)
    if run.devices.is_due(step):
        record, line = run.devices.measure(run.trainer.mesh.devices.flat)
        run.log.keep_figures({"step": step, **record, "time": time.time()})
        if line:
            run.log.event(step, line)
    return loss


def is_saved(run: TrainingRun, step: int) -> bool:
    """Whether a checkpoint follows a step, in whatever tier, but for the last."""
    cfg = run.cfg.checkpoint
    is_due = _is_due(step, cfg.interval) or _is_due(step, cfg.local_interval)
    return is_due and step != run.last


def save(run: TrainingRun, step: int, held_out_loss: float | None) -> None:
    """Save a step whose replicas agree: in run.dir if that is due, else in the local tier."""
    with run.wall.spent("checkpoint", step=step):
        run.replicas.require_equal(step)
        if _is_due(step, run.cfg.checkpoint.interval):
            run.saver.save(held_out_loss)
        else:
            run.saver.save_local()
    run.wall.write()


def settle(
    run: TrainingRun, dispatched: DispatchedStep | None
) -> tuple[DispatchedStep | None, bool]:
    """(the step with its figures, whether it was suspect); the state is then the one after it.

    Raises `NonFiniteLoss` where the run must end.
    """
    if dispatched is None:
        return None, False
    run.watchdog.doing(f"waiting for the result of step {dispatched.step}")
    figures, is_suspect = run.suspects.settle(dispatched.step, dispatched.batch, dispatched.metrics)
    return dataclasses.replace(dispatched, figures=figures), is_suspect


def until_data_fails(run: TrainingRun, batches: Iterator[AheadBatch]) -> Iterator[AheadBatch]:
    """`batches` up to one that cannot be read: the error waits until the state is saved.

    With several processes it is raised at once, as the others would wait for this one's batch.
    """
    try:
        run.watchdog.doing("loading data")
        for batch in batches:
            yield batch
            run.watchdog.doing("loading data")
    except UserError as e:
        if jax.process_count() > 1:
            raise
        run.data_error = e


def complete(run: TrainingRun, dispatched: DispatchedStep | None) -> int:
    """Log the figures of a settled step; returns GO_ON or why to stop."""
    if dispatched is None:
        return GO_ON
    cfg, step = run.cfg, dispatched.step
    values = dispatched.figures
    run.watchdog.ended(step)
    if step == run.start + 1:
        take_folder(run)
        run.wall.switch(TRAINING)
    run.wall.trained(step)
    run.replicas.read(step)
    run.diagnostics.write(step)
    _, count = batch_range(cfg.train, step - 1)
    if values["accepted"]:
        run.trained += 1
        run.suspects.judge.accepted(values["loss"])
    run.clock.count(count * cfg.data.seq_length)
    with run.clock.paused() if run.profiler.is_last(step) else contextlib.nullcontext():
        run.profiler.end(step)
    if is_logged(run, step):
        record = training_record(run, step, values)
        hosts = figures_of(dispatched.host)
        if hosts is not None:
            record |= hosts.record(record["ms_per_step"])
            if line := run.host.slow_process(hosts, record["ms_per_step"]):
                run.log.event(step, line)
        if line := run.batches.line_at(step):
            run.log.event(step, line)
        run.log.write(record)
    return run.saver.react(int(dispatched.stop_reason))


def training_record(run: TrainingRun, step: int, values: dict[str, float]) -> metrics.Record:
    """The log record of a step; its speed is that since the record before."""
    cfg = run.cfg
    first, count = batch_range(cfg.train, step - 1)
    steps, tokens, seconds = run.clock.lap()
    record = {
        "step": step,
        "loss": values["loss"],
        "grad_norm": values["grad_norm"],
        "lr": rates_of_step(cfg, step - 1, values.get("skipped_samples", 0)).learning_rate,
        "samples": first + count,
        "tokens": (first + count) * cfg.data.seq_length,
        "ms_per_step": 1000 * seconds / steps if steps else None,
    }
    record |= {name: value for name, value in values.items() if name not in STEP_METRICS}
    if steps:
        record |= metrics.speed(cfg, tokens, seconds)
    record |= run.batches.figures_at(step)
    record["memory_gb"] = metrics.peak_memory_gb()
    record["goodput"] = run.wall.goodput()
    record["time"] = time.time()
    return record


def evaluate(run: TrainingRun) -> float | None:
    """The held-out loss, which is logged once a step; None without held-out data."""
    if run.held_out is None:
        return None
    step = run.trainer.step_number
    if run.held_out.last_step == step:  # as the run stops for it
        return run.held_out.last_loss
    run.watchdog.doing("evaluating")
    with run.wall.spent("evaluation", step=step):
        record = run.held_out.loss(run.watchdog.beat)
    run.log.write({"step": step, **record, "time": time.time()})
    if record["eval_loss"] is None:
        run.log.event(step, run.held_out.nothing())
    return record["eval_loss"]


def say_samples(run: TrainingRun) -> None:
    """Print what the model says to the prompts of the run, if it has any."""
    if run.samples is None:
        return
    run.watchdog.doing("sampling")
    with run.wall.spent("evaluation"):
        for line in run.samples.lines():
            run.log.say(line)


def score_tasks(run: TrainingRun) -> None:
    """Score the tasks of the run, if it has any."""
    if run.tasks is None:
        return
    step = run.trainer.step_number
    run.watchdog.doing("scoring tasks")
    with run.wall.spent("evaluation", step=step):
        scores = run.tasks.scores(run.trainer.params(), run.watchdog.beat)
    run.log.keep_figures({"step": step, **scores, "time": time.time()})
    for name, value in scores.items():
        run.log.say(f"step {step}: {name} {value:.4f}")


def measure_test(run: TrainingRun) -> None:
    """Measure the loss of the third share of the data, if the run is to."""
    if run.test is None:
        return
    step = run.trainer.step_number
    run.watchdog.doing("measuring the test loss")
    with run.wall.spent("evaluation", step=step):
        found = losses_of(run.trainer, run.test, run.cfg.train.test_steps, run.watchdog.beat)
    record = {f"test_{name}": value for name, value in found.items()}
    run.log.keep_figures({"step": step, **record, "time": time.time()})
    loss, tokens = found["loss"], found["tokens"]
    run.log.say(f"test loss {'none' if loss is None else f'{loss:.4f}'} over {tokens:,} tokens")


def finish(run: TrainingRun, stop_reason: int) -> float | None:
    """Evaluate (a signal leaves no time for it), save, say how it ended; the held-out loss."""
    if run.data_error is not None and run.trainer.step_number == run.start:
        raise run.data_error
    is_hurried = stop_reason == SIGNALED or run.data_error is not None
    loss = None if is_hurried else evaluate(run)
    with run.wall.spent("checkpoint", step=run.trainer.step_number):
        run.replicas.require_equal(run.trainer.step_number)
        run.saver.save_last(loss)
        run.trainer.checkpoints.clear_local()
    run.watchdog.beat()
    if not is_hurried:
        measure_test(run)
        score_tasks(run)
    if stop_reason in (GO_ON, NO_BETTER):
        run.wall.end()
    if run.data_error is not None:
        raise run.data_error
    end = "finished" if stop_reason == GO_ON else "stopped"
    line = f"{end} at step {run.trainer.step_number} of {run.last}"
    if stop_reason != GO_ON:
        line += f": {REASONS[stop_reason]}"
    run.log.say(f"{line}; checkpoint: {run.saver.last_checkpoint()}")
    if line := trained_nothing(run):
        run.log.event(run.trainer.step_number, line)
    return loss


def is_logged(run: TrainingRun, step: int) -> bool:
    """Whether the figures of a step are written; every process knows."""
    return _is_due(step, run.cfg.log.interval) or step in (run.start + 1, run.last)


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
