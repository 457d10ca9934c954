"""The training run, top to bottom: folder, state, data, steps, held-out loss, checkpoints, end.

Invariants: The batch of a step is a pure function of (config, seed, step), so a resumed run needs
the step number alone. Metrics are fetched one step late, so the device always has the next step
queued. Checkpoints and log lines come from steps that have passed the check for finite numbers.
"""

import bisect
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.checkpoint.store import ensure_writable
from mjax.config.load import dump
from mjax.config.schema import Config
from mjax.data.bigram import bigram_cross_entropy
from mjax.data.gpt import split_tokens
from mjax.data.loader import Dataset, build_datasets, make_loader
from mjax.data.text import prepare_text
from mjax.data.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError
from mjax.infer.generate import Generator
from mjax.infer.sample import Sampling
from mjax.models.flops import flops_per_token
from mjax.models.objective import NEXT_TOKEN, FieldMaker, HostBatch, Objective
from mjax.optim.schedule import batch_range, consumed_samples, learning_rate
from mjax.pretrained import source_of
from mjax.sharding.spec import count_frozen, count_parameters
from mjax.train import metrics
from mjax.train.resilience import GO_ON, REASONS, SIGNALED, NonFiniteLoss, Stopper, Watchdog
from mjax.train.trainer import Trainer

MAX_BIGRAM_TOKENS = 20_000_000  # training tokens that the bigram table is made from


# Metrics of a step that a record has in places of their own, or not at all.
STEP_METRICS = frozenset({"loss", "grad_norm", "tokens", "finite"})


@dataclass
class TrainingRun:
    """A training run in this process.

    held_out: data for the held-out loss, or None.
    start: steps completed before this process. last: the step to stop after.
    """

    trainer: Trainer
    log: metrics.Log
    held_out: Dataset | None
    start: int
    last: int
    watchdog: Watchdog
    clock: metrics.Clock = field(default_factory=metrics.Clock)

    @property
    def cfg(self) -> Config:
        return self.trainer.cfg


@dataclass(frozen=True)
class DispatchedStep:
    """A step that the device may still be computing.

    metrics: scalars on the device. stop_reason: GO_ON or why all processes stop, on the device.
    """

    step: int
    metrics: dict[str, jax.Array]
    stop_reason: jax.Array | int


def train(cfg: Config, mesh: Mesh | None = None) -> None:
    """Train as `cfg` says until steps, tokens, time or a signal end it, resuming if run.dir can.

    Raises `UserError` for mistakes of the user and `NonFiniteLoss` when training diverges.
    """
    stopper = Stopper(cfg.train.max_minutes)
    metrics.require_sinks(cfg.log)
    trainer = Trainer(cfg, mesh)
    cfg = trainer.cfg  # mesh: auto is resolved in it
    with run_folder(cfg) as folder:
        note = resume(trainer)
        last = final_step(cfg)
        train_data, held_out = build_datasets(
            cfg, consumed_samples(cfg.train, last), held_out_samples(cfg)
        )
        for data in filter(None, (train_data, held_out)):
            trainer.bound_documents(data.max_documents)
        prompt = read_prompt(cfg)
        if trainer.state is None:
            trainer.init()
        if jax.process_index() == 0:
            (folder / "config.yaml").write_text(dump(cfg), encoding="utf-8")
        log = metrics.Log(cfg, folder, last, trainer.step_number)
        watchdog = Watchdog(cfg.train.step_timeout_minutes)
        run = TrainingRun(trainer, log, held_out, trainer.step_number, last, watchdog)
        with contextlib.closing(log):
            log.say(run_summary(trainer))
            log.say(note)
            if run.start >= last:
                log.say(f"nothing left to train: step {run.start} of {last}; raise train.steps")
                return
            with stopper, watchdog:
                stop_reason = train_steps(run, train_data, stopper)
                loss = finish(run, stop_reason)
            if stop_reason != SIGNALED:
                compare_with_bigram(run, loss)
                if prompt is not None:
                    log.say(f"sample: {sample_text(trainer, *prompt, cfg.train.sample_tokens)}")


