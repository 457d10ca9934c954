"""`python -m mjax.bench train --config X [a.b=c ...]`: the speed of the training step, as JSON.

Real training steps of the trainer on random tokens (one document per sequence unless `--documents`
says otherwise), after warm-up; the median step counts. As in training, a step is handed to the
device while the one before still runs. `--breakdown` profiles a few more steps and prints where
their time goes; `--startup` measures the seconds to the first step, cold and warm. Preferences are
of random pairs, or of equal ones with `--documents`; a step computes the reference of its batch.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np

from mjax.bench import breakdown, report
from mjax.config import Config, load
from mjax.data.loader import tokens_to_read
from mjax.errors import CommandParser, UserError, at_least
from mjax.post.preference_batches import add_roles
from mjax.post.preferences.mock_answers import equal_answers, require_pairs
from mjax.run.monitor.metrics import peak_memory_gb, speed
from mjax.train import Trainer
from mjax.train.batch import field_maker, placed_ahead


def main(argv: list[str]) -> int:
    parser = CommandParser("bench train", description=__doc__)
    parser.add_argument("--steps", type=at_least(1), default=20, help="measured steps")
    parser.add_argument("--warmup", type=at_least(0), default=10, help="steps before them")
    parser.add_argument("--documents", type=at_least(1), default=1, help="documents per sequence")
    parser.add_argument("--breakdown", action="store_true", help="profile: where the time goes")
    longest = "and the N longest kernels"
    parser.add_argument("--top", type=at_least(0), default=0, metavar="N", help=longest)
    parser.add_argument(
        "--startup", action="store_true", help="seconds to the first step with an empty cache, then"
    )
    args = report.parse_with_config(parser, argv)
    cfg = load(args.config, args.overrides)
    before = startup(args) if args.startup else {}  # before this process takes the devices
    profiled = 3 if args.breakdown or args.top else 0
    record = measure_training(cfg, args.steps, args.warmup, args.documents, profiled, args.top)
    if jax.process_index() == 0:
        explain(record)
    return report.report(args, [record | before])


def measure_training(
    cfg: Config, steps: int, warmup: int, documents: int = 1, profiled: int = 0, longest: int = 0
) -> dict:
    """Run 1 + `warmup` + `steps` training steps and `profiled` more; the record."""
    trainer = Trainer(cfg)
    trainer.init()
    if trainer.cfg.train.objective == "preference":
        add_roles(trainer)
    batch = batch_of(trainer, documents)
    say_progress("compiling the training step")
    start = time.perf_counter()
    jax.block_until_ready(trainer.step(batch))
    first, since = time.perf_counter() - start, report.process_seconds()
    say_progress(f"the first step took {first:.1f} s; measuring {steps} steps after {warmup}")
    times, metrics = step_seconds(trainer, batch, warmup, steps)
    loss, memory = float(metrics["loss"]), peak_memory_gb()
    cfg, seconds = trainer.cfg, statistics.median(times)
    rates = speed(cfg, batch["tokens"].size, seconds)
    record = {
        "bench": "train",
        "case": case(trainer, documents),
        "ms": round(1e3 * seconds, 3),
        "ms_range": [round(1e3 * f(times), 3) for f in (min, max)],
        "steps": steps,
        **{k: v if v is None else round(v, 4) for k, v in rates.items()},
        "memory_gb": memory,
        "first_step_s": round(first, 1),
        "start_s": since and round(since, 1),
        "loss": loss,
    }
    if profiled:
        if jax.default_backend() == "gpu":
            say_progress(f"{record['ms']} ms a step; now compiling to profile")
            trainer.programs.recompile(breakdown.XLA_OPTIONS)
            jax.clear_caches()
            jax.block_until_ready(trainer.step(batch))
        results = steps_on(trainer, batch)
        events, text = breakdown.profile(lambda: list(itertools.islice(results, profiled)))
        record["breakdown"] = breakdown.breakdown(events, text, profiled) if events else None
        record["top"] = breakdown.top(events, text, profiled, longest) if events else None
    return record


def say_progress(line: str) -> None:
    """Print a line of progress on stderr, in the first process alone."""
    if jax.process_index() == 0:
        print(f"mjax: {line}", file=sys.stderr, flush=True)


def explain(record: dict) -> None:
    """The tables of a record's profile on stderr, or why there is none."""
    if "breakdown" not in record:
        return
    if record["breakdown"] is None:
        print(
            "mjax: no breakdown: the profile has no plane of a device; it needs an NVIDIA GPU and "
            "a CUPTI library that jax can load",
            file=sys.stderr,
        )
        return
    title = f"of a step, which takes {record['ms']} ms when not profiled"
    rows = [row | {"share": f"{row['share']:.1%}"} for row in record["breakdown"]]
    report.show_table(rows, f"where the time goes: ms {title}")
    if record["top"]:
        report.show_table(record["top"], f"longest instructions: ms {title}")


