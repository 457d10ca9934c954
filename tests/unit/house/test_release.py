"""A release agrees with itself: versions, licenses, workflows, locked sets, the image."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import mjax
from mjax import files
from mjax.config import load
from mjax.errors import UserError
from tests.marks import exhaustive, slow
from tools import licenses

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SETS = sorted((ROOT / "requirements").glob("*.txt"))


def read_yaml(file: Path) -> dict:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place_and_others_follow():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changes, re.M)
    assert released[0][0] == mjax.__version__ and "## [Unreleased]" in changes
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", changes, re.M)) <= kinds
    cited = read_yaml(ROOT / "CITATION.cff")
    assert (cited["version"], cited["date-released"]) == released[0]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["license"] == PROJECT["license"]


def test_licenses_go_with_ours_and_each_dependency_is_listed():
    found = licenses.by_license()
    assert not licenses.REFUSED & found.keys(), found
    page = (ROOT / "docs/develop/dependencies.md").read_text()
    users = {name for name, extras in licenses.direct().items() if extras - licenses.CHECKS_ONLY}
    listed = set(re.findall(r"[\w-]+", page))
    installed = {name for names in found.values() for name in names}
    assert len(users) > 20 and not (users & installed) - listed


@pytest.mark.parametrize(
    "text, kind",
    [("GPL-3.0-or-later", "GPL"), ("LGPL-2.1", "LGPL"), ("AGPL-3.0", "GPL"), ("", "unknown")],
)
def test_a_license_that_does_not_go_with_ours_is_refused(text, kind, tmp_path):
    class Package:
        metadata = licenses.metadata.Distribution.from_name("pytest").metadata
        files = ()

    for name in ("License-Expression", "License", "Classifier"):
        del Package.metadata[name]
    Package.metadata["License"] = text
    assert licenses.license_of(Package) == kind and kind in licenses.REFUSED


def locked(file: Path, python: str) -> dict[str, Version]:
    """The versions of a locked set for a Python on Linux."""
    lines = [line for line in file.read_text().splitlines() if line and line[0] not in "# "]
    found = {}
    env = {"python_full_version": f"{python}.1", "python_version": python}
    for needed in map(Requirement, lines):
        if needed.marker is None or needed.marker.evaluate({**env, "sys_platform": "linux"}):
            (pin,) = needed.specifier
            assert pin.operator == "==" and needed.name not in found, needed
            found[licenses.canonical(needed.name)] = Version(pin.version)
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("file", SETS, ids=lambda file: file.stem)
def test_locked_sets_hold_what_the_project_asks_for(file, python):
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["serve"] + extras["data"]
    wanted += extras["cuda13"] if file.stem == "cuda13" else []
    versions = locked(file, python)
    assert len(SETS) == 2 and len(versions) > 90
    for needed in map(Requirement, wanted):
        is_here = needed.marker is None or needed.marker.evaluate({"python_version": python})
        if is_here and needed.name != "mjax":
            assert versions[licenses.canonical(needed.name)] in needed.specifier, needed


KNOWN = {"python", "pytest", "test", ".ci/run"}  # programs that workflows call


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_what_exists(file):
    flow = read_yaml(file)
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    lines = [step["run"] for step in steps if "run" in step]
    assert len(lines) >= 4 and True in flow  # `on` is true in YAML 1.1
    for line in lines:
        words = line.split()
        assert words[0] in KNOWN, line
        named = re.findall(r"(?<![\w/])(?:tests|requirements|\.ci)/[\w./-]+", line)
        assert all((ROOT / name).exists() for name in named), line
        for module in re.findall(r"-m (tools\.\w+)", line):
            assert ROOT.joinpath(*module.split(".")).with_suffix(".py").exists(), line
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= 180
    assert all("@" in step["uses"] for step in steps if "uses" in step)


def test_the_pythons_of_the_matrix_are_those_of_the_project():
    matrix = read_yaml(ROOT / ".github/workflows/ci.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    said = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert matrix["python"] == said and PROJECT["requires-python"] == f">={said[0]}"


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms_have_their_fields(file):
    form = read_yaml(file)
    if file.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_configs_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(files.own_configs()) > 50
    assert load("quickstart") == load(ROOT / "configs/quickstart.yaml")
    assert load("llama3_8b", ["data.mock=true"]) == load("models/llama3_8b", ["data.mock=true"])
    (tmp_path / "own.yaml").write_text("base: quickstart\ntrain: {steps: 70}\n")
    assert load("own.yaml").train.steps == 70 and load("own.yaml").optimizer.name == "muon"
    (tmp_path / "quickstart").write_text("train: {steps: 30}\n")  # a file goes before a name
    assert load("quickstart", ["data.mock=true"]).train.steps == 30
    with pytest.raises(UserError, match="quikstart: no such file.*did you mean quickstart[?]"):
        load("quikstart")
    with pytest.raises(UserError, match="none.yaml: cannot read the config file"):
        load("none.yaml")


def test_short_names_of_configs_are_unique():
    own = files.own_configs()
    assert len({file.stem for file in own.values()}) == len(own)


# ---- the image -----------------------------------------------------------------------------------


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, its arguments) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", "")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_the_image_copies_and_installs_what_exists():
    steps = instructions(ROOT / "Dockerfile")
    assert steps[0][0] == "FROM" and steps[-1] == ("ENTRYPOINT", '["mjax"]')
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied: set[str] = set()
    for kind, rest in steps:
        if kind == "COPY":
            copied |= set(rest.split()[:-1])
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists() and f"!{name.split('/')[0]}" in ignored, name
        if kind == "RUN" and "pip install" in rest:
            assert "--only-binary :all:" in rest and "-c requirements/cuda13.txt" in rest
            for extra in re.findall(r"'\.\[(.*?)\]'", rest):
                assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]  # none of its files may be missing when it is built
    assert {*wheel["packages"], *wheel["force-include"], PROJECT["readme"]} <= copied


def run(command: str, folder: Path, **env: str) -> str:
    """The output of a shell command without this checkout on Python's path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=kept | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@exhaustive
