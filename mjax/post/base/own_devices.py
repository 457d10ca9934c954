"""Devices of a part of a run, such as an engine or a teacher, apart from those that train."""

from collections.abc import Sequence

import jax

from mjax.errors import UserError


def split_devices(
    devices: Sequence[jax.Device], count: int, what: str
) -> tuple[list[jax.Device], list[jax.Device]]:
    """(the trainer's devices, the part's), which are the last `count`; `what` is the part's key."""
    if not 1 <= count < len(devices):
        raise UserError(
            f"{what}={count}: the run has {len(devices)} devices, of which training needs one or "
            f"more; give 1 to {len(devices) - 1}, or leave it out to share them"
        )
    first = len(devices) - count
    return list(devices[:first]), list(devices[first:])
