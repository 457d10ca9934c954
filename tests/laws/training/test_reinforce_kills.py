"""A run of PPO that SIGKILL ends 20 times, at random instants of its life, has the bits of another.

The lives are children of a process of their own, which has imported jax and started no device.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from mjax.post import reinforce_batches as batches
from tests.laws.training.test_ppo import PPO, states
from tests.laws.training.test_reinforcement import LONG, config, figures, run
from tests.marks import exhaustive

KILLS, STEPS = 20, 80
KEYS = *PPO, LONG, "checkpoint.interval=1", "reinforce.updates_per_rollout=2"


def run_of(folder):
    return config(folder, *KEYS, steps=STEPS)


def begun(folder: Path) -> int:
    """The process of a life of the run in a folder."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        batches.answer_ends = lambda *given: [*range(0, 257, 5)]
        run(run_of(folder))
        code = 0
    finally:
        os._exit(code)


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"  # whose last line may be written at this moment
    return file.read_text().count('"reward":') if file.exists() else 0


def main(home: Path, seed: int) -> None:
    """Run once to the end, and once with kills: some before a life's first step, some after it."""
    rng, since = random.Random(seed), time.monotonic()
    pid = begun(home / "whole")
    while not steps_in(home / "whole"):
        time.sleep(0.05)
    first = time.monotonic() - since  # seconds to the first step
    assert os.waitpid(pid, 0)[1] == 0
    seen = []
    for _ in range(KILLS):
        wanted = steps_in(home / "parts") + (more := rng.choice([0, 0, 1, 2]))
        pid = begun(home / "parts")
        while steps_in(home / "parts") < wanted:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run had ended"
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.4 if more else first))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the run had ended"
        seen.append(steps_in(home / "parts"))
    assert os.waitpid(begun(home / "parts"), 0)[1] == 0
    print(json.dumps(seen))


@exhaustive
def test_a_run_that_is_killed_20_times_has_the_bits_of_another(tmp_path):
    command = [sys.executable, "-m", __name__, str(tmp_path), "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert 0 < seen[-1] and len(set(seen)) > 4, seen  # they struck in many steps
    jax.tree.map(
        np.testing.assert_array_equal,
        states(run_of(tmp_path / "parts")),
        states(run_of(tmp_path / "whole")),
    )
    whole = {r["step"]: r for r in figures(tmp_path / "whole")}
    names = "loss", "reward", "grad_norm", "value/loss", "staleness_max"
    for record in figures(tmp_path / "parts"):  # some steps were done more than once
        assert all(record[name] == whole[record["step"]][name] for name in names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
