"""Several runs at once: those done are left out, failures and limits end no other."""

import os
import signal
import sys
import threading
import time

import pytest

from tools import learning_runs
from tools.learning_runs import Training, Trainings

# In place of Python: makes the folder of the last step, or does what the command is named.
FAKE = """#!/bin/sh
for last; do :; done
run=${last#run.dir=}
echo "$3" >> "${run%/*}/order"
case $3 in
  fail) echo "why it failed"; exit 3;;
  hang) sleep 60 & wait;;
esac
mkdir -p "$run/checkpoints/2"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    program = tmp_path / "fake"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(learning_runs, "_POLL", 0.02)
    return tmp_path


def test_runs_follow_what_they_start_from_and_failures_end_no_other(fake, capsys):
    found = [
        Training("late", 2, ("late",), after="early"),
        Training("bad", 2, ("fail",)),
        Training("never", 2, ("never",), after="bad"),
        Training("early", 2, ("early",)),
    ]
    trainings = Trainings(fake, 1, 20.0, time.monotonic() + 20)
    trainings.run(found)
    assert (fake / "order").read_text().split() == ["fail", "early", "late"]
    assert [trainings.is_done(t) for t in found] == [True, False, False, True]
    said = capsys.readouterr().out
    assert "bad: exit 3" in said and "why it failed" in said
    trainings.run(found)  # all that is done is left out
    assert (fake / "order").read_text().split() == ["fail", "early", "late", "fail"]


@pytest.mark.parametrize("limits", [(0.1, 20.0), (20.0, 0.1)], ids=["of a run", "of all"])
def test_a_run_beyond_a_limit_is_ended_with_its_children(limits, fake, capsys):
    found = [Training("slow", 2, ("hang",)), Training("quick", 2, ("quick",))]
    seconds, left = limits
    began = time.monotonic()
    trainings = Trainings(fake, 2, seconds, began + left)
    trainings.run(found)
    assert time.monotonic() - began < 15
    assert not trainings.is_done(found[0]) and "slow: " in capsys.readouterr().out


def test_sigterm_ends_all_runs(fake, capsys):
    """As `timeout` sends it: the runs lead sessions of their own and would go on."""
    trainings = Trainings(fake, 2, 100.0, time.monotonic() + 100)
    before = signal.getsignal(signal.SIGTERM)

    def terminate():
        while not trainings._running:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(SystemExit, match="143"):
        trainings.run([Training("slow", 2, ("hang",))])
    assert "slow: cut off" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