@pytest.mark.timeout(3600)  # gigabytes of wheels
def test_the_steps_of_the_image_run_without_docker(tmp_path):
    """All of them but the packages of the system, with another root in place of /opt."""
    at, env = tmp_path, {"PATH": os.environ["PATH"]}
    for kind, rest in instructions(ROOT / "Dockerfile"):
        rest = rest.replace("/opt/", f"{tmp_path}/opt/")
        if kind == "WORKDIR":
            at = Path(rest) if rest.startswith(str(tmp_path)) else tmp_path / "workspace"
            at.mkdir(parents=True)
        elif kind == "ENV":
            pairs = dict(pair.split("=", 1) for pair in rest.split())
            env |= {name: value.replace("$PATH", env["PATH"]) for name, value in pairs.items()}
        elif kind == "COPY":
            *names, target = rest.split()
            for name in names:
                there = at / target / name if target == "./" else at / target
                there.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, there)
        elif kind == "RUN" and "apt-get" not in rest:
            said = run(rest, at, **env)
    assert said == f"mjax {mjax.__version__}\n"
    found = run("mjax doctor --json", at, **env)
    assert '"jax-cuda13-plugin"' in found and '"healthy": true' in found


@slow
def test_the_wheel_has_configs_types_and_no_tests(tmp_path):
    """It works from an empty folder, with nothing of the checkout on Python's path."""
    pip = f"{sys.executable} -m pip"
    run(f"{pip} wheel -q --no-deps -w {tmp_path}/dist {ROOT}", tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == f"mjax-{mjax.__version__}-py3-none-any.whl"
    run(f"{pip} install -q --no-deps --target {tmp_path}/site {wheel}", tmp_path)
    site = tmp_path / "site"
    assert (site / "mjax/py.typed").exists() and not list(site.rglob("test_*.py"))
    empty = tmp_path / "empty"
    empty.mkdir()
    at = {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    command = f"{sys.executable} -m mjax.cli"
    assert run(f"{command} --version", empty, **at) == f"mjax {mjax.__version__}\n"
    printed = run(f"{command} train --config quickstart --print-config", empty, **at)
    assert yaml.safe_load(printed)["run"]["dir"] == "runs/quickstart"
    where = run(f"{sys.executable} -c 'import mjax; print(mjax.__file__)'", empty, **at)
    assert where.startswith(str(site))
