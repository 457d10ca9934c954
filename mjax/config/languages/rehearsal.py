"""The language of `run.rehearse`: which fault strikes a run, at which step, in which process."""

import re
from typing import NamedTuple

FAULTS = ("nan", "nan_once", "bit_flip", "hang", "die")
_FAULT = re.compile(r"(\w+)@([1-9]\d*)(?::(\d+))?")


class Fault(NamedTuple):
    """A fault of a kind of `FAULTS`, at a step, in a process."""

    kind: str
    step: int
    process: int


def parse_fault(text: str) -> Fault | None:
    """The fault that a text such as `die@20:1` names; None if it names none."""
    found = _FAULT.fullmatch(text)
    if found is None or found[1] not in FAULTS:
        return None
    return Fault(found[1], int(found[2]), int(found[3] or 0))
