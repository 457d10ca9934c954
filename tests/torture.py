"""`python -m tests.torture --kills 200 --seed 7 [--devices 4] [--processes 2] [a.b=c ...]`.

Runs of `python -m mjax.train` are killed by SIGKILL at random instants of their life and started
again until they finish. Each instant is that of an event, as a save that begins, a step that gets
its name, a step that is being removed, the lock, a line of the log, or any time. Invariants that
must hold: final parameters and moments, and the loss of every step however often it was computed,
are bit-equal to an uninterrupted run; every folder that has a step's name is whole; disk use is
bounded; a killed run's lock is taken over; no process is left. Children are forked from a process
that has imported jax but started no device, which saves most of a start.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mjax.sharding.processes.fake_devices import fake_devices
from tests.processes import free_port

EVERY, KEEP, BEST = 30, 2, 1
BASE = (
    "model.vocab_size=61",
    "model.hidden_size=16",
    "model.attention.num_attention_heads=2",
    "model.intermediate_size=24",
    "model.num_hidden_layers=1",
    "model.hidden_dropout=0.1",
    "data.mock=true",
    "data.seq_length=8",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.eval_steps=1",
    "train.eval_interval=2",
    "train.step_timeout_minutes=2",
    "precision.compute=float32",
    "log.interval=1",
    "checkpoint.interval=2",
    f"checkpoint.keep={KEEP}",
    f"checkpoint.keep_every={EVERY}",
    f"checkpoint.keep_best={BEST}",
)
TEMPORARY = ".orbax-checkpoint-tmp"
OUTDATED = "outdated"  # in the name of a folder of steps that retention has taken away
LONGEST = 300.0  # seconds for the event that a kill waits for, and for others to notice a death


def replaced(text: str, places: dict[str, str]) -> str:
    """`text` with values for the names in braces."""
    for name, value in places.items():
        text = text.replace(name, value)
    return text


@dataclass
class Torture:
    """Kills and what was seen. Seconds are those of the uninterrupted run."""

    home: Path
    rng: random.Random
    devices: int
    processes: int
    steps: int
    overrides: list[str]
    launch_seconds: float = 10.0
    life_seconds: float = 20.0
    kills: Counter = field(default_factory=Counter)
    losses: dict[int, float] = field(default_factory=dict)
    most_steps: int = 0
    stale: int = 0
    others: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    # ---- starting --------------------------------------------------------------------------------

    def start(self, folder: Path) -> list[int]:
        """The process ids of a new run in `folder`, each the leader of a group."""
        port = free_port()
        env = {"JAX_NUM_PROCESSES": str(self.processes)}
        env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        steps = [f"train.steps={self.steps}", f"schedule.decay_steps={self.steps}"]
        pids = []
        for index in range(self.processes):
            places = {"{run}": str(folder), "{process}": str(index)}
            overrides = [replaced(text, places) for text in self.overrides]
            argv = ["mjax.train", *BASE, *steps, f"run.dir={folder}", *overrides]
            said = folder.with_name(f"{folder.name}.said.{index}")
            pids.append(
                fork(lambda a=argv, i=index: _train(a, env | {"JAX_PROCESS_ID": str(i)}), said)
            )
        return pids

    # ---- one life --------------------------------------------------------------------------------

    def life(self, folder: Path) -> bool:
        """Start the run and kill it at an instant; whether it came to its end before."""
        kind = self.rng.choice((*WAITS, "any", "save", "named", "removal"))
        before = Counter(_names(folder / "checkpoints"))
        pids = self.start(folder)
        victims = pids if self.processes == 1 else self.rng.choice((pids, pids[:1], pids[1:]))
        alive = Alive(pids)
        seen = self.until(kind, folder, alive, before)
        if seen:
            for pid in victims:
                os.killpg(pid, signal.SIGKILL)
            self.kills[kind] += 1
        codes = self.end(folder, alive, victims if seen else ())
        self.look(folder)
        if not seen and any(codes.values()):
            self.problems.append(f"ended by itself with {codes}: {self.said(folder)}")
            raise SystemExit(self.report(0))
        return not seen

    def until(self, kind: str, folder: Path, alive: "Alive", before: Counter) -> bool:
        """Wait for an instant of this kind; False if all ended before it."""
        if kind == "any":
            ticks = _sleep(self.rng.uniform(0, self.life_seconds))
        elif kind == "start":
            ticks = _sleep(self.rng.uniform(0, self.launch_seconds))
        else:
            ticks = WAITS[kind](folder, self.rng, before)
        deadline = time.monotonic() + LONGEST
        for _ in ticks:
            self.measure(folder / "checkpoints")
            if not alive.any_is() or time.monotonic() > deadline:
                return False
            time.sleep(0.0005 if kind == "removal" else 0.002)
        return alive.any_is()

    def measure(self, checkpoints: Path) -> None:
        """Count the steps on disk that retention should remove, with those in writing.

        A step has one number under all its names: in writing, complete, on its way out. Those on
        their way out, which lie in a folder of their own, are listed first: a step that moves there
        meanwhile is missed, not counted twice.
        """
        leaving = [name for name in _names(checkpoints) if OUTDATED in name]
        names = [name for folder in leaving for name in _names(checkpoints / folder)]
        names += [name for name in _names(checkpoints) if OUTDATED not in name]
        steps = {name.split(".")[0] for name in names}
        count = sum(not (step.isdecimal() and int(step) % EVERY == 0) for step in steps)
        self.most_steps = max(self.most_steps, count)

    def end(self, folder: Path, alive: "Alive", victims: list[int]) -> dict[int, int]:
        """Wait for all to end; those that were not killed must do so in bounded time."""
        deadline = time.monotonic() + LONGEST
        while alive.any_is() and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in alive.all_that_are():
            self.problems.append(f"process {pid} outlived the others by {LONGEST} s")
            os.killpg(pid, signal.SIGKILL)
        while alive.any_is():
            time.sleep(0.01)
        for pid, code in alive.codes.items():
            if victims and pid not in victims:
                self.others[code] += 1
            try:
                os.killpg(pid, 0)
            except ProcessLookupError:
                continue
            self.problems.append(f"the group of process {pid} has left a process")
            os.killpg(pid, signal.SIGKILL)
        return alive.codes

    # ---- what must hold --------------------------------------------------------------------------

    def look(self, folder: Path) -> None:
        """Note what is wrong in the folder of a run that has just died or ended."""
        for record in records(folder):
            if "loss" in record:
                step, loss = record["step"], record["loss"]
                if self.losses.setdefault(step, loss) != loss:
                    self.problems.append(f"step {step}: loss {loss} after {self.losses[step]}")
            if "saving step" in record.get("event", ""):
                self.problems.append(record["event"])
            self.stale += "was stale" in record.get("event", "")
        if in_fork(lambda: verify_all(folder / "checkpoints"), self.home / "verify"):
            self.problems.append((self.home / "verify").read_text())
        if any(folder.glob("checkpoints/damaged-*")):
            self.problems.append(f"{folder} holds a damaged checkpoint: {self.said(folder)}")

    def said(self, folder: Path) -> str:
        files = folder.parent.glob(f"{folder.name}.said.*")
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in files)

    def finish(self, folder: Path, reference: Path) -> None:
        """Compare a run that has come to its end with the uninterrupted one."""
        logged = [r["step"] for r in records(folder) if "loss" in r]
        if logged != list(range(1, self.steps + 1)):
            missing = sorted(set(range(1, self.steps + 1)) - set(logged))
            self.problems.append(f"{folder.name}: steps {missing} are not in the log once")
        wanted = {r["step"]: r["eval_loss"] for r in records(reference) if "eval_loss" in r}
        if {r["step"]: r["eval_loss"] for r in records(folder) if "eval_loss" in r} != wanted:
            self.problems.append(f"{folder.name}: held-out losses differ")
        last = [f / "checkpoints" / str(self.steps) for f in (reference, folder)]
        if in_fork(lambda: compare(*last), self.home / "compare"):
            self.problems.append((self.home / "compare").read_text())
        names = sorted(_names(folder / "checkpoints"))
        if names != sorted(_names(reference / "checkpoints")):
            self.problems.append(f"{folder.name}: left {names} on disk")

    def report(self, runs: int) -> int:
        most = KEEP + BEST + 2  # one in writing, one that was saved but whose save had not ended
        if self.most_steps > most:
            self.problems.append(f"{self.most_steps} steps on disk at once, more than {most}")
        if sum(self.kills.values()) > 5 and not self.stale:
            self.problems.append("no lock of a killed run was said to be stale")
        for problem in self.problems:
            print(f"PROBLEM: {problem}", flush=True)
        lines = (
            f"{self.devices} devices, {self.processes} processes",
            f"{sum(self.kills.values())} kills {dict(self.kills)}",
            f"{runs} runs of {self.steps} steps",
            f"at most {self.most_steps} steps on disk beside every {EVERY}th",
            f"others ended with {dict(self.others)}",
            f"{len(self.problems)} problems",
        )
        print("; ".join(lines), flush=True)
        return int(bool(self.problems))


# ---- instants --------------------------------------------------------------------------------


def until_save(folder: Path, rng: random.Random, before: Counter) -> Iterator[None]:
    """A moment within 40 ms after the beginning of one of the first saves."""
    yield from _until_new(folder, rng.randint(1, 4), before, lambda name: TEMPORARY in name)
    yield from _sleep(rng.uniform(0, 0.04))


def until_named(folder: Path, rng: random.Random, before: Counter) -> Iterator[None]:
    """A moment within 15 ms after a step has got its name, when older ones are removed."""
    yield from _until_new(folder, rng.randint(1, 6), before, str.isdecimal)
    yield from _sleep(rng.uniform(0, 0.015))


def until_removal(folder: Path, rng: random.Random, before: Counter) -> Iterator[None]:
    """The moment when a step loses its first file, or its name."""
    checkpoints, left = folder / "checkpoints", rng.randint(1, 3)
    contents: dict[str, int] = {}
    while left:
        now = {n: _count(checkpoints / n) for n in _names(checkpoints) if n.isdecimal()}
        lost = [n for n, count in contents.items() if now.get(n, 0) < count]
        left -= bool(lost)
        contents = now
        yield


def until_lock(folder: Path, rng: random.Random, before: Counter) -> Iterator[None]:
    """A moment within 50 ms after the lock was taken."""
    lock = folder / "run.lock"
    old = lock.read_bytes() if lock.exists() else b""
    while not lock.exists() or lock.read_bytes() in (old, b""):
        yield
    yield from _sleep(rng.uniform(0, 0.05))


def until_log(folder: Path, rng: random.Random, before: Counter) -> Iterator[None]:
    """The moment when one of the first lines is written."""
    log, left, size = folder / "metrics.jsonl", rng.randint(1, 12), -1
    while left:
        now = log.stat().st_size if log.exists() else 0
        left -= size >= 0 and now != size
        size = now
        yield


WAITS: dict[str, Callable] = {
    "save": until_save,
    "named": until_named,
    "removal": until_removal,
    "lock": until_lock,
    "log": until_log,
    "start": None,
}


def _sleep(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield


def _until_new(
    folder: Path, number: int, before: Counter, fits: Callable[[str], bool]
) -> Iterator[None]:
    seen = set(before)
    while number:
        new = {n for n in _names(folder / "checkpoints") if fits(n)} - seen
        seen |= new
        number -= min(number, len(new))
        if number:
            yield


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


# ---- processes -------------------------------------------------------------------------------


class Alive:
    """Which of the processes that were forked live; `codes` of those that have ended."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self.codes = list(pids), {}

    def all_that_are(self) -> list[int]:
        for pid in list(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids.remove(pid)
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return self._pids

    def any_is(self) -> bool:
        return bool(self.all_that_are())


def fork(action: Callable[[], object], said: Path) -> int:
    """Run `action` in a new process that leads a group and prints to `said`; its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        action()
        sys.exit(0)
    except SystemExit as e:
        sys.stdout.flush()
        raise e
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def in_fork(action: Callable[[], object], said: Path) -> int:
    """The exit code of `action` in a process of its own, where it may start threads."""
    _, status = os.waitpid(fork(action, said), 0)
    return os.waitstatus_to_exitcode(status)


def _train(argv: list[str], env: dict[str, str]) -> None:
    from mjax.errors import run_cli
    from mjax.train.__main__ import main

    os.environ.update(env)
    sys.argv = argv
    run_cli(main)


def verify_all(checkpoints: Path) -> None:
    """`python -m mjax.checkpoint verify` of every folder that has a step's name."""
    from mjax.checkpoint.__main__ import main

    for name in filter(str.isdecimal, _names(checkpoints)):
        if main(["verify", str(checkpoints / name)]):
            sys.exit(1)


def compare(a: Path, b: Path) -> None:
    """Exit with 1 unless the arrays of two steps are the same bit for bit."""
    from mjax.checkpoint.__main__ import differing_array
    from mjax.checkpoint.base.stored import StoredArrays

    ours, theirs = StoredArrays(a), StoredArrays(b)
    assert ours.paths() == theirs.paths()
    found = {path: differing_array(ours, theirs, path, values=True) for path in ours.paths()}
    assert not any(found.values()), f"{a} and {b} differ: {found}"


def records(folder: Path) -> list[dict]:
    """The lines of the log that are whole."""
    log, found = folder / "metrics.jsonl", []
    for line in log.read_text().splitlines(keepends=True) if log.exists() else ():
        if line.endswith("\n"):
            found.append(json.loads(line))
    return found


# ---- the whole -------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--devices", type=int, default=1, help="fake devices in all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120, help="of a run")
    parser.add_argument("--folder", help="for the runs; a temporary one otherwise")
    text = "of each run's config; {run} in it is the run's folder"
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help=text)
    return parser.parse_intermixed_args()


