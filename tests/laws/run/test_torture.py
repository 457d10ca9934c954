"""Law: kills at random instants lose nothing (`tests/torture.py`; run it by hand for hundreds)."""

import subprocess
import sys

import pytest

from tests.marks import exhaustive, slow


@slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--kills 8 --seed 2",
        "--kills 4 --seed 3 --devices 4 --steps 60",
        "--kills 4 --seed 4 --devices 2 --processes 2 --steps 60",
        "--kills 4 --seed 5 --devices 2 --processes 2 --steps 60 checkpoint.interval=10"
        " checkpoint.local_interval=1 checkpoint.local_dir={run}/node-{process}",
    ],
)
@exhaustive
def test_kills_at_random_instants_lose_nothing(tmp_path, arguments):
    command = [sys.executable, "-m", "tests.torture", "--folder", str(tmp_path / "runs")]
    done = subprocess.run([*command, *arguments.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{arguments.split()[1]} kills" in done.stdout.splitlines()[-1]
