"""The folder of a run's second, fast tier of checkpoints: on the disk or in the memory of nodes.

`checkpoint.local_dir` may be shared by many runs, so each has a folder of its own there. Its name
comes from a token in run.dir and from where run.dir lies. So a run that starts afresh in a new
folder, or in a copy of one, never takes what another has left.
"""

import uuid
import zlib
from pathlib import Path

import jax

from mjax.checkpoint.local.node_store import NONE
from mjax.checkpoint.local.peers import gather_numbers
from mjax.config.schema.run import Config
from mjax.errors import or_user_error
from mjax.files import replace_text
from mjax.sharding.processes.agreement import on_process_0

TOKEN = "local_token"  # file in run.dir


def local_folder(cfg: Config) -> Path | None:
    """The folder of this run below `checkpoint.local_dir`; None if it has none yet.

    All processes call it, and go by what the first one reads.
    """
    if cfg.checkpoint.local_dir is None:
        return None
    run = Path(cfg.run.dir).absolute()
    mine = _read_token(run / TOKEN) if jax.process_index() == 0 else NONE
    number = int(gather_numbers([mine])[0, 0])
    if number == NONE:
        return None
    place = zlib.crc32(str(run).encode())
    return Path(cfg.checkpoint.local_dir).absolute() / f"mjax-{run.name}-{number:08x}-{place:08x}"


def _read_token(file: Path) -> int:
    """A number that stands for the token in `file`, or NONE."""
    if not file.is_file():
        return NONE
    with or_user_error(f"{file} cannot be read: {{reason}}; mend the folder"):
        return zlib.crc32(file.read_bytes())


def claim(cfg: Config) -> None:
    """Give this run a folder of its own below `checkpoint.local_dir`, if it wants one."""
    token = Path(cfg.run.dir) / TOKEN

    def write() -> None:
        with or_user_error(f"{token} cannot be written: {{reason}}; free space or mend it"):
            if not token.is_file():
                replace_text(token, uuid.uuid4().hex[:12])

    if cfg.checkpoint.local_dir is not None:
        on_process_0(write)
