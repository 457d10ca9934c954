"""The folder of a run's second, fast tier of checkpoints: on the disk or in the memory of nodes.

`checkpoint.local_dir` may be shared by many runs, so each has a folder of its own there. Its name
comes from a token in run.dir and from where run.dir lies. So a run that starts afresh in a new
folder, or in a copy of one, never takes what another has left.
"""

import uuid
import zlib
from pathlib import Path

from mjax.checkpoint.node_store import NONE
from mjax.checkpoint.peers import gather_numbers
from mjax.config.schema import Config
from mjax.errors import UserError
from mjax.sharding.agreement import on_process_0
from mjax.train.log_writer import reason, replace_text

TOKEN = "local_token"  # file in run.dir


def local_folder(cfg: Config) -> Path | None:
    """The folder of this run below `checkpoint.local_dir`; None if it has none yet.

    All processes call it, and go by what the first one reads.
    """
    if cfg.checkpoint.local_dir is None:
        return None
    run = Path(cfg.run.dir).absolute()
    number = int(gather_numbers([_read_token(run / TOKEN)])[0, 0])
    if number == NONE:
        return None
    place = zlib.crc32(str(run).encode())
    return Path(cfg.checkpoint.local_dir).absolute() / f"mjax-{run.name}-{number:012x}-{place:08x}"


def _read_token(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"), 16) if file.is_file() else NONE
    except (OSError, ValueError) as e:
        why = reason(e) if isinstance(e, OSError) else "it holds no token"
        raise UserError(f"{file} cannot be read: {why}; mend the folder, or remove the file") from e


def claim(cfg: Config) -> None:
    """Give this run a folder of its own below `checkpoint.local_dir`, if it wants one."""
    token = Path(cfg.run.dir) / TOKEN

    def write() -> None:
        if token.is_file():
            return
        try:
            replace_text(token, uuid.uuid4().hex[:12])
        except OSError as e:
            raise UserError(f"{token} cannot be written: {reason(e)}; free space or mend it") from e

    if cfg.checkpoint.local_dir is not None:
        on_process_0(write)
