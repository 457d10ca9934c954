"""Law: on CPU devices every two collectives of a program depend on each other.

XLA's CPU runtime starts a collective as soon as its operands are there. Two that do not depend on
each other may start in another order on each device, which then waits forever.
"""

import re

import jax
import numpy as np
import pytest

from mjax.prove import Cell, make_batch, make_trainer
from mjax.sharding.processes.fake_devices import usual_fusions
from mjax.train import programs
from tests.marks import exhaustive, quick, slow

COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)\("
)
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? [a-z][\w\-]*\(([^)]*)\)(.*)$")

PIPELINE = {"pp": 2, "dp": 2, "tp": 2}
CASES = [
    ("dense", Cell(PIPELINE, 1, 1, 24), ["train.remat=full"]),
    ("experts", Cell({"pp": 2, "ep": 2, "tp": 2}, 1, 2, 24), []),
    ("dense", Cell({"tp": 2, "cp": 4}, 0, 1, 24, "ring"), ["mesh.tp_overlap=always"]),
]


@slow
@pytest.mark.parametrize("feature, cell, keys", quick(CASES, 0), ids=str)
def test_every_two_collectives_depend_on_each_other(feature, cell, keys):
    text = make_trainer(feature, cell, *keys).lower().compile().as_text()
    assert len(COLLECTIVE.findall(text)) > 3
    assert not independent(text)


@slow
def test_the_law_can_fail(monkeypatch):
    monkeypatch.setattr(programs, "in_program_order", lambda program: program)
    assert independent(make_trainer("dense", Cell(PIPELINE, 1, 1, 24)).lower().compile().as_text())


@exhaustive
def test_the_order_changes_no_bit(monkeypatch):
    """Of a mesh whose collectives are of one kind, so that it ends without the order too."""
    ordered, free = (make_trainer("biases", Cell({"dp": 2}, 1, 2, 24)) for _ in range(2))
    for made in (ordered, free):
        made.programs.recompile(usual_fusions())
    ordered.step(make_batch(24))
    monkeypatch.setattr(programs, "in_program_order", lambda program: program)
    free.step(make_batch(24))
    first, second = (made.lower().compile().as_text() for made in (ordered, free))
    assert first != second
    jax.tree.map(np.testing.assert_array_equal, ordered.state, free.state)


def independent(text: str) -> list[tuple[str, str]]:
    """Pairs of instructions of compiled HLO that hold collectives and do not depend on another."""
    bodies = computations(text)
    found = []
    for lines in bodies.values():
        before: dict[str, set[str]] = {}
        collectives: list[str] = []
        for line in lines:
            name, operands, rest = INSTRUCTION.match(line).groups()
            names = [n for n in re.findall(r"%?([\w.\-]+)", operands) if n in before]
            before[name] = set(names).union(*(before[n] for n in names))
            if COLLECTIVE.search(line) or any(holds(bodies, n) for n in called(bodies, rest)):
                found += [(name, other) for other in collectives if other not in before[name]]
                collectives.append(name)
    return found


def computations(text: str) -> dict[str, list[str]]:
    """The lines of instructions of each computation of compiled HLO."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = found.setdefault(header[1], [])
        elif INSTRUCTION.match(line):
            lines.append(line)
    return found


def called(bodies: dict[str, list[str]], rest: str) -> list[str]:
    """The computations that an instruction calls, named behind its operands."""
    return [name for name in re.findall(r"%([\w.\-]+)", rest) if name in bodies]


def holds(bodies: dict[str, list[str]], name: str) -> bool:
    """Whether a computation, or one that it calls, has a collective."""
    for line in bodies[name]:
        rest = INSTRUCTION.match(line)[3]
        if COLLECTIVE.search(line) or any(holds(bodies, n) for n in called(bodies, rest)):
            return True
    return False