def train_steps(run: TrainingRun, dataset: Dataset, stopper: Stopper) -> int:
    """Run steps start + 1 to last; returns GO_ON, or the reason for stopping before."""
    cfg, trainer = run.cfg, run.trainer
    batches = make_loader(
        dataset,
        partial(batch_range, cfg.train),
        run.start,
        run.last - run.start,
        rows=trainer.local_rows,
        make_fields=field_maker(cfg, trainer.objective),
        prefetch=cfg.data.prefetch,
        workers=cfg.data.workers,
    )
    previous: DispatchedStep | None = None
    with contextlib.closing(batches):
        for step, batch in enumerate(batches, start=run.start + 1):
            current = DispatchedStep(step, trainer.step(batch), stopper.ask())
            stop_reason = complete(run, previous)  # the device computes the current step meanwhile
            previous = current
            to_save = _is_due(step, cfg.checkpoint.interval)
            to_evaluate = _is_due(step, cfg.train.eval_interval) and step != run.last
            # The first step compiles, so the clock starts after it.
            if stop_reason != GO_ON or to_save or to_evaluate or step == run.start + 1:
                stop_reason = max(stop_reason, complete(run, current))
                previous = None
                with run.clock.paused():
                    if to_save:
                        trainer.save()
                    if to_evaluate and stop_reason == GO_ON:
                        held_out_loss(run)
            if stop_reason != GO_ON:
                return stop_reason
        complete(run, previous)
    return GO_ON


def complete(run: TrainingRun, dispatched: DispatchedStep | None) -> int:
    """Wait for a dispatched step, check and log its metrics; returns GO_ON or why to stop."""
    if dispatched is None:
        return GO_ON
    cfg, step = run.cfg, dispatched.step
    on_host = jax.device_get(dispatched.metrics)
    values = {name: value.item() for name, value in on_host.items()}
    run.watchdog.beat()
    first, count = batch_range(cfg.train, step - 1)
    if not values["finite"]:
        raise NonFiniteLoss(
            f"step {step}: loss {values['loss']}, norm {values['grad_norm']}, on samples {first} "
            f"to {first + count - 1} of the data order; last good checkpoint: "
            f"{last_checkpoint(run.trainer)}; start again to resume there, with a lower "
            "schedule.lr if it recurs"
        )
    run.clock.count(count * cfg.data.seq_length)
    if _is_due(step, cfg.log.interval) or step in (run.start + 1, run.last):
        run.log.write(training_record(run, step, values))
    return int(dispatched.stop_reason)


def training_record(run: TrainingRun, step: int, values: dict[str, float]) -> metrics.Record:
    """The log record of a step; its speed is that since the record before."""
    cfg = run.cfg
    first, count = batch_range(cfg.train, step - 1)
    steps, tokens, seconds = run.clock.lap()
    record = {
        "step": step,
        "loss": values["loss"],
        "grad_norm": values["grad_norm"],
        "lr": learning_rate(cfg.schedule, cfg.train, first),
        "samples": first + count,
        "tokens": (first + count) * cfg.data.seq_length,
        "ms_per_step": 1000 * seconds / steps if steps else None,
    }
    record |= {name: value for name, value in values.items() if name not in STEP_METRICS}
    if steps:
        record |= metrics.speed(cfg, tokens, seconds)
    record["memory_gb"] = metrics.peak_memory_gb()
    record["time"] = time.time()
    return record


