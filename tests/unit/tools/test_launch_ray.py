"""The job of `tools.launch_ray`: each process gets its place, and the exit code is the worst."""

import json
import os
import sys

import pytest

from tests.marks import exhaustive, slow
from tools import launch_ray


def test_a_process_gets_its_place_and_its_exit_code_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import json, os; json.dump(dict(os.environ), open('env', 'w')); raise SystemExit(3)"
    assert launch_ray.train_one([sys.executable, "-c", code], "10.0.0.7:99", 4, 2) == 3
    env = json.loads((tmp_path / "env").read_text())
    assert env["JAX_COORDINATOR_ADDRESS"] == "10.0.0.7:99" and env["PATH"] == os.environ["PATH"]
    assert (env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"]) == ("4", "2")


def test_arguments_of_training_follow_two_dashes():
    args = launch_ray.parser().parse_args(["--nodes", "2", "--", "--config", "x", "a.b=c"])
    assert args.nodes == 2 and args.gpus == 8 and args.arguments == ["--config", "x", "a.b=c"]


@slow
@exhaustive
def test_ray_itself_starts_all_and_the_worst_exit_code_is_its_own(monkeypatch):
    pytest.importorskip("ray", reason="needs ray")
    argv = ["--nodes", "2", "--gpus", "0", "--same-node", "--", "data.mock=false"]
    assert launch_ray.main(argv) == 2
