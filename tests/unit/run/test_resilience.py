"""Laws of stopping: a signal is noted, not died of; twice means now; all processes agree."""

import os
import signal
import subprocess
import sys
import textwrap

import jax
import pytest

from mjax.run.faults.stopping import GO_ON, SAVE_FAILED, SIGNALED, TAKEN_OVER, TIME_IS_UP, Stopper
from mjax.sharding.processes.agreement import largest_of_all
from tests.marks import slow
from tests.processes import free_port, start_process


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=str
)
def test_a_signal_is_noted_and_the_old_handler_comes_back(number, capfd):
    def handler(number, frame):
        raise AssertionError("the handler of the time before was called")

    before = signal.signal(number, handler)  # also where these tests run under nohup
    try:
        with Stopper(None) as stopper:
            assert stopper.ask(jax.devices()) == GO_ON
            os.kill(os.getpid(), number)
            assert stopper.ask(jax.devices()) == SIGNALED
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert f"{number.name}: finishing this step, then saving" in capfd.readouterr().err


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper(None) as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopper.ask(jax.devices()) == GO_ON
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_else_a_process_has_to_say_is_outranked_by_a_signal():
    with Stopper(None) as stopper:
        assert stopper.ask(jax.devices(), SAVE_FAILED) == SAVE_FAILED
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.ask(jax.devices(), SAVE_FAILED) == SIGNALED
        assert stopper.ask(jax.devices(), TAKEN_OVER) == TAKEN_OVER


def test_the_wall_time_runs_from_the_making_and_a_signal_outranks_it():
    with Stopper(1e-9) as stopper:
        assert stopper.ask(jax.devices()) == TIME_IS_UP
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.ask(jax.devices()) == SIGNALED
    assert Stopper(60).ask(jax.devices()) == GO_ON


def test_sigterm_twice_waits_and_sigint_twice_stops_at_once():
    script = """
        import os, signal
        from mjax.run.faults.stopping import Stopper
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
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


def test_the_largest_value_of_all_devices_is_replicated(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    got = largest_of_all(TIME_IS_UP, jax.devices())
    assert isinstance(got, jax.Array) and int(got) == TIME_IS_UP and got.is_fully_replicated
    assert int(largest_of_all(GO_ON, jax.devices())) == GO_ON


@slow
def test_two_processes_agree_when_one_is_signaled():
    script = """
        import os, signal, sys
        import jax
        rank = int(sys.argv[1])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, rank)
        from mjax.run.faults.stopping import Stopper
        from mjax.sharding.processes.agreement import ends_with_others
        with ends_with_others(), Stopper(None) as stopper:
            print(int(stopper.ask(jax.devices())), end=" ")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            print(int(stopper.ask(jax.devices())))
    """
    port = free_port()
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    runs = [
        start_process(
            [sys.executable, "-c", textwrap.dedent(script), str(rank), str(port)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    said = [run.communicate(timeout=90)[0].splitlines()[-1] for run in runs]
    assert said == ["0 3", "0 3"]


@slow
def test_a_process_of_several_that_is_asked_to_stop_before_its_first_step_ends():
    script = """
        import sys, time
        from mjax.sharding.mesh import start_processes
        start_processes(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
        print("met", flush=True)
        time.sleep(100)
    """
    port = free_port()
    command = [sys.executable, "-c", textwrap.dedent(script)]
    runs = [
        start_process([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [run.stdout.readline() for run in runs] == ["met\n"] * 2
    runs[1].send_signal(signal.SIGTERM)
    assert runs[1].wait(timeout=60) == -signal.SIGTERM
