"""The launchers' examples of docs/start/multi-host.md: their shell parses, their YAML loads, and
what they call exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mjax.config import load
from mjax.sharding.processes.launcher import find_processes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "start" / "multi-host.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("script", SCRIPTS, ids=["Slurm", "Open MPI"])
def test_shell_examples_parse_and_call_what_exists(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    called = script.replace("\\\n", " ").split("python -m mjax.train")[1].split("\n")[0]
    require_that_it_runs(called.replace("$SLURM_JOB_NAME", "a").split())


def test_the_job_set_loads_and_calls_what_exists():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    job = yaml.safe_load(text)
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
