"""`python -m mjax.bench checkpoint --config X --dir D [a.b=c ...]`: what a save and a restore cost.

The state of a run on random weights is saved twice to a temporary folder in D while training goes
on: the first save also makes what later ones reuse, the second counts. `ms` is how long a save
blocks training, `writing_ms` the median step while the files are written, `step_ms` that of the
other steps. Rates are gigabytes of the checkpoint a second, of `save_gb_s` until all is on disk.
`disk_write_gb_s` and `disk_read_gb_s` are those of plain files of the same size in D, one a thread,
synced when written. A restore reads from the page cache where the host's memory holds the files,
and so does the plain read before it. `host_gb` is what the process held at most, `replica_check_ms`
the time of one comparison of replicas, where the state has any.
"""

import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from mjax.bench import report
from mjax.bench.train import batch_of, case
from mjax.config import load
from mjax.config.languages.paths import as_path
from mjax.errors import CommandParser, UserError, at_least, or_user_error
from mjax.run.faults.replicas import digests_of, replicated_leaves
from mjax.run.faults.saving import reserve_host_memory
from mjax.train import Trainer

THREADS_TIMED = 8  # of the plain files


def main(argv: list[str]) -> int:
    parser = CommandParser("bench checkpoint", description=__doc__)
    parser.add_argument("--dir", type=as_path, default=Path(), help="where to write")
    parser.add_argument("--steps", type=at_least(2), default=10, help="steps without a save")
    args = report.parse_with_config(parser, argv)
    if jax.process_count() > 1:
        raise UserError("this benchmark measures one process; start it on one machine")
    wrong = f"--dir {args.dir}: cannot hold the files of the benchmark ({{reason}}); name another"
    with or_user_error(wrong), tempfile.TemporaryDirectory(dir=args.dir) as folder:
        cfg = load(args.config, [*args.overrides, f"run.dir={folder}", "checkpoint.resume=never"])
        return report.report(args, [measure_checkpoint(Trainer(cfg), Path(folder), args.steps)])


def measure_checkpoint(trainer: Trainer, folder: Path, steps: int) -> dict:
    """The record of two saves, a restore and plain files in `folder`."""
    trainer.init()
    reserved = reserve_host_memory(trainer.state)
    batch = batch_of(trainer)
    step_times(trainer, batch, 3)
    if reserved is not None:
        reserved.join()
    plain = step_times(trainer, batch, steps)
    time_save(trainer, batch)
    trainer.store.wait()
    blocked, writing, seconds = time_save(trainer, batch)
    step = trainer.step_number
    size = sum(f.stat().st_size for f in trainer.store.newest().rglob("*") if f.is_file())
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    checked = replica_check_seconds(trainer)
    write_rate, read_rate = plain_rates(folder, size)
    trainer.state = None  # restoring into a full device would need room for two
    start = time.perf_counter()
    trainer.restore()
    jax.block_until_ready(trainer.state)
    restored = time.perf_counter() - start
    return {
        "bench": "checkpoint",
        "case": case(trainer, 1),
        "ms": report.rounded(1e3 * blocked),
        "step_ms": report.rounded(1e3 * statistics.median(plain)),
        "writing_ms": report.rounded(1e3 * statistics.median(writing)),
        "gb": report.rounded(size / 1e9),
        "save_s": report.rounded(seconds),
        "save_gb_s": report.rounded(size / seconds / 1e9),
        "restore_s": report.rounded(restored),
        "restore_gb_s": report.rounded(size / restored / 1e9),
        "disk_write_gb_s": report.rounded(write_rate / 1e9),
        "disk_read_gb_s": report.rounded(read_rate / 1e9),
        "host_gb": report.rounded(held / 1e9),
        "replica_check_ms": checked and report.rounded(1e3 * checked),
        "step": step,
    }


def step_times(trainer: Trainer, batch: dict, count: int) -> list[float]:
    """Seconds of each of `count` steps, each waited for."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(trainer.step(batch))
        times.append(time.perf_counter() - start)
    return times


def time_save(trainer: Trainer, batch: dict) -> tuple[float, list[float], float]:
    """(seconds for which a save blocks, those of steps while it is written, those until it is on
    disk)."""
    start = time.perf_counter()
    trainer.save()
    blocked, writing = time.perf_counter() - start, []
    while trainer.store.is_saving or not writing:
        writing += step_times(trainer, batch, 1)
    seconds = time.perf_counter() - start
    trainer.store.wait()
    return blocked, writing, seconds


def replica_check_seconds(trainer: Trainer) -> float | None:
    """Median seconds of a comparison of all replicas, or None where the state has none."""
    leaves = replicated_leaves(trainer.state_layout)
    if not leaves:
        return None
    program = digests_of(trainer.state_layout, leaves)
    return report.launch_ms(lambda: program(trainer.state), samples=5) / 1e3


def plain_rates(folder: Path, size: int) -> tuple[float, float]:
    """Bytes a second of `THREADS_TIMED` plain files of `size` in all, written and read back."""
    block = np.random.default_rng(0).bytes(2**26)
    files = [folder / f"plain{i}" for i in range(THREADS_TIMED)]
    blocks = max(1, size // THREADS_TIMED // len(block))

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(blocks):
                file.write(block)
            os.fsync(file.fileno())

    def read(path: Path) -> None:
        into = bytearray(len(block))
        with path.open("rb", buffering=0) as file:
            while file.readinto(into):
                pass

    rates = []
    with ThreadPoolExecutor(THREADS_TIMED) as pool:
        for work in (write, read):
            start = time.perf_counter()
            list(pool.map(work, files))
            rates.append(THREADS_TIMED * blocks * len(block) / (time.perf_counter() - start))
    for path in files:
        path.unlink()
    return rates[0], rates[1]
