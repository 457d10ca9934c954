"""Build sdist and wheel, install the wheel in a bare environment, and use it as a stranger would.

    python -m tools.try_wheel --python python3.13 --constraint requirements/cpu.txt

The wheel is built from the sdist. Nothing of the checkout is on the path of what is tried: the
commands run in an empty folder, the smoke tests on a copy of `tests/` beside the installed package.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mjax

ROOT = Path(__file__).parents[1]
SMOKE = [
    "tests/unit/commands/test_cli.py",
    "tests/unit/optim",
    "tests/unit/sharding",
    "tests/unit/doctor/test_clashes.py",
    "tests/laws/training/test_objective.py",
]
TRAIN = "train --config quickstart train.steps=2 schedule.warmup_steps=1 train.sample_tokens=4"
COMMANDS = [
    "--version",
    "--help",
    "doctor",
    TRAIN,
    "generate --ckpt runs/quickstart --prompt def --max-new-tokens 4",
    "checkpoint ls runs/quickstart",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try")
    parser.add_argument("--constraint", type=Path, help="versions of dependencies")
    parser.add_argument("--no-tests", action="store_true", help="commands only")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = bare_python(args.python, folder / "venv")
        wheel = build(python, folder / "dist")
        install(python, str(wheel), args.constraint)
        try_commands(python, folder / "empty")
        if not args.no_tests:
            install(python, f"{wheel}[test]", args.constraint)
            try_tests(python, folder / "tests")
        print(f"{wheel.name} works on {version_of(python)} ({time.monotonic() - began:.0f} s)")
    return 0


def bare_python(interpreter: str, folder: Path) -> Path:
    """The interpreter of a new environment without packages."""
    run(interpreter, "-m", "venv", str(folder))
    return folder / "bin" / "python"


def build(python: Path, folder: Path) -> Path:
    """Build the sdist, and the wheel from it; returns the wheel."""
    run(str(python), "-m", "pip", "install", "-q", "build")
    run(str(python), "-m", "build", "--outdir", str(folder), str(ROOT))
    sdist, wheel = sorted(folder.iterdir(), key=lambda file: file.suffix == ".whl")
    assert sdist.name == f"mjax-{mjax.__version__}.tar.gz", sdist
    return wheel


def install(python: Path, what: str, constraint: Path | None) -> None:
    limits = [] if constraint is None else ["-c", str(constraint.resolve())]
    run(str(python), "-m", "pip", "install", "-q", what, *limits)


def try_commands(python: Path, folder: Path) -> None:
    """Run commands in an empty folder."""
    folder.mkdir()
    for line in COMMANDS:
        said = run(str(python.with_name("mjax")), *line.split(), cwd=folder)
        if line == "--version":
            assert said == f"mjax {mjax.__version__}\n", said
    assert (folder / "runs" / "quickstart" / "checkpoints" / "2").is_dir()


def try_tests(python: Path, folder: Path) -> None:
    """Run the smoke tests on a copy of them, with the installed package."""
    folder.mkdir()
    for name in ("tests", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    run(str(python), "-m", "pytest", "-q", "-x", *SMOKE, cwd=folder)


def version_of(python: Path) -> str:
    return run(str(python), "--version").strip()


def run(*command: str, cwd: Path | None = None) -> str:
    """The standard output of a command, without this checkout on its path."""
    print("$", *command, flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
