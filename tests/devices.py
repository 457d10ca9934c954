"""Kernels chosen as on another device than the one that runs a test."""

import functools

import jax
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.base.chooser import Choice, Device, Inputs

CPU = Device("cpu")
GPU = Device("gpu")
HOPPER = Device("gpu", hopper=True)
BLACKWELL = Device("gpu", blackwell=True)

# Whether jax lowers products of scaled blocks for CPUs, too.
MULTIPLIES_SCALED = jax.__version_info__ >= (0, 11)


def choose_for(monkeypatch: pytest.MonkeyPatch, device: Device, *ops: str) -> None:
    """Let these ops be chosen for `device`, and all others for the real one."""

    def elsewhere(rule, x: Inputs, **facts) -> Choice:
        return rule(x._replace(device=device), **facts)

    for op in ops:
        rule = functools.partial(elsewhere, chooser.RULES[op])
        monkeypatch.setitem(chooser.RULES, op, rule)
