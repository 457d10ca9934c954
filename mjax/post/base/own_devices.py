"""Devices of a run that a part of it has for itself, such as a frozen role or an engine."""

from collections.abc import Sequence

import jax

from mjax.errors import UserError


def split_devices(
    devices: Sequence[jax.Device], count: int, what: str
) -> tuple[list[jax.Device], list[jax.Device]]:
    """(the devices of the trainer, the last `count`, which `what` has for itself).

    Raises `UserError`, which begins with `what`, where none would be left to train.
    """
    if not 0 < count < len(devices):
        raise UserError(
            f"{what}: {count} of {len(devices)} devices do not leave one to train and one for it; "
            "give it fewer, or start more devices"
        )
    return list(devices[:-count]), list(devices[-count:])
