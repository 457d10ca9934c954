"""The training run, top to bottom: folder, state, data, steps, held-out loss, checkpoints, end.

Invariants: the batch of a step is a pure function of (config, seed, step), so a resumed run needs
the step number alone; metrics are fetched one step late, so the device always has the next step
queued; what a checkpoint or a log line shows has passed the check for finite numbers.
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
from mjax.optim.schedule import batch_range, consumed_samples, learning_rate
from mjax.pretrained import source_of
from mjax.sharding.spec import count_parameters
from mjax.train import metrics
from mjax.train.resilience import GO_ON, REASONS, SIGNALED, NonFiniteLoss, Stopper, Watchdog
from mjax.train.trainer import Trainer

BIGRAM_TOKENS = 20_000_000  # at most so many training tokens make the bigram table


@dataclass
class TrainingRun:
    """What the functions below share."""

    trainer: Trainer
    log: metrics.Log
    held_out: Dataset | None
    start: int  # steps completed before this process
    last: int  # step to stop after
    watchdog: Watchdog
    clock: metrics.Clock = field(default_factory=metrics.Clock)

    @property
    def cfg(self) -> Config:
        return self.trainer.cfg


@dataclass(frozen=True)
class InFlight:
    """A dispatched step: its metrics and the answer of all processes to "stop?", on the device."""

    step: int
    metrics: dict[str, jax.Array]
    ask: jax.Array | int


def train(cfg: Config, mesh: Mesh | None = None) -> None:
    """Train as `cfg` says until steps, tokens, time or a signal end it, resuming if run.dir can.

    Raises `UserError` for what a user can mend and `NonFiniteLoss` when training diverges.
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
                why = train_steps(run, train_data, stopper)
                loss = finish(run, why)
            if why != SIGNALED:
                compare_with_bigram(run, loss)
                if prompt is not None:
                    log.say(f"sample: {sample_text(trainer, *prompt, cfg.train.sample_tokens)}")


def train_steps(run: TrainingRun, dataset: Dataset, stopper: Stopper) -> int:
    """Run steps start+1 to last; returns GO_ON, or why it stopped before."""
    cfg, trainer = run.cfg, run.trainer
    batches = make_loader(
        dataset,
        partial(batch_range, cfg.train),
        run.start,
        run.last - run.start,
        rows=trainer.local_rows,
        prefetch=cfg.data.prefetch,
        workers=cfg.data.workers,
    )
    before: InFlight | None = None
    with contextlib.closing(batches):
        for step, batch in enumerate(batches, start=run.start + 1):
            now = InFlight(step, trainer.step(batch), stopper.ask())
            why = settle(run, before)  # the device is busy with this step meanwhile
            before = now
            to_save = _due(step, cfg.checkpoint.interval)
            to_evaluate = _due(step, cfg.train.eval_interval) and step != run.last
            # The first step compiles, so the clock starts after it.
            if why != GO_ON or to_save or to_evaluate or step == run.start + 1:
                why = max(why, settle(run, now))
                before = None
                with run.clock.paused():
                    if to_save:
                        trainer.save()
                    if to_evaluate and why == GO_ON:
                        held_out_loss(run)
            if why != GO_ON:
                return why
        settle(run, before)
    return GO_ON


def settle(run: TrainingRun, flight: InFlight | None) -> int:
    """Wait for a dispatched step, check its numbers and log it; returns whether to stop."""
    if flight is None:
        return GO_ON
    cfg, step = run.cfg, flight.step
    got = {name: value.item() for name, value in jax.device_get(flight.metrics).items()}
    run.watchdog.beat()
    first, count = batch_range(cfg.train, step - 1)
    if not got["finite"]:
        raise NonFiniteLoss(
            f"step {step}: loss {got['loss']}, norm {got['grad_norm']}, on samples {first} "
            f"to {first + count - 1} of the data order; last good checkpoint: "
            f"{last_checkpoint(run.trainer)}; start again to resume there, with a lower "
            "schedule.lr if it recurs"
        )
    run.clock.count(count * cfg.data.seq_length)
    if _due(step, cfg.log.interval) or step in (run.start + 1, run.last):
        steps, tokens, seconds = run.clock.lap()
        record = {
            "step": step,
            "loss": got["loss"],
            "grad_norm": got["grad_norm"],
            "lr": learning_rate(cfg.schedule, cfg.train, first),
            "samples": first + count,
            "tokens": (first + count) * cfg.data.seq_length,
            "ms_per_step": 1000 * seconds / steps if steps else None,
        }
        record |= {"aux_loss": got["aux_loss"]} if cfg.model.router_aux_loss_coef else {}
        record |= metrics.speed(cfg, tokens, seconds) if steps else {}
        run.log.write(record | {"memory_gb": metrics.peak_memory_gb(), "time": time.time()})
    return int(flight.ask)


def finish(run: TrainingRun, why: int) -> float | None:
    """Save, evaluate (a signal leaves no time for it), say how it ended; the held-out loss."""
    run.trainer.save()
    loss = held_out_loss(run) if why != SIGNALED else None
    run.trainer.store.wait()
    run.watchdog.beat()
    run.log.say(
        f"{'stopped' if why else 'finished'} at step {run.trainer.step_number} of {run.last}"
        f"{': ' + REASONS[why] if why else ''}; checkpoint: {last_checkpoint(run.trainer)}"
    )
    return loss


