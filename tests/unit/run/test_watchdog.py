"""Laws of the watchdog: a process that hangs ends in bounded time, and says what it hung in."""

import subprocess
import sys
import textwrap
import time

import jax
import pytest

from mjax.run.faults import watchdog
from mjax.run.faults.watchdog import lost_process, memory_in_use
from tests.marks import slow


@slow
@pytest.mark.parametrize("beats,code", [(0, 3), (20, 0)])
def test_the_watchdog_ends_a_process_that_beats_no_more(beats, code):
    """Three seconds without a beat and it exits with code 3; beats keep it alive."""
    script = textwrap.dedent(
        f"""
        import time
        from mjax.run.faults.watchdog import Watchdog
        with Watchdog(3 / 60) as dog:
            dog.dispatched(8)
            dog.ended(7)
            for _ in range({beats}):
                time.sleep(0.25)
                dog.beat()
            dog.doing("waiting for the result of step 8")
            if {beats} == 0:
                time.sleep(60)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    for words in (
        "process 0 of 1: no step has ended in train.step_timeout_minutes=0.05",
        "it was waiting for the result of step 8; steps dispatched: 8, ended: 7",
        "memory of devices: unknown",  # a CPU does not tell
        "most recent call first",
        "--restarts N",
    ):
        assert (words in done.stderr) == (code == 3), words


def test_reading_the_memory_of_a_device_that_hangs_or_errs_has_an_end(monkeypatch):
    def err():
        raise RuntimeError("a device that erred")

    assert memory_in_use(lambda: ["0: 3.0 of 9.0 GB"]) == "memory of devices: 0: 3.0 of 9.0 GB"
    monkeypatch.setattr(watchdog, "LONGEST_LOOK", 0.2)
    assert memory_in_use(lambda: time.sleep(30)) == "memory of devices: no answer in 0.2 s"
    assert memory_in_use(err) == "memory of devices: no answer in 0.2 s"


def test_the_loss_of_another_process_is_told_from_faults_of_this_one(monkeypatch):
    error = jax.errors.JaxRuntimeError
    lost = error("FAILED_PRECONDITION: Gloo all-reduce failed: Connection reset by peer [10.0.0.7]")
    assert lost_process(lost) is None  # a lone process has none to lose
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "process 0 of 2 has lost another one: FAILED_PRECONDITION: Gloo" in lost_process(lost)
    wrapped = ValueError("writing a checkpoint failed")
    wrapped.__cause__ = lost
    assert "Connection reset by peer" in lost_process(wrapped)
    assert lost_process(error("RESOURCE_EXHAUSTED: out of memory")) is None
    assert lost_process(ValueError("Connection reset by peer")) is None  # of a data service