def finish(run: TrainingRun, stop_reason: int) -> float | None:
    """Save, evaluate (a signal leaves no time for it), say how it ended; the held-out loss."""
    run.trainer.save()
    loss = held_out_loss(run) if stop_reason != SIGNALED else None
    run.trainer.store.wait()
    run.watchdog.beat()
    end = "finished" if stop_reason == GO_ON else "stopped"
    line = f"{end} at step {run.trainer.step_number} of {run.last}"
    if stop_reason != GO_ON:
        line += f": {REASONS[stop_reason]}"
    run.log.say(f"{line}; checkpoint: {last_checkpoint(run.trainer)}")
    return loss


def held_out_loss(run: TrainingRun) -> float | None:
    """The loss on held-out data, of next tokens in nats; None without such data.

    It is also logged. The batches are the same every time.
    """
    if run.held_out is None:
        return None
    sums: list = []
    for batch in held_out_batches(run, run.trainer.local_rows):
        sums.append(run.trainer.evaluate(batch))
        run.watchdog.beat()
        if len(sums) > 1:  # one late, so that no more than two batches wait on the device
            sums[-2] = jax.device_get(sums[-2])
    sums = jax.device_get(sums)
    total, count = np.sum(sums, axis=0, dtype=np.float64)
    loss = float(total / max(count, 1))
    step = run.trainer.step_number
    run.log.write({"step": step, "eval_loss": loss, "eval_tokens": int(count), "time": time.time()})
    return loss


def field_maker(cfg: Config, objective: Objective) -> Callable | None:
    """The `make_fields` of `make_loader` for this objective; None: a data set has its fields."""
    if not isinstance(objective, FieldMaker):
        return None

    def make_fields(batch: HostBatch, step: int, rows: np.ndarray) -> HostBatch:
        return objective.make_fields(batch, cfg.run.seed, step, rows)

    return make_fields


def held_out_samples(cfg: Config) -> int:
    """The number of sequences that one evaluation reads."""
    if cfg.train.eval_interval is None:
        return 0
    return cfg.train.eval_steps * cfg.train.global_batch_size


