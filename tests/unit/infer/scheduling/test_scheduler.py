"""Laws of the scheduler, on a toy model that shows what every planned token reads (`toy.py`)."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mjax.errors import UserError
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Limits, QueueFull, Scheduler, Sequence
from tests.marks import slow
from tests.unit.infer.engine.toy import Toy

PAGE = 4


def build(pages=40, page=PAGE, window=None, cache_prefixes=True, **limits) -> Toy:
    pool = PagePool(pages, page=page, cache_prefixes=cache_prefixes)
    return Toy(Scheduler(Limits(**limits), pool, window))


def prompt_of(family: int, length: int) -> list[int]:
    """Prompts of a family begin alike; families 0 and 1 share their first 6 tokens."""
    start = [3] * 6 if family < 2 else []
    return (start + [10 + family] * length)[:length]


class Operations:
    """Random operations on an engine, drawn by `draw(least, most)`."""

    def __init__(self, toy: Toy, draw):
        self.toy, self.draw, self.count = toy, draw, 0

    def add(self) -> None:
        draw, toy = self.draw, self.toy
        length = draw(1, draw(2, 20))
        sequence = Sequence(
            id=self.count,
            tokens=prompt_of(draw(0, 2), length),
            limit=length + draw(0, draw(1, 30)),
            priority=draw(0, 2),
            salt=(("salt", draw(0, 1)),),
            reads_prefix=draw(0, 4) > 0,
        )
        self.count += 1
        try:
            toy.add(sequence)
        except QueueFull:
            assert len(toy.scheduler.waiting) >= toy.scheduler.limits.queued
        except UserError as error:
            most = -(-max(sequence.limit - 1, length) // toy.pool.page)
            assert most > toy.pool.pages - 1 and "cache pages" in str(error)

    def step(self) -> None:
        self.toy.step()

    def read(self) -> None:
        for _ in range(min(len(self.toy.in_flight), self.draw(1, 9))):
            self.toy.read()

    def abort(self) -> None:
        """Sequences that have ended may be aborted again."""
        if self.toy.clients:
            sequences = list(self.toy.clients)
            self.toy.abort(sequences[-1 - self.draw(0, min(len(sequences), 12) - 1)])

    def forget(self) -> None:
        self.toy.pool.forget()


def random_engine(draw) -> Toy:
    return build(
        pages=draw(2, draw(2, 50)),
        page=draw(1, 4),
        window=draw(1, 9) if draw(0, 1) else None,
        cache_prefixes=draw(0, 4) > 0,
        rows=draw(1, 9),
        tokens=draw(1, 24),
        chunk=draw(1, 24),
        length=50,
        queued=9,
        prefill_alone=draw(0, 3) == 0,
    )


class Machine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        self.operations = Operations(random_engine(self.drawing(data)), None)
        self.toy = self.operations.toy

    def drawing(self, data):
        return lambda least, most: data.draw(st.integers(least, most))

    def run(self, name, data):
        self.operations.draw = self.drawing(data)
        getattr(self.operations, name)()

    @rule(data=st.data())
    def add(self, data):
        self.run("add", data)

    @rule(data=st.data())
    def step(self, data):
        self.run("step", data)

    @precondition(lambda self: self.toy.in_flight)
    @rule(data=st.data())
    def read(self, data):
        self.run("read", data)

    @precondition(lambda self: self.toy.clients)
    @rule(data=st.data())
    def abort(self, data):
        self.run("abort", data)

    @rule(data=st.data())
    def forget(self, data):
        self.run("forget", data)

    @invariant()
    def pages_are_counted(self):
        if hasattr(self, "toy"):
            self.toy.check()

    def teardown(self):
        if hasattr(self, "toy"):
            self.toy.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("operations", [20_000, pytest.param(100_000, marks=slow)])
def test_random_operations_keep_every_law(operations):
    """Each token reads its own history, each sequence ends, pages are counted (`Toy`)."""
    source = random.Random(operations)
    done = preemptions = hits = 0
    while done < operations:
        toy = random_engine(source.randint)
        run = Operations(toy, source.randint)
        for _ in range(500):
            name = source.choices(["add", "step", "read", "abort", "forget"], [20, 40, 25, 1, 0.2])[
                0
            ]
            getattr(run, name)()
            done += 1
        toy.finish()
        preemptions += toy.preemptions
        hits += sum(sequence.hits for sequence in toy.clients)
    assert preemptions > operations / 400 and hits > operations / 20
