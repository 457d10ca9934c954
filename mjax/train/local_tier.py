"""The folder of a run's second, fast tier of checkpoints: on a disk or in the memory of its node.

`checkpoint.local_dir` may be shared by many runs, so each has a folder of its own there. Its name
comes from a token in run.dir and from where run.dir lies. So a run that starts afresh in a new
folder, or in a copy of one, never takes what another has left.
"""

import uuid
import zlib
from pathlib import Path

import jax

from mjax.config.schema import Config
from mjax.errors import UserError, or_user_error
from mjax.train.log_writer import replace_text

TOKEN = "local_token"  # file in run.dir


def require_one_process(cfg: Config) -> None:
    """Raise `UserError` if several processes are to have a local tier."""
    if cfg.checkpoint.local_dir and jax.process_count() > 1:
        raise UserError(
            f"checkpoint.local_dir needs one process: this job has {jax.process_count()}, and one "
            "lost node would lose a part of each of its checkpoints; set "
            "checkpoint.local_dir=null and a lower checkpoint.interval"
        )


def local_folder(cfg: Config) -> Path | None:
    """The folder of this run below `checkpoint.local_dir`; None if it has none yet."""
    run = Path(cfg.run.dir).absolute()
    if cfg.checkpoint.local_dir is None or not (run / TOKEN).is_file():
        return None
    with or_user_error(f"{run / TOKEN} cannot be read: {{reason}}; mend the folder"):
        token = (run / TOKEN).read_text(encoding="utf-8").strip()
    place = zlib.crc32(str(run).encode())
    return Path(cfg.checkpoint.local_dir) / f"mjax-{run.name}-{token}-{place:08x}"


def claim(cfg: Config) -> None:
    """Give this run a folder of its own below `checkpoint.local_dir`, if it wants one."""
    token = Path(cfg.run.dir) / TOKEN
    if cfg.checkpoint.local_dir is None or token.is_file():
        return
    with or_user_error(f"{token} cannot be written: {{reason}}; free space or mend it"):
        replace_text(token, uuid.uuid4().hex[:12])
