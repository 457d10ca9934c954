"""Tests leave no process behind, however they end."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEST = """
    import subprocess, sys, time
    from tests.processes import start_process

    CHILD = '''
    import subprocess, sys, time
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(other.pid, flush=True)
    time.sleep(100)
    '''

    def test_that_starts():
        process = start_process([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
        print(process.pid, process.stdout.readline(), file=open("pids", "w"), flush=True)
        {end}
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["assert False", "time.sleep(100)", "pass"])
def test_a_test_leaves_no_process_whether_it_fails_is_terminated_or_passes(tmp_path, end):
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TEST).replace("{end}", end))
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as run:
        pids, until = tmp_path / "pids", time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        if "sleep" in end:
            run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == {"assert False": 1, "pass": 0}.get(end, -signal.SIGTERM)
    started = list(map(int, pids.read_text().split()))
    until = time.monotonic() + 60  # whoever inherits an orphan has to notice
    while any(map(is_alive, started)) and time.monotonic() < until:
        time.sleep(0.05)
    left = list(filter(is_alive, started))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
