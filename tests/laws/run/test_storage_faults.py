"""Laws of storage that fails at any one of its operations, or at all from one on.

An operation is an open, read, write, sync, rename or removal below the run's folder, of Python, of
orbax and of tensorstore alike. Whatever fails, complete checkpoints stay readable bit for bit, an
error is one line, and once storage is well the run goes on as if nothing had been.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from tests.faulty_storage import Faults, environment
from tests.laws.run.test_processes import losses
from tests.laws.run.test_processes import start as start_job
from tests.marks import exhaustive, slow

ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)
FOR_EVER = 10**9


def drive(tmp_path, what: str, most: int) -> list[dict]:
    """Run this file as a program with faulty storage; the records it prints, one a fault."""
    env = environment(tmp_path, tmp_path / "run") | {"PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "tests.laws.run.test_storage_faults", what, str(tmp_path)]
    done = subprocess.run(
        [*command, str(most)], env=env, capture_output=True, text=True, timeout=3400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def require_lawful(records: list[dict], count: int) -> None:
    assert len(records) >= count
    assert all(r["failed"] for r in records), "every fault was one"
    assert not [r for r in records if r["broken"]]


@slow
def test_a_save_that_fails_anywhere_costs_no_other_checkpoint(tmp_path):
    require_lawful(drive(tmp_path, "saves", 12), 8)


@exhaustive
@slow
@pytest.mark.timeout(3600)  # a minute or two of one core that is not shared
def test_a_save_that_fails_everywhere_costs_no_other_checkpoint(tmp_path):
    require_lawful(drive(tmp_path, "saves", FOR_EVER), 120)


@exhaustive
@pytest.mark.timeout(3600)  # a minute or two of one core that is not shared
def test_a_run_whose_storage_fails_loses_no_checkpoint_and_goes_on(tmp_path):
    require_lawful(drive(tmp_path, "runs", 20), 15)


@slow
@pytest.mark.timeout(3600)
@exhaustive
def test_two_processes_whose_storage_fails_end_in_bounded_time_and_lose_no_checkpoint(
    tmp_path, monkeypatch
):
    """Operations of both are counted together; a wait of one for the other ends by the watchdog."""
    folder = tmp_path / "run"
    for name, value in environment(tmp_path, folder).items():
        monkeypatch.setenv(name, value)
    faults = Faults(tmp_path / "faults")
    keys = ["mesh.dp=8", "checkpoint.interval=3", "train.steps=6"]

    def job(*more: str) -> list[int]:
        return [process.wait(timeout=900) for process in start_job(folder, 2, *keys, *more)]

    faults.fail(FOR_EVER, FOR_EVER, errno.EIO)
    assert job() == [0, 0]
    operations, _ = faults.stop()
    wanted = losses(folder)[-1]
    for share in (0.3, 0.5):  # in the first save, between the saves
        shutil.rmtree(folder)
        struck = int(share * operations)
        faults.fail(struck, struck, errno.EIO)
        codes = job("train.step_timeout_minutes=1")
        assert faults.stop()[1] == 1, "the fault was one"
        assert codes == [0, 0] or all(codes), codes
        assert job() == [0, 0] and losses(folder)[-1] == pytest.approx(wanted, rel=1e-6)


# ---- the program with faulty storage ------------------------------------------------------------


def cases(operations: int, most: int) -> list[tuple[int, int, int]]:
    """(first, last, error) of at most about `most` faults, spread over all operations.

    Of every three one lasts for ever. Errors take turns.
    """
    step = max(1, -(-operations // most))
    found = []
    for number, first in enumerate(range(1, operations + 1, step)):
        last = FOR_EVER if number % 3 == 2 else first
        found.append((first, last, ERRORS[number % len(ERRORS)]))
    return found


def say(case: tuple[int, int, int], failed: int, broken: str | None, line: str) -> None:
    first, last, error = case
    how = {"first": first, "for_ever": last == FOR_EVER, "error": errno.errorcode[error]}
    print(json.dumps({**how, "failed": failed, "broken": broken, "line": line}), flush=True)


def broken_law(folder: Path, wanted: dict, least: int, restore) -> str | None:
    """What is wrong with the checkpoints in `folder`, or None.

    Each that looks complete must be intact and, as `restore` reads it, hold what `wanted` has of
    its step; the newest must be `least` or newer.
    """
    from mjax.checkpoint.base.digest import read_digests
    from mjax.checkpoint.base.steps import steps_in

    found = steps_in(folder) if folder.is_dir() else []
    for step in found:
        digests = read_digests(step)
        if digests is None:
            return f"step {step.name} looks complete and has no digests"
        digests.verify()
        if restore(int(step.name)) != wanted[int(step.name)]:
            return f"step {step.name} holds other numbers"
    newest = max((int(step.name) for step in found), default=0)
    return None if newest >= least else f"the newest checkpoint is {newest}, {least} was complete"


def drive_saves(folder: Path, faults: Faults, most: int) -> None:
    """Let a save fail at each of its operations, the one of a store that keeps two."""
    import jax
    import numpy as np

    from mjax.checkpoint.store import SaveFailed, Store
    from mjax.config import load

    cfg = load(None, ["data.mock=true"])
    draw = [np.random.default_rng(step).normal(size=(64, 32)) for step in range(6)]
    states = [{"params": {"w": jax.numpy.asarray(a, np.float32)}} for a in draw]
    wanted = {step: state["params"]["w"].tobytes() for step, state in enumerate(states)}
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=one)

    def store() -> Store:
        return Store(folder, cfg, keep=2, keep_every=None, async_save=True)

    def restored(step: int) -> bytes:
        state = store().restore({"params": {"w": shape}}, step)
        return np.asarray(state["params"]["w"]).tobytes()

    def save(saves: Store, step: int) -> str:
        try:
            saves.save(step, states[step])
            saves.wait()
        except SaveFailed as e:
            return str(e)
        return ""

    def one_case(case) -> tuple[int, int, str, str | None]:
        shutil.rmtree(folder, ignore_errors=True)
        saves = store()
        assert not save(saves, 1) and not save(saves, 2)
        faults.fail(*case)
        line = save(saves, 3)
        counted, failed = faults.stop()
        broken = broken_law(folder, wanted, 2 if line else 3, restored)
        if not broken and line and "\n" in line:
            broken = "more than a line"
        if line:  # as `Saver` does
            saves.remove_remains()
            saves.forget_steps()
        again = save(saves, 4)
        until = time.monotonic() + 60  # what is removed goes behind the next steps
        while any(folder.glob("*tmp*")) and time.monotonic() < until:
            time.sleep(0.02)
        left = {path.name for path in folder.iterdir()}
        broken = broken or again or broken_law(folder, wanted, 4, restored)
        if not broken and len(left) > 2:
            broken = f"left: {sorted(left)}"
        return counted, failed, line, broken

    operations, *_ = one_case((FOR_EVER, FOR_EVER, errno.EIO))
    for case in cases(operations, most):
        _, failed, line, broken = one_case(case)
        if failed or broken:  # threads take turns: a last operation may not come
            say(case, failed, broken, line)


def drive_runs(folder: Path, faults: Faults, most: int) -> None:
    """Let the storage of a whole run fail, then start the run again with storage that is well."""
    import jax
    import numpy as np

    from mjax.config import load
    from mjax.errors import UserError
    from mjax.run.faults import run_lock, saving
    from mjax.run.loop import train
    from mjax.sharding.mesh import make_mesh
    from mjax.train import Trainer
    from mjax.train.programs import Programs
    from tests.tiny import TINY

    saving.PAUSE, run_lock.BEAT = 0.01, 60.0
    keys = [f"run.dir={folder}", "train.steps=6", "checkpoint.interval=2", "log.tensorboard=true"]
    cfg = load(None, [*TINY, *keys])
    mesh = make_mesh(cfg.mesh, jax.devices()[:1])
    trainers: list[Trainer] = []
    compiled: dict = {}
    jitted, init = Programs.jitted, Trainer.__init__

    def watched_init(self, *args):
        init(self, *args)
        trainers[:] = [self]

    def jitted_once(self, *key):
        if key not in compiled:
            compiled[key] = jitted(self, *key)
        return compiled[key]

    Trainer.__init__, Programs.jitted = watched_init, jitted_once

    def bits() -> bytes:
        return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(trainers[0].state))

    def restored(step: int) -> bytes:
        Trainer(cfg, mesh).restore(step)
        return bits()

    def run() -> str:
        try:
            train(cfg, mesh)
        except UserError as e:
            return str(e)
        except Exception as e:  # which would be a traceback on the console
            return "".join(traceback.format_exception(e))
        return ""

    def one_case(case, wanted) -> tuple[int, int, str, str | None]:
        shutil.rmtree(folder, ignore_errors=True)
        faults.fail(*case)
        line = run()
        counted, failed = faults.stop()
        broken = broken_law(folder / "checkpoints", wanted, 0 if line else 6, restored)
        if not broken and "\n" in line:
            broken = "more than a line"
        again = run()
        broken = broken or again or broken_law(folder / "checkpoints", wanted, 6, restored)
        return counted, failed, line, broken

    train(load(None, [*TINY, *keys, "checkpoint.keep=9"]), mesh)
    wanted = {step: restored(step) for step in (2, 4, 6)}
    operations, *_ = one_case((FOR_EVER, FOR_EVER, errno.EIO), wanted)
    for case in cases(operations, most):
        _, failed, line, broken = one_case(case, wanted)
        if failed or broken:
            say(case, failed, broken, line)


if __name__ == "__main__":
    what, place, most = sys.argv[1:]
    control = Faults(Path(os.environ["FAULTY_CONTROL"]))
    from mjax.checkpoint.base.orbax_messages import quiet_saves

    with quiet_saves():
        {"saves": drive_saves, "runs": drive_runs}[what](Path(place) / "run", control, int(most))
