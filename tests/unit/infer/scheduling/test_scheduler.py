"""Laws of the scheduler, on a toy model that shows what every planned token reads (`toy.py`)."""

import random
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mjax.errors import UserError
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Limits, QueueFull, Scheduler, TokenSequence
from tests.marks import slow
from tests.unit.infer.scheduling.toy import END, Toy, sample

PAGE = 4


def build(pages=40, page=PAGE, window=None, cache_prefixes=True, snapshots=0, **limits) -> Toy:
    pool = PagePool(pages, page=page, cache_prefixes=cache_prefixes, snapshots=snapshots)
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
        sequence = TokenSequence(
            id=self.count,
            tokens=prompt_of(draw(0, 2), length),
            limit=length + draw(0, draw(4, 30)),
            priority=draw(0, 2),
            salt=(("salt", draw(0, 1)),),
            reads_prefix=draw(0, 4) > 0,
            waits=draw(0, 5) == 0,
        )
        sequence.whole = not sequence.reads_prefix and length % 2 == 0
        self.count += 1
        try:
            toy.add(sequence)
        except QueueFull:
            assert len(toy.scheduler.waiting) >= toy.scheduler.limits.queued
        except UserError as error:
            most = -(-max(sequence.limit - 1, length) // toy.pool.page)
            assert most > toy.pool.pages - 1 and "cache pages" in str(error)

    def step(self) -> None:
        for sequence in self.toy.scheduler.running.values():
            may_draft = sequence.waits and not self.toy.pool.snapshots
            if may_draft and sequence.sampled and not sequence.flying:
                sequence.drafts = self.guess(sequence)
        self.toy.step()

    def guess(self, sequence: TokenSequence) -> list[int]:
        """Drafts, of which one may be wrong."""
        known, wrong = list(sequence.tokens), self.draw(0, 9)
        for number in range(self.draw(0, 7)):
            known.append(sample(known, sequence.salt) + (number == wrong))
        return known[len(sequence.tokens) :]

    def read(self) -> None:
        for _ in range(min(len(self.toy.in_flight), self.draw(1, 9))):
            self.toy.read()

    def abort(self) -> None:
        """Sequences that have ended may be aborted again."""
        if self.toy.clients:
            sequences = list(self.toy.clients)
            self.toy.abort(sequences[-1 - self.draw(0, min(len(sequences), 12) - 1)])

    def forget(self) -> None:
        self.toy.forget()


def random_engine(draw) -> Toy:
    snapshots = draw(1, 4) if draw(0, 2) == 0 else 0
    return build(
        pages=draw(2, draw(12, 50)),
        page=draw(1, draw(1, 4)),
        window=draw(1, 9) if draw(0, 1) else None,
        cache_prefixes=draw(0, 4) > 0,
        rows=draw(1, 9),
        tokens=draw(1, 24),
        chunk=draw(1, 24),
        length=50,
        queued=9,
        prefill_alone=snapshots > 0 or draw(0, 3) == 0,
        snapshots=snapshots,
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
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("operations", [12_000, pytest.param(100_000, marks=slow)])
def test_random_operations_keep_every_law(operations):
    """Each token reads its own history, each sequence ends, pages are counted (`Toy`)."""
    source = random.Random(operations)
    names = ["add", "step", "read", "abort", "forget"]
    done = preemptions = hits = drafted = restored = 0
    while done < operations:
        toy = random_engine(source.randint)
        run = Operations(toy, source.randint)
        for _ in range(500):
            name = source.choices(names, [20, 40, 25, 1, 0.2])[0]
            getattr(run, name)()
            done += 1
        toy.finish()
        preemptions += toy.preemptions
        drafted += toy.drafted
        restored += toy.restored
        hits += sum(sequence.hits for sequence in toy.clients)
    assert preemptions > operations / 1000 and hits > operations / 20
    assert drafted > operations / 100 and restored > operations / 1000


def add(toy: Toy, tokens, new=4, **fields) -> TokenSequence:
    sequence = TokenSequence(len(toy.clients), tokens, len(tokens) + new, **fields)
    toy.add(sequence)
    return sequence


def step(toy: Toy):
    """A step whose samples the host reads at once."""
    plan = toy.step()
    toy.read_all()
    return plan


def prompt_without_end(new: int, salt: tuple = (), first: int = 100) -> list[int]:
    """A prompt of 5 tokens after which the toy samples `new` tokens and no end."""
    for token in range(first, first + 1000):
        tokens = [token] * 5
        while len(tokens) < 5 + new and sample(tokens, salt) != END:
            tokens.append(sample(tokens, salt))
        if len(tokens) == 5 + new:
            return [token] * 5
    raise AssertionError("no such prompt")


def test_a_step_decodes_running_rows_and_fills_its_budget_with_chunks():
    toy = build(rows=3, tokens=8, chunk=7)
    one = add(toy, prompt_without_end(9), 9)
    other, third = add(toy, [1] * 9), add(toy, [2] * 20)
    chunks = [(c.sequence, c.first, c.count, c.samples) for c in toy.step().chunks]
    assert chunks == [(one, 0, 5, True), (other, 0, 2, False)]
    plan = toy.step()
    assert plan.decode == [one] and one.computed == 6 and one.flying == 2
    chunks = [(c.sequence, c.first, c.count, c.samples) for c in plan.chunks]
    assert chunks == [(other, 2, 7, True)]
    plan = toy.step()
    assert plan.decode == [one, other]
    assert [(c.sequence, c.first, c.count) for c in plan.chunks] == [(third, 0, 6)]
    toy.finish()


def test_models_with_recurrent_layers_prefill_one_request_a_step():
    toy = build(prefill_alone=True)
    one, other = add(toy, [1] * 5), add(toy, [2] * 5)
    assert [[c.sequence for c in toy.step().chunks] for _ in range(2)] == [[one], [other]]
    toy.finish()


def test_a_state_is_kept_where_prompts_part_and_the_next_ones_go_on_from_it():
    toy = build(prefill_alone=True, snapshots=1)
    shared = [7] * 9  # two pages and a token
    found = []
    for last in (1, 2, 3, 3, 3):
        sequence = add(toy, [*shared, *[last] * 8])
        while sequence.slot >= 0 or sequence.queued:
            step(toy)
        found.append((sequence.hits, toy.computed[sequence]))
    # The second one keeps the state after two pages, the fourth that after four in its place.
    assert found == [(0, 17), (0, 17), (8, 9), (8, 9), (16, 1)]
    toy.forget()
    sequence = add(toy, [*shared, 3])
    toy.finish()
    assert sequence.hits == 0


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_a_prompt_seen_before_is_computed_but_for_its_last_page(length):
    toy = build()
    tokens = list(range(50, 50 + length))
    for expected in (0, (length - 1) // PAGE * PAGE):
        sequence = add(toy, tokens)
        while sequence.slot >= 0 or sequence.queued:
            step(toy)
        assert sequence.hits == expected and toy.computed[sequence] == length - expected


@pytest.mark.parametrize("chunk", [100, 8, 3])
def test_samples_of_one_prompt_compute_it_once(chunk):
    """They wait while the first computes it, in one chunk or several; others pass them."""
    toy = build(chunk=chunk)
    samples = [add(toy, [7] * 21) for _ in range(4)]
    other = add(toy, [8] * 3)
    plan = toy.step()
    assert [c.sequence for c in plan.chunks] == [samples[0], other][: 1 + (chunk == 100)]
    toy.finish()
    assert [toy.computed[s] for s in samples] == [21, 1, 1, 1]


def test_nobody_waits_for_pages_that_are_cached():
    toy = build()
    for reads_prefix in (True, False):
        add(toy, [7] * 7, 0, reads_prefix=reads_prefix)
        sequence = add(toy, [7] * 5, 0)
        plan = toy.step()
    assert plan.chunks[-1].sequence is sequence and sequence.hits == PAGE
    toy.finish()


def test_salts_keep_prefixes_apart():
    toy = build()
    salts = [(), (("adapter", "a"),), (("salt", "a"),), (("salt", "a"),)]
    hits = []
    for salt in salts:
        sequence = add(toy, [7] * 9, salt=salt)
        step(toy)
        hits.append(sequence.hits)
    assert hits == [0, 0, 0, 8]
    toy.finish()


def test_prompt_log_probabilities_compute_every_token():
    toy = build()
    for reads_prefix in (True, False):
        sequence = add(toy, [7] * 9, reads_prefix=reads_prefix)
        step(toy)
        assert sequence.hits == 0
    toy.finish()


def test_a_second_turn_finds_the_outputs_of_the_first():
    toy = build()
    first = add(toy, prompt_without_end(9), 9)
    toy.finish()
    second = add(toy, [*first.tokens, 7, 7])
    step(toy)
    assert second.hits == 3 * PAGE < len(first.tokens) == 14
    toy.finish()


def test_a_whole_prompt_is_one_chunk_alone_and_shares_nothing():
    toy = build(chunk=8)
    first, whole, last = add(toy, [1] * 12), add(toy, [2] * 30, whole=True), add(toy, [2] * 30)
    chunks = [[(c.sequence, c.count) for c in step(toy).chunks] for _ in range(4)]
    assert chunks == [[(first, 8)], [(first, 4)], [(whole, 30)], [(last, 8)]]
    toy.finish()
    again = add(toy, [2] * 30, whole=True)
    assert [(c.sequence, c.count) for c in step(toy).chunks] == [(again, 30)]
    assert last.hits == again.hits == 0 and toy.computed[last] == 30
    toy.finish()


def test_new_weights_find_no_page_of_the_old_ones():
    """A sequence from before the change goes on, but shares no page any more."""
    toy = build(rows=2)
    old = add(toy, prompt_without_end(15), 15)
    step(toy)
    toy.forget()
    new = add(toy, old.tokens[:5], 0)
    while len(old.tokens) < 15:
        step(toy)
    assert new.hits == 0
    last = add(toy, old.tokens, 0)
    step(toy)
    assert last.hits == PAGE and old.slot >= 0
    toy.finish()


def test_a_prompt_without_new_tokens_samples_nothing():
    toy = build(chunk=4)
    sequence = add(toy, [7] * 8, 0)
    assert [c.samples for _ in range(2) for c in toy.step().chunks] == [False, False]
    assert toy.step().drain and sequence.slot < 0 and len(sequence.tokens) == 8


def test_one_new_token_takes_one_step():
    toy = build()
    sequence = add(toy, [7] * 8, 1)
    assert step(toy).chunks[0].samples and sequence.slot < 0 and len(sequence.tokens) == 9


def test_a_pool_of_two_pages_serves_one_sequence_after_the_other():
    toy = build(pages=2)
    sequences = [add(toy, [7], 4) for _ in range(3)]  # the last token needs no entry
    while any(s.queued for s in sequences):
        step(toy)
        assert len(toy.scheduler.running) <= 1
    toy.finish()
    with pytest.raises(UserError, match="need 2 cache pages of 1: lower max_tokens"):
        add(toy, [7], 5)


def test_what_can_never_run_is_refused_in_one_line():
    toy = build(length=30)
    for tokens, new, line in [
        ([], 4, "a prompt of 0 tokens with room for 4"),
        ([7] * 9, -1, "a prompt of 9 tokens with room for 8"),
        ([7] * 31, 0, "31 tokens and up to 0 new ones are more than 30"),
        ([7] * 9, 22, "9 tokens and up to 22 new ones are more than 30"),
    ]:
        with pytest.raises(UserError, match=line):
            add(toy, tokens, new)
    with pytest.raises(UserError, match="a cache of 1 pages"):
        build(pages=1)
    with pytest.raises(UserError, match="rows is 0"):
        build(rows=0)


def test_a_full_queue_says_so():
    toy = build(queued=2, queued_tokens=10)
    add(toy, [7] * 15)  # an empty queue takes any size
    with pytest.raises(QueueFull, match="15 tokens wait already"):
        add(toy, [7])
    toy.step()
    add(toy, [7] * 4), add(toy, [7] * 6)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        add(toy, [7])
    toy.finish()


def test_the_worst_priority_is_preempted_and_the_best_waits_first():
    toy = build(pages=8, rows=3)
    prompts = [prompt_without_end(11, first=first) for first in (100, 300, 500)]
    best = add(toy, prompts[0], 11, priority=1)
    worst = add(toy, prompts[1], 11, priority=2)
    step(toy)
    last = add(toy, prompts[2], 11, priority=1)
    urgent = add(toy, [7] * 13, 3, priority=0)
    preempted = []
    while not preempted:
        preempted = step(toy).preempted
    assert preempted == [worst] and best.slot >= 0
    assert toy.scheduler.waiting == [urgent, last, worst]
    order = []
    while toy.scheduler.running or toy.scheduler.waiting:
        step(toy)
        order += [s for s in (urgent, last, worst) if s.slot >= 0 and s not in order]
    assert order == [urgent, last, worst]


def test_small_requests_do_not_pass_a_large_one_for_ever():
    toy = build(pages=9, rows=4)
    add(toy, prompt_without_end(9), 9)
    step(toy)
    large = add(toy, list(range(30, 58)), 1)
    for number in range(200):
        add(toy, [10 + number], 3)
        step(toy)
        if large.slot >= 0 or not large.queued:
            break
    assert number < 20
    toy.finish()


def preempted_engine():
    """Returns an engine at its first preemption, with the sequence that lost its pages."""
    toy = build(pages=8, rows=2)
    add(toy, prompt_without_end(11, first=100), 11)
    step(toy)
    add(toy, prompt_without_end(11, first=300), 11)
    drains = 0
    while True:
        before = {s: s.flying for s in toy.scheduler.running.values()}
        plan = toy.step()
        drains += plan.drain
        if plan.preempted:
            assert drains == 1 and not any(before.values())
            assert [sequence.id for sequence in plan.preempted] == [1]  # the one admitted last
            return toy, plan.preempted[0]
        while len(toy.in_flight) > 2:  # the host reads a step late
            toy.read()


def test_nothing_is_preempted_while_samples_are_in_flight():
    """The engine drains once, then the preemption follows."""
    preempted_engine()[0].finish()


def test_a_preempted_sequence_finds_its_own_pages():
    toy, sequence = preempted_engine()
    known = len(sequence.tokens)
    assert sequence.queued and known > 5 and not sequence.pages
    while sequence.queued:
        chunks = step(toy).chunks
    assert chunks[0].sequence is sequence and chunks[0].first >= PAGE
    assert chunks[0].first + chunks[0].count == known and chunks[0].samples
    assert sequence.hits == 0 and sequence.admissions == 2
    toy.finish()


@pytest.mark.parametrize("state", ["new", "queued", "prefill", "flying", "preempted", "ended"])
def test_abort_in_every_state(state):
    toy, sequence = preempted_engine() if state == "preempted" else (build(chunk=3), None)
    if sequence is None:
        sequence = TokenSequence(99, [7] * 5, 12)
        if state == "new":
            return toy.scheduler.finish(sequence)
        toy.add(sequence)
    for _ in range({"prefill": 1, "flying": 3}.get(state, 0)):
        toy.step()
    assert sequence.flying == 2 * (state == "flying")
    if state == "ended":
        toy.finish()
    toy.abort(sequence)
    toy.abort(sequence)
    toy.finish()
    toy.check()
    assert toy.pool.used == 0


def test_pages_that_left_the_window_are_released():
    """A query sees itself and window - 1 tokens before it; `Toy` checks that it finds them."""
    window, most = 6, 0
    toy = build(pages=20, window=window)
    sequence = add(toy, prompt_without_end(40), 40)
    while toy.scheduler.waiting or toy.scheduler.running:
        step(toy)
        held = [page for page in sequence.pages if page]
        most = max(most, len(held))
        assert toy.pool.used == len(held)
    assert most <= window // PAGE + 2


def test_a_plan_of_256_rows_and_5000_waiting_takes_less_than_a_millisecond():
    """The processor's time of the best plan, as other processes take the rest."""
    scheduler = Scheduler(Limits(), PagePool(3000))
    for number in range(5256):
        scheduler.add(TokenSequence(number, [number] * 129, 700, priority=number % 7))
    times, flying = [], []
    while len(times) < 100:
        begin = time.process_time()
        plan = scheduler.plan()
        if len(plan.decode) == 256:
            times.append(time.process_time() - begin)
        for sequence in flying:
            scheduler.read(sequence, 1)
        flying = plan.decode + [c.sequence for c in plan.chunks if c.samples]
    assert len(scheduler.waiting) == 5000 and min(times) < 1e-3


def test_drafts_take_pages_that_are_free_and_no_more_than_the_limit():
    def planned(pages: int, new: int) -> TokenSequence:
        scheduler = build(pages=pages, cache_prefixes=False).scheduler
        sequence = TokenSequence(0, list(range(PAGE)), PAGE + new)
        scheduler.add(sequence)
        scheduler.plan()
        scheduler.read(sequence, 1)
        sequence.drafts = [5] * (2 * PAGE)
        assert scheduler.plan().decode == [sequence]
        return sequence

    assert len(planned(9, 4 * PAGE).drafts) == 2 * PAGE
    short = planned(3, PAGE + 1)  # a page for the last token, and none beyond
    assert len(short.pages) == 2 and len(short.drafts) == PAGE - 1
    assert len(planned(9, 3).drafts) == 1  # the second token, this one and the one after it


def test_a_prompt_without_room_beside_drafts_has_no_chunk():
    scheduler = Scheduler(Limits(rows=2, tokens=4, chunk=4), PagePool(40, page=PAGE))
    first, second = TokenSequence(1, [1], 40), TokenSequence(2, [2] * 20, 40)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan()
    scheduler.read(first, 7)
    first.drafts = [7, 7, 7]
    plan = scheduler.plan()
    assert plan.decode == [first] and not plan.chunks and 0 < second.computed < 20


def test_right_drafts_advance_and_wrong_ones_go_back():
    toy = build(cache_prefixes=True)
    scheduler = toy.scheduler
    sequence = TokenSequence(0, list(range(PAGE)), 4 * PAGE)
    scheduler.add(sequence)
    scheduler.plan()
    scheduler.read(sequence, 100)
    sequence.drafts = [101, 102, 103]
    scheduler.plan()
    scheduler.read(sequence, 101)
    scheduler.read(sequence, 102, after_draft=True)  # after 101, which was right
    assert sequence.tokens[PAGE:] == [100, 101, 102]
    assert sequence.computed == len(sequence.tokens) - 1 and sequence.flying == 0
