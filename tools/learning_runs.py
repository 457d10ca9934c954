"""Runs of mjax for a figure: commands in processes of their own, then curves and a table."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mjax.errors import UserError
from mjax.report.runs import Run
from tools.curves import drawing

Curve = Mapping[int, float]  # a value by step


def train_once(command: str, run: Path, steps: int, *arguments: object) -> None:
    """Train in the folder `run`, unless it holds the last step already."""
    if not (run / "checkpoints" / str(steps)).is_dir():
        run_mjax(command, *arguments, f"train.steps={steps}", f"run.dir={run}")


def run_mjax(*arguments: object) -> None:
    """Run a command of mjax; its output goes nowhere unless it fails."""
    command = [sys.executable, "-m", "mjax.cli", *map(str, arguments)]
    print("mjax", *arguments, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UserError(f"mjax {arguments[0]} failed:\n{done.stdout[-2000:]}")


def draw_curves(curves: Mapping[str, list[Curve]], field: str, title: str, file: Path) -> None:
    """Draw curves of several seeds by name as SVG."""
    runs = []
    for name, of_seeds in curves.items():
        for curve in of_seeds:
            steps, values = np.array(list(curve)), np.array(list(curve.values()))
            runs.append(Run(name, {"step": steps, field: values}, {}, [], {}))
    file.write_text(drawing(runs, field, title), encoding="utf-8")


def spread(values: list[float]) -> str:
    """The mean of values, and the lowest and the highest."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
