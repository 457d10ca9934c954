"""The folder of a run."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from mjax.checkpoint.store import ensure_writable
from mjax.config.schema.run import Config
from mjax.run.faults.run_lock import LOCK_NAME


@contextlib.contextmanager
def run_folder(cfg: Config) -> Iterator[Path]:
    """run.dir, proven writable; a new one is removed again if it stays empty."""
    folder = Path(cfg.run.dir)
    is_new = not folder.exists()
    ensure_writable(folder)
    try:
        yield folder
    finally:
        if jax.process_index() == 0 and is_new:
            names = {path.name for path in folder.iterdir()}
            if not names - {"data.lock", LOCK_NAME}:
                shutil.rmtree(folder)
