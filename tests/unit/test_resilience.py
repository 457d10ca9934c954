"""Laws of stopping: a signal is noted, not died of; twice means now; all processes agree."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import jax
import pytest

from mjax.train.resilience import GO_ON, SIGNALED, TIME_IS_UP, Stopper, largest_of_all


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_old_handler_comes_back(number, capfd):
    before = signal.getsignal(number)
    with Stopper(None) as stopper:
        assert stopper.ask() == GO_ON
        os.kill(os.getpid(), number)
        assert stopper.ask() == SIGNALED
    assert signal.getsignal(number) is before
    assert f"{number.name}: finishing this step, then saving" in capfd.readouterr().err


def test_the_wall_time_runs_from_the_making_and_a_signal_outranks_it():
    with Stopper(1e-9) as stopper:
        assert stopper.ask() == TIME_IS_UP
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.ask() == SIGNALED
    assert Stopper(60).ask() == GO_ON


def test_sigterm_twice_waits_and_sigint_twice_stops_at_once():
    script = """
        import os, signal
        from mjax.train.resilience import Stopper
        with Stopper(None) as stopper:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            print("alive", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("not reached", flush=True)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 130
    assert run.stdout == "alive\n" and "stopping at once" in run.stderr


def test_the_largest_value_of_all_devices_is_replicated():
    got = largest_of_all(TIME_IS_UP)
    assert isinstance(got, jax.Array) and int(got) == TIME_IS_UP and got.is_fully_replicated
    assert int(largest_of_all(GO_ON)) == GO_ON


def test_two_processes_agree_when_one_is_signaled():
    script = """
        import os, signal, sys
        import jax
        rank = int(sys.argv[1])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, rank)
        from mjax.train.resilience import Stopper
        with Stopper(None) as stopper:
            print(int(stopper.ask()), end=" ")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            print(int(stopper.ask()))
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(rank), str(port)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    said = [run.communicate(timeout=90)[0].splitlines()[-1] for run in runs]
    assert said == ["0 2", "0 2"]


@pytest.mark.parametrize("beats,code", [(0, 3), (20, 0)])
def test_the_watchdog_ends_a_process_that_beats_no_more(beats, code):
    """Three seconds without a beat and it exits with code 3 and all stacks; beats keep it alive."""
    script = textwrap.dedent(
        f"""
        import time
        from mjax.train.resilience import Watchdog
        with Watchdog(3 / 60) as dog:
            for _ in range({beats}):
                time.sleep(0.25)
                dog.beat()
            if {beats} == 0:
                time.sleep(60)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    assert ("train.step_timeout_minutes=0.05" in done.stderr) == (code == 3)
    assert ("most recent call first" in done.stderr) == (code == 3)