def held_out_batches(
    run: TrainingRun, rows: Callable[[int], slice] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """The batches of one evaluation, numpy [B, S] fields; `rows`: the part of this process."""
    size, data = run.cfg.train.global_batch_size, run.cfg.data

    def samples(batch: int) -> tuple[int, int]:
        return batch * size, size

    return make_loader(
        run.held_out,
        samples,
        0,
        run.cfg.train.eval_steps,
        rows=rows,
        make_fields=field_maker(run.cfg, run.trainer.objective),
        prefetch=data.prefetch,
        workers=data.workers,
    )


@contextlib.contextmanager
def run_folder(cfg: Config) -> Iterator[Path]:
    """run.dir, proven writable; a new one is removed again if it stays empty."""
    folder = Path(cfg.run.dir)
    is_new = not folder.exists()
    ensure_writable(folder)
    try:
        yield folder
    finally:
        if jax.process_index() == 0 and is_new:
            names = {path.name for path in folder.iterdir()}
            if not names - {"data.lock"}:
                shutil.rmtree(folder)


def resume(trainer: Trainer) -> str:
    """Restore the newest checkpoint if checkpoint.resume allows it; returns a line that says so."""
    cfg, store = trainer.cfg, trainer.store
    if cfg.checkpoint.resume == "never":
        old_folder = store.set_aside()
        line = begin(trainer)
        return f"{line}; earlier checkpoints are now in {old_folder}" if old_folder else line
    if store.latest_step() is not None:
        step = trainer.restore()
        return f"resumed from {store.directory / str(step)}"
    if cfg.checkpoint.resume == "require":
        raise UserError(
            f"checkpoint.resume=require, but {store.directory} holds no checkpoint; set "
            "checkpoint.resume=auto to start at step 0"
        )
    return begin(trainer)


def begin(trainer: Trainer) -> str:
    """Load the weights that checkpoint.init_from names, if any; returns a line that says so."""
    weights = trainer.cfg.checkpoint.init_from
    if weights is None:
        return "starting at step 0"
    trainer.load_params(source_of(weights))
    return f"starting at step 0 from the weights in {weights}"


def final_step(cfg: Config) -> int:
    """train.steps, or the first step at which train.max_tokens tokens have been consumed."""
    if cfg.train.max_tokens is None:
        return cfg.train.steps
    samples = -(-cfg.train.max_tokens // cfg.data.seq_length)

    def consumed(step: int) -> int:
        return consumed_samples(cfg.train, step)

    return bisect.bisect_left(range(cfg.train.steps), samples, key=consumed)


def last_checkpoint(trainer: Trainer) -> str:
    """The path of the newest checkpoint, once it is written, or 'none'."""
    trainer.store.wait()
    step = trainer.store.latest_step()
    return "none" if step is None else str(trainer.store.directory / str(step))


def run_summary(trainer: Trainer) -> str:
    """Lines on the model and the mesh of a run, and on what was chosen for "auto"."""
    cfg, mesh = trainer.cfg, trainer.mesh
    flops = flops_per_token(cfg.model, cfg.data.seq_length)
    axes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    shape = " ".join(axes) or "one device"
    parameters = f"{count_parameters(trainer.specs):,} parameters"
    if cfg.train.freeze:
        parameters += f" ({count_frozen(trainer.specs):,} frozen)"
    lines = [
        f"{parameters}, {flops:.4g} FLOPs a token, "
        f"{cfg.train.global_batch_size} x {cfg.data.seq_length} tokens a step",
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({shape}), folder {cfg.run.dir}",
    ]
    if trainer.why:
        lines.append(trainer.why)
    return "\n".join(lines)


def read_prompt(cfg: Config) -> tuple[Tokenizer, list[int]] | None:
    """(the tokenizer, the ids of train.sample_prompt); None without a prompt.

    Raises `UserError` if the prompt cannot be continued at the end of the run.
    """
    text, count = cfg.train.sample_prompt, cfg.train.sample_tokens
    if text is None:
        return None
    name = cfg.data.tokenizer
    if cfg.data.text:
        name = prepare_text(cfg.data, cfg.run.dir).tokenizer_path
    if name is None:
        raise UserError("train.sample_prompt needs a tokenizer; set data.tokenizer")
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    if not ids or len(ids) + count > cfg.model.max_position_embeddings:
        raise UserError(
            f"train.sample_prompt of {len(ids)} tokens and train.sample_tokens={count} do not fit "
            f"1 to model.max_position_embeddings={cfg.model.max_position_embeddings}; change one"
        )
    return tokenizer, ids


def compare_with_bigram(run: TrainingRun, loss: float | None) -> None:
    """Print the held-out loss on data.text beside what a table of token pairs reaches there."""
    cfg = run.cfg
    is_next_token = cfg.train.objective == NEXT_TOKEN  # another loss is not comparable
    if loss is None or not is_next_token or not cfg.data.text or jax.process_index() != 0:
        return
    corpus = prepare_text(cfg.data, cfg.run.dir)
    training_tokens = split_tokens(corpus.prefix, "train", cfg.data.split)
    rows = []
    for batch in held_out_batches(run):
        last_label = batch["labels"][:, -1]
        rows.append(np.column_stack([batch["tokens"], last_label]))
    bigram = bigram_cross_entropy(
        training_tokens[:MAX_BIGRAM_TOKENS], np.concatenate(rows), cfg.model.vocab_size
    )
    run.log.say(
        f"held-out loss {loss:.4f}, bigram cross-entropy of the same tokens {bigram:.4f} nats"
    )


def sample_text(trainer: Trainer, tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    """`prompt` and `count` tokens drawn from the model after it, as text."""
    model, dtype = trainer.cfg.model, trainer.cfg.precision.compute
    generator = Generator(trainer.definition, trainer.params(), model, dtype=dtype)
    (completion,) = generator.complete([prompt], count, Sampling(temperature=0.8))
    return tokenizer.decode([*prompt, *completion.ids])


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
