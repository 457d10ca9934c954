"""Laws of goodput: every second has one name, restarts lose what they repeat, damage is a line."""

import json
import threading
import time

import pytest

from mjax.run.monitor import goodput
from mjax.run.monitor.goodput import LOST, WallTime, account, goodput_line, trained_until

OLD = {
    "as_of": 1000.0,
    "ended": False,
    "seconds": {"training": 80.0, "start": 10.0, "checkpoint": 10.0},
    "steps": [[0, 0.0], [10, 40.0], [20, 80.0]],
}


def at(seconds):
    return lambda: seconds


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "goodput.json"
    path.write_text(json.dumps(OLD))
    return path


def seconds_in(path):
    return json.loads(path.read_text())["seconds"]


def test_a_restart_loses_the_gap_and_the_steps_that_it_repeats(file):
    wall = WallTime(clock=at(1030.0))
    wall.go_on(file, step=15)
    wall.write_to(file)
    wall.close()
    found = seconds_in(file)
    assert found["training"] == 60.0 and found["repeated"] == 20.0  # half of steps 11 to 20
    assert found["restart"] == 30.0 and found["checkpoint"] == 10.0
    assert found["start"] == pytest.approx(10.0, abs=5)
    assert sum(found.values()) == pytest.approx(130.0, abs=5)
    assert 0.4 < wall.goodput() <= 60 / 130


def test_a_finished_run_that_is_extended_loses_no_time_in_between(file):
    file.write_text(json.dumps(OLD | {"ended": True}))
    wall = WallTime(clock=at(10**6))
    wall.go_on(file, step=20)
    wall.write_to(file)
    wall.close()
    assert seconds_in(file)["restart"] == seconds_in(file)["repeated"] == 0.0


def test_a_clock_that_jumps_back_loses_nothing(file):
    wall = WallTime(clock=at(10.0))
    wall.go_on(file, step=20)
    assert 0.7 < wall.goodput() <= 0.8


def test_every_second_goes_to_what_was_done(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    wall = WallTime()
    wall.switch("training")
    with wall.spent("checkpoint"):
        now[0] += 4
        with wall.spent("evaluation"):
            now[0] += 2
    now[0] += 1
    wall.trained(1)
    wall.write_to(tmp_path / "goodput.json")
    wall.close()
    found = seconds_in(tmp_path / "goodput.json")
    spent = {name: seconds for name, seconds in found.items() if seconds}
    assert spent == {"checkpoint": 4.0, "evaluation": 2.0, "training": 1.0}


def test_waiting_for_data_is_lost_only_where_the_device_has_nothing_to_do():
    class Result:
        def __init__(self):
            self.is_there = threading.Event()

        def block_until_ready(self):
            self.is_there.wait()

    def batches():
        for pause in (0.0, 0.1, 0.1):
            time.sleep(pause)
            yield pause

    wall = WallTime()
    wall.switch("training")
    lost, results = [], [Result(), Result()]
    given = wall.waiting(batches())
    for result in results:
        next(given)
        lost.append(wall._seconds["data_wait"])
        wall.idle.dispatched(result)
        if result is results[0]:
            result.is_there.set()
            while wall.idle._done == 0:
                time.sleep(0.001)
    next(given)
    first, idle, busy = *lost, wall._seconds["data_wait"]
    assert idle - first > 0.08  # the step before had ended
    assert busy == idle  # the device computed meanwhile
    results[1].is_there.set()
    wall.close()


def test_times_between_marks_are_in_proportion_and_unknown_ones_are_none():
    marks = [(0, 0.0), (10, 40.0), (20, 80.0)]
    assert [trained_until(marks, step) for step in (0, 5, 10, 19, 20, 99)] == [
        0,
        20,
        40,
        76,
        80,
        80,
    ]


def test_old_marks_are_thinned():
    wall = WallTime()
    for step in range(1, 5000):
        wall.trained(step)
    assert len(wall._marks) <= 513 and wall._marks[0] == (0, 0.0)
    assert wall._marks[-1][0] == 4999
    wall.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"seconds": 3}',
        json.dumps(OLD | {"steps": []}),
        json.dumps(OLD | {"seconds": {"training": -1.0}}),
        json.dumps(OLD | {"steps": [[1]]}),
        json.dumps(OLD | {"as_of": "x"}),
        json.dumps(OLD)[:-9],
    ],
)
def test_a_damaged_account_is_a_line(file, capfd, text):
    file.write_text(text)
    wall = WallTime()
    wall.go_on(file, 3)
    said = capfd.readouterr().err
    assert said.startswith("mjax: ") and said.count("\n") == 1 and "goodput" in said
    wall.close()


def test_the_line_names_what_was_lost_the_largest_first():
    seconds = dict.fromkeys(LOST, 0.0) | {"training": 900.0, "restart": 60.0, "compile": 40.0}
    assert account({}) == {}
    assert goodput_line(seconds) == (
        "goodput 90.0% of 16m40s since the first start; lost between restarts 1m00s, compiling 40s"
    )
