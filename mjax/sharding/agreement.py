"""What one process does for all: every process returns, or every process raises the same error.

Invariant: where an action fails, no process waits for the one that gave up.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from mjax.errors import UserError

LONGEST = 4096  # bytes of an error's line that travel


def on_process_0(action: Callable[[], object]) -> None:
    """Run `action` on process 0; a `UserError` there is raised by all. Every process must call."""
    line = b""
    if jax.process_index() == 0:
        try:
            action()
        except UserError as e:
            if jax.process_count() == 1:
                raise
            line = str(e).encode()[:LONGEST]
    if jax.process_count() == 1:
        return
    text = np.zeros(LONGEST, np.uint8)
    text[: len(line)] = np.frombuffer(line, np.uint8)
    said = multihost_utils.broadcast_one_to_all(text).tobytes().rstrip(b"\0")
    if said:
        raise UserError(said.decode(errors="replace"))


def wait_for_every_process(name: str) -> None:
    """Return when every process has called with this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
