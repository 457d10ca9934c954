"""Processes that tests start: each leads a group of its own, and no group outlives its test."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time

_started: list[subprocess.Popen] = []


def start_process(command, **keywords) -> subprocess.Popen:
    """`subprocess.Popen`; `end_processes` kills what is left of it, and what it has started."""
    process = subprocess.Popen(command, start_new_session=True, **keywords)
    _started.append(process)
    return process


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on.

    It is below those that the kernel gives to connections, which others make meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port


def end_processes() -> None:
    """Kill the groups of all processes started so far; stopped ones die, too."""
    while _started:
        process = _started.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what could not be written to it
                    pipe.close()


def end_processes_if_terminated() -> None:
    """Let SIGTERM, as `timeout` sends it, end them before it ends this process."""

    def end(number: int, _frame: object) -> None:
        end_processes()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