def held_out_loss(run: TrainingRun) -> float | None:
    """Held-out loss in nats per token, over the same batches every time; None if not asked for."""
    if run.held_out is None:
        return None
    sums: list = []
    for batch in held_out_batches(run, run.trainer.local_rows):
        sums.append(run.trainer.evaluate(batch))
        run.watchdog.beat()
        if len(sums) > 1:  # one late, so that no more than two batches wait on the device
            sums[-2] = jax.device_get(sums[-2])
    nll, tokens = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    loss = float(nll / max(tokens, 1))
    step = run.trainer.step_number
    run.log.write(
        {"step": step, "eval_loss": loss, "eval_tokens": int(tokens), "time": time.time()}
    )
    return loss


def held_out_samples(cfg: Config) -> int:
    return cfg.train.eval_steps * cfg.train.global_batch_size if cfg.train.eval_interval else 0


def held_out_batches(
    run: TrainingRun, rows: Callable[[int], slice] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    size, data = run.cfg.train.global_batch_size, run.cfg.data
    return make_loader(
        run.held_out,
        lambda i: (i * size, size),
        0,
        run.cfg.train.eval_steps,
        rows=rows,
        prefetch=data.prefetch,
        workers=data.workers,
    )


@contextlib.contextmanager
def run_folder(cfg: Config) -> Iterator[Path]:
    """run.dir, proven writable; a new one is taken away again if nothing was put in it."""
    folder = Path(cfg.run.dir)
    new = not folder.exists()
    ensure_writable(folder)
    try:
        yield folder
    finally:
        if jax.process_index() == 0 and new:
            if not {p.name for p in folder.iterdir()} - {"data.lock"}:
                shutil.rmtree(folder)


def resume(trainer: Trainer) -> str:
    """Restore the newest checkpoint if checkpoint.resume allows it; says what was done."""
    cfg, store = trainer.cfg, trainer.store
    if cfg.checkpoint.resume == "never":
        old = store.set_aside()
        return begin(trainer) + (f"; earlier checkpoints are now in {old}" if old else "")
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
    """Load the weights that checkpoint.init_from names, if any; says what was done."""
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
    steps = range(cfg.train.steps)
    return bisect.bisect_left(steps, samples, key=lambda n: consumed_samples(cfg.train, n))


def last_checkpoint(trainer: Trainer) -> str:
    """Path of the newest checkpoint, once it is written, or 'none'."""
    trainer.store.wait()
    step = trainer.store.latest_step()
    return "none" if step is None else str(trainer.store.directory / str(step))


def run_summary(trainer: Trainer) -> str:
    """Two lines on what is about to run."""
    cfg = trainer.cfg
    mesh = " ".join(f"{a}={n}" for a, n in trainer.mesh.shape.items() if n > 1) or "one device"
    count = count_parameters(trainer.specs)
    return (
        f"{count:,} parameters, {flops_per_token(cfg.model, cfg.data.seq_length):.4g} "
        f"FLOPs a token, {cfg.train.global_batch_size} x {cfg.data.seq_length} tokens a step\n"
        f"{trainer.mesh.size} x {trainer.mesh.devices.flat[0].device_kind} ({mesh}), "
        f"folder {cfg.run.dir}" + (f"\n{trainer.why}" if trainer.why else "")
    )


def read_prompt(cfg: Config) -> tuple[Tokenizer, list[int]] | None:
    """The tokenizer and the ids of train.sample_prompt; `UserError` now if it cannot be continued
    at the end of the run."""
    text, new = cfg.train.sample_prompt, cfg.train.sample_tokens
    if text is None:
        return None
    spec = cfg.data.tokenizer
    if cfg.data.text:
        spec = prepare_text(cfg.data, cfg.run.dir).tokenizer_path
    if spec is None:
        raise UserError("train.sample_prompt needs a tokenizer; set data.tokenizer")
    tokenizer = load_tokenizer(spec)
    ids = tokenizer.encode(text)
    if not ids or len(ids) + new > cfg.model.max_position_embeddings:
        raise UserError(
            f"train.sample_prompt of {len(ids)} tokens and train.sample_tokens={new} do not fit 1 "
            f"to model.max_position_embeddings={cfg.model.max_position_embeddings}; change one"
        )
    return tokenizer, ids


def compare_with_bigram(run: TrainingRun, loss: float | None) -> None:
    """Print the held-out loss on data.text beside what a table of token pairs reaches there."""
    cfg = run.cfg
    if loss is None or not cfg.data.text or jax.process_index() != 0:
        return
    corpus = prepare_text(cfg.data, cfg.run.dir)
    seen = split_tokens(corpus.prefix, "train", cfg.data.split)[:BIGRAM_TOKENS]
    rows = [np.column_stack([b["tokens"], b["labels"][:, -1]]) for b in held_out_batches(run)]
    bigram = bigram_cross_entropy(seen, np.concatenate(rows), cfg.model.vocab_size)
    run.log.say(
        f"held-out loss {loss:.4f}, bigram cross-entropy of the same tokens {bigram:.4f} nats"
    )


def sample_text(trainer: Trainer, tokenizer: Tokenizer, prompt: list[int], n: int) -> str:
    """`prompt` and `n` more tokens drawn from the model, as text."""
    model, dtype = trainer.cfg.model, trainer.cfg.precision.compute
    generator = Generator(trainer.definition, trainer.params(), model, dtype=dtype)
    made = generator.complete([prompt], n, Sampling(temperature=0.8))[0]
    return tokenizer.decode([*prompt, *made.ids])


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