def step_seconds(
    trainer: Trainer, batch: dict[str, np.ndarray], warmup: int, steps: int
) -> tuple[list[float], dict[str, jax.Array]]:
    """Seconds between the ends of `steps` steps, and the last one's metrics.

    On GPUs one step is queued ahead, and each batch is placed before the step in front of it, as in
    training; CPU devices may not mix two programs.
    """
    ahead = trainer.mesh.devices.flat[0].platform != "cpu"
    results = steps_on(trainer, batch)
    queued = next(results)
    ends = []
    for _ in range(1 + warmup + steps):
        last, queued = queued, next(results) if ahead else None
        jax.block_until_ready(last)
        ends.append(time.perf_counter())
        queued = queued or next(results)
    jax.block_until_ready(queued)  # not timed: where a launch queue is full it has ended already
    return list(np.diff(ends)[-steps:]), queued


def steps_on(trainer: Trainer, batch: dict[str, np.ndarray]) -> Iterator[dict[str, jax.Array]]:
    """The metrics of step after step on the same batch."""
    ahead = placed_ahead(trainer.place, itertools.repeat(batch))
    return (trainer.step(placed) for _, placed in ahead)


def case(trainer: Trainer, documents: int) -> dict:
    """The facts that two runs must share to be compared."""
    cfg = trainer.cfg
    losses = cfg.train.objective == "preference" and "+".join(cfg.preference.losses)
    further = {"target": cfg.data.target_length, "preference": losses}
    return {name: fact for name, fact in further.items() if fact} | {
        "layers": cfg.model.num_hidden_layers,
        "hidden": cfg.model.hidden_size,
        "vocab": cfg.model.vocab_size,
        "seq": cfg.data.seq_length,
        "global_batch": cfg.train.global_batch_size,
        "micro_batch": cfg.train.micro_batch_size,
        "documents": documents,
        "remat": cfg.train.remat,
        "offload": cfg.train.offload,
        "moments": "host" if cfg.optimizer.offload else "device",
        "fp8": cfg.precision.fp8 + ("" if cfg.precision.fp8_backend == "xla" else ", te"),
        "zero": cfg.mesh.zero,
        "lora_rank": cfg.lora.rank,
        "mesh": {axis: size for axis, size in trainer.mesh.shape.items() if size > 1},
        "devices": trainer.mesh.size,
    }


def startup(args: argparse.Namespace) -> dict[str, float]:
    """Seconds from process start to the end of the first step, in two processes that share a
    compilation cache that starts empty."""
    command = [sys.executable, "-m", "mjax.bench", "train", "--steps=1", "--warmup=0"]
    command += [f"--config={args.config}"] if args.config else []
    command += [f"--documents={args.documents}", *args.overrides]
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        for name in ("start_cold_s", "start_warm_s"):
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise UserError(f"--startup: a run of one step failed: {last}")
            found[name] = json.loads(done.stdout.splitlines()[-1])["start_s"]
    return found


def batch_of(trainer: Trainer, documents: int = 1) -> dict[str, np.ndarray]:
    """`random_batch`, with the fields that the trainer's objective makes."""
    batch = random_batch(trainer.cfg, documents)
    if documents > 1 and trainer.cfg.train.objective == "preference":
        require_pairs(trainer.cfg)
        batch |= equal_answers(batch, documents)
    if make_fields := field_maker(trainer.cfg, trainer.objective):
        batch |= make_fields(batch, 0, np.arange(len(batch["tokens"])))
    return batch


def random_batch(cfg: Config, documents: int = 1) -> dict[str, np.ndarray]:
    """Uniform random tokens [B, S] in `documents` equal documents per sequence.

    S is `data.seq_length`, or what spans are cut out of.
    """
    shape = cfg.train.global_batch_size, tokens_to_read(cfg)
    ids = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (shape[0], shape[1] + 1))
    place = np.arange(shape[1], dtype=np.int32)
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "labels": ids[:, 1:].astype(np.int32),
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.broadcast_to(1 + place * documents // shape[1], shape),
        "positions": np.broadcast_to(place, shape),
    }
