"""Workers lose no call, whatever an environment does, and leave no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.errors import UserError
from mjax.post.environments.environment import Turn
from mjax.post.environments.workers import EnvironmentWorkers
from tests.marks import slow
from tests.processes import start_process
from tests.unit.house.test_no_process_is_left import is_alive

HERE = "tests.unit.post.environments.rude:Rude"


def all_turns(workers: EnvironmentWorkers, seconds: float = 30) -> dict:
    found, until = {}, time.monotonic() + seconds
    while workers.pending:
        found.update(workers.ready(1.0))
        assert time.monotonic() < until
    return found


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def has_ended(pids, seconds: float = 5) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


STEPS = {
    "well": "answered",
    "print": "answered",
    "raise": "ValueError: not today at ",
    "exit": "SystemExit: 3 at ",
    "die": "the process ended by exit code 3",
    "kill": "the process ended by SIGKILL",
}


def test_calls_are_answered_when_a_process_dies():
    before = children()
    with EnvironmentWorkers(HERE, "byte", count=1) as workers:
        for ticket, state in enumerate(["print", "raise", "kill"]):
            workers.submit(ticket, "step", state, [])
        found = all_turns(workers)
        assert [found[n].reward for n in range(3)] == [1, 0, 0]
        assert found[2].reason == STEPS["kill"]
    assert children() == before


@slow
def test_every_call_gives_one_turn_whatever_the_environment_does(tmp_path):
    before, pids = children(), tmp_path / "pids"
    with EnvironmentWorkers(HERE, "byte", count=2, timeout_s=1.5) as workers:
        assert workers.ready(1.0) == [] and workers.pending == 0
        for ticket, state in enumerate([*STEPS, f"hang {pids}", *["well"] * 10]):
            workers.submit(ticket, "step", state, [256])
        found = all_turns(workers)
        assert len(found) == len(STEPS) + 11
        for ticket, (state, reason) in enumerate(STEPS.items()):
            turn = found[ticket]
            assert turn.reason.startswith(reason) and turn.is_done
            assert turn.reward == float(reason == "answered")
            assert turn.metrics == ({"failed": 1.0} if state in ("raise", "exit") else {})
        assert found[len(STEPS)] == Turn((), None, 0.0, {}, "time limit")
        assert has_ended(map(int, pids.read_text().split()))  # with what it had started
        workers.submit("prompt", "reset", 0, 0)
        ((ticket, turn),) = workers.ready(20)
        (pid,) = turn.ids
        assert ticket == "prompt" and is_alive(pid)
        workers.submit("killed", "step", "wait 1", [])
        for started in children() - before:  # one may be making its environment
            os.kill(started, signal.SIGKILL)
        assert workers.ready(20)[0][1].reason == "the process ended by SIGKILL"
        workers.submit("after", "step", "well", [])
        assert workers.ready(30)[0][1].reward == 1
        assert len(children() - before) == 2
    assert children() == before


def test_no_processes_answer_in_this_one():
    with EnvironmentWorkers(HERE, "byte") as workers:
        workers.submit(1, "reset", 0, 0)
        workers.submit(2, "step", "raise", [])
        (_, first), (_, second) = workers.ready()
        assert first.ids == (os.getpid(),) and second.metrics == {"failed": 1.0}
        assert workers.ready() == []


@slow
def test_what_does_not_start_is_one_line_and_leaves_no_process():
    before = children()
    ended = r"make\(\), twice: the process ended by exit code 3"
    for start, said in [("raise", "ValueError: not today"), ("die", ended)]:
        with pytest.raises(UserError, match=said):
            EnvironmentWorkers(HERE, "byte", args={"start": start}, count=1)
        assert children() == before
    with pytest.raises(UserError, match="no environment 'nothing'"):
        EnvironmentWorkers("nothing", "byte")


@slow
def test_a_prompt_is_asked_for_again_once(tmp_path):
    once = {"reset": f"once {tmp_path / 'died'}"}
    with EnvironmentWorkers(HERE, "byte", args=once, count=1) as workers:
        workers.submit(1, "reset", 0, 7)
        assert all_turns(workers)[1].state == "well"
    args = {"reset": "hang"}
    with EnvironmentWorkers(HERE, "byte", args=args, count=1, timeout_s=0.5) as workers:
        workers.submit(1, "reset", 0, 7)
        with pytest.raises(UserError, match=r"Rude: reset\(0, 7\), twice: time limit"):
            all_turns(workers)


PROGRAM = """
import sys, time
from mjax.post.environments.workers import EnvironmentWorkers
with EnvironmentWorkers("{name}", "byte", count=2, timeout_s=60) as workers:
    workers.submit(0, "step", "hang {pids}", [])
    print("asked", flush=True)
    {end}
"""


@slow
@pytest.mark.parametrize(
    "end, number",
    [
        ("workers.ready(60)", signal.SIGKILL),
        ("workers.ready(60)", signal.SIGINT),  # Ctrl-C
        ("while not __import__('os').path.exists('{pids}'): time.sleep(0.1)\n    1 / 0", None),
    ],
)
def test_no_process_is_left_however_the_program_ends(end, number, tmp_path):
    pids = tmp_path / "pids"
    code = PROGRAM.replace("{end}", end).format(name=HERE, pids=pids)
    program = start_process(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout.readline() == b"asked\n"
    until = time.monotonic() + 20
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(map(is_alive, started))
    if number is not None:
        program.send_signal(number)
    program.wait(20)
    assert has_ended(started)


@slow
def test_the_environment_of_the_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[4] / "docs" / "train" / "environments.md"
    own, program = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    (tmp_path / "my_words.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(program, str(page), "exec"), {})
    prompt, _, answered = capsys.readouterr().out.splitlines()
    assert prompt.startswith("Which is the longest of ") and prompt.count(",") == 3
    assert "reward=1.0, metrics={'tries': 1}, reason='answered'" in answered