def torture(args: argparse.Namespace, home: Path) -> int:
    """Kill until `args.kills` are done and the run that was killed last has finished."""
    sizes = (args.devices, args.processes, args.steps)
    self = Torture(home, random.Random(args.seed), *sizes, args.overrides)
    reference, began = home / "reference", time.monotonic()
    alive = Alive(self.start(reference))
    while alive.any_is() and not records(reference):
        time.sleep(0.01)
    self.launch_seconds = time.monotonic() - began
    codes = self.end(reference, alive, [])
    self.life_seconds = time.monotonic() - began
    if any(codes.values()):
        print(f"the uninterrupted run failed: {self.said(reference)}")
        return 1
    self.look(reference)
    runs = 0
    while sum(self.kills.values()) < args.kills:
        folder = home / f"run{runs}"
        is_over = False
        while not is_over and sum(self.kills.values()) < args.kills:
            is_over = self.life(folder)
            done = sum(self.kills.values())
            if done % 10 == 0 or self.problems:
                print(f"{done} kills, {runs} runs, problems: {self.problems}", flush=True)
            if self.problems:
                return self.report(runs)
        if not is_over:
            codes = self.end(folder, Alive(self.start(folder)), [])
            if any(codes.values()):
                self.problems.append(f"the last start ended with {codes}: {self.said(folder)}")
                return self.report(runs)
            self.look(folder)
        self.finish(folder, reference)
        runs += 1
        shutil.rmtree(folder)
    return self.report(runs)


def main() -> int:
    args = parse()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = fake_devices(args.devices // args.processes)
    import jax

    import mjax.checkpoint.__main__
    import mjax.run.dry_run
    import mjax.run.loop  # noqa: F401

    print(f"torture: seed {args.seed}, {args.kills} kills", flush=True)
    # No `TemporaryDirectory`: the processes forked from this one would remove it as they end.
    home = Path(args.folder or tempfile.mkdtemp())
    home.mkdir(parents=True, exist_ok=True)
    if any(home.iterdir()):
        raise SystemExit(f"{home} is not empty")
    if args.devices == 1:  # with several, collectives of a cached program can go astray
        jax.config.update("jax_compilation_cache_dir", str(home / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        return torture(args, home)
    finally:
        if args.folder is None:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
