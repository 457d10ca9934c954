"""Actions after each save of a run: weights for transformers beside it, its copy in a store.

Both begin when a step has its name, and go on while the run trains; the next save waits for them.
The export is a process of its own on the CPU, so that it takes neither the devices nor the lock of
this one's interpreter.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mjax.checkpoint.base.mirror import STEPS, WEIGHTS_BESIDE, Mirror
from mjax.checkpoint.base.steps import steps_in
from mjax.config.schema.run import Config
from mjax.data.base.object_store import address_of
from mjax.errors import UserError


def mirror_of(cfg: Config) -> Mirror | None:
    """The store that a run's steps are copied to, if any."""
    if cfg.checkpoint.mirror is None:
        return None
    return Mirror(Path(cfg.run.dir), address_of(cfg.checkpoint.mirror).rstrip("/"))


def follow_up(cfg: Config) -> Callable[[], None] | None:
    """The action of the first process after each save, which raises `UserError`, or None."""
    mirror = mirror_of(cfg)
    if mirror is None and not cfg.checkpoint.hf:
        return None

    def after_save() -> None:
        if cfg.checkpoint.hf:
            export_beside(Path(cfg.run.dir))
        if mirror is not None:
            mirror.push()

    return after_save


def export_beside(run: Path) -> None:
    """Write the weights of the newest step to RUN/hf/STEP; those of steps that are gone go, too.

    Raises `UserError` with the line of `mjax convert export`.
    """
    steps, beside = steps_in(run / STEPS), run / WEIGHTS_BESIDE
    for old in list(beside.glob("*")):
        if old.name not in {step.name for step in steps}:
            shutil.rmtree(old, ignore_errors=True)
    target = beside / steps[-1].name
    if target.is_dir():
        return
    command = [sys.executable, "-m", "mjax.convert", "export"]
    command += ["--ckpt", str(steps[-1]), "--hf", str(target)]
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "JAX_"))}
    done = subprocess.run(
        command, env=alone | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"checkpoint.hf: {target} was not written: {said[-1]}")
