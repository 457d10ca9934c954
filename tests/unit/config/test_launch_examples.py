"""The launchers' examples of docs/start/multi-host.md: their shell parses, their YAML loads, and
what they call exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mjax.config import load
from mjax.sharding.processes.launcher import find_processes
from tests.marks import quick
from tools import launch_ray

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "start" / "multi-host.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
SCRIPTS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)


def require_that_it_runs(words: list[str]) -> None:
    """`words` follow `python -m mjax.train`: options that exist, a config that loads."""
    done = subprocess.run(
        [sys.executable, "-m", "mjax.train", *words, "--print-config"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "num_hidden_layers: 32" in done.stdout


def call_of(script: str, program: str) -> list[str]:
    """What follows a program in a script, as words without variables of the shell."""
    (called,) = re.findall(rf"{re.escape(program)}(.*)", script.replace("\\\n", " "))
    return shlex.split(called.replace("$SLURM_JOB_NAME", "a"))


LAUNCHED = {
    "Slurm": "python -m mjax.train",
    "Open MPI": "python -m mjax.train",
    "MPICH": "python -m mjax.train",
    "torchrun": " -m mjax.train",
    "Ray": "python -m tools.launch_ray",
}


@pytest.mark.parametrize("name", quick(LAUNCHED, 0))
def test_shell_examples_parse_and_call_what_exists(name):
    script = SCRIPTS[list(LAUNCHED).index(name)]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = call_of(script, LAUNCHED[name])
    if name == "Ray":
        at = words.index("--")
        options, words = words[:at], words[at + 1 :]
        assert launch_ray.parser().parse_args(options).nodes == 4
    require_that_it_runs(words)


def test_the_sky_file_is_one_and_calls_what_exists():
    """Its schema was checked once by the package skypilot; here, its keys are."""
    sky = yaml.safe_load(FILES[0])
    assert set(sky) == {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
    subprocess.run(["bash", "-n"], input=sky["run"], text=True, check=True)
    env = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2"}
    printed = subprocess.run(
        ["bash", "-c", sky["run"].replace("python -m mjax.train", "printf '%s\n'")],
        env=env | {"SKYPILOT_NODE_RANK": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    given = dict(zip(printed, printed[1:], strict=False))
    options = [given[f"--{name}"] for name in ("coordinator", "num-processes", "process-id")]
    assert options == ["10.0.0.7:8476", "2", "1"]
    assert load(ROOT / given["--config"]).model.num_hidden_layers == 32


def test_the_job_set_loads_and_calls_what_exists():
    job = yaml.safe_load(FILES[1])
    (replicated,) = job["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "mjax.train"]
    require_that_it_runs(container["command"][3:])
    env = {v["name"]: v.get("value", "2") for v in container["env"]}
    found = find_processes(env)
    assert found.count == pods["parallelism"] == pods["completions"] and found.index == 2
    assert found.coordinator.startswith(f"{job['metadata']['name']}-{replicated['name']}-0-0.")
    named = {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= named
    assert load(ROOT / container["command"][4]).model.num_hidden_layers == 32
