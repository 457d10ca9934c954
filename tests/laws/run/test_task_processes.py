"""Laws of tasks that a run of several processes scores: the scores of one; errors end all."""

import json
import re
import signal
import time

import pytest

from tests.laws.run.test_post_processes import require_line_of_all
from tests.laws.run.test_processes import finish, losses, start
from tests.marks import exhaustive, slow

pytestmark = slow

KEYS = [
    *("model.vocab_size=257", "data.tokenizer=byte", "schedule.lr=0.02", "train.steps=4"),
    *("data.split=[1.0,0.0,0.0]", "train.eval_interval=null", "mesh.dp=2", "mesh.tp=2"),
]


def begin(folder, processes, task, interval, *keys):
    tasks = f"train.eval_tasks={{{folder.parent}/{task}: 11}}"
    every = f"train.eval_tasks_interval={interval}"
    of_run = {"module": "tests.stand_in_harness", "devices": 4}
    return start(folder, processes, *KEYS, tasks, every, *keys, **of_run)


def scores(folder):
    """By step and name."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        (record["step"], name): value
        for record in records
        for name, value in record.items()
        if name.startswith("task/")
    }


@exhaustive
def test_two_processes_log_the_scores_of_one_and_an_error_ends_both(tmp_path):
    one, two, fails = (tmp_path / name for name in ("one", "two", "fails"))
    finish(one, begin(one, 1, "my_choice", 2))
    said = finish(two, begin(two, 2, "my_choice", 2))
    found, expected = scores(two), scores(one)
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == 6
    acc = "task/my_choice/acc"
    assert found[2, acc] != found[4, acc]  # those of the weights at each step
    assert f"step 2: {acc}" in said[0] and "task" not in said[1]
    line = "train.eval_tasks: my_error: KeyError: 'no such field'"
    require_line_of_all(fails, begin(fails, 2, "my_error", 3), line)
    assert losses(two)[:3] == losses(fails)  # to the bit, though only one was scored before


@exhaustive
def test_a_signal_while_tasks_are_scored_stops_both_in_good_order(tmp_path):
    folder = tmp_path / "run"
    running = begin(folder, 2, "my_wait", 2, "train.steps=100")
    while "waiting" not in (said := (tmp_path / "run.0").read_text()):
        assert running[0].poll() is None, said
        time.sleep(0.1)
    running[1].send_signal(signal.SIGTERM)
    said = finish(folder, running)
    assert "SIGTERM" in said[1]
    (step,) = re.findall(r"stopped at step ([34]) of 100: a stop signal", said[0])
    assert len(scores(folder)) == 3 and (folder / "checkpoints" / step).is_dir()
