"""Unit tests of what processes say to each other: here threads are the processes."""

import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import pytest

from mjax.errors import UserError
from mjax.sharding.processes import agreement


class Service:
    """JAX's coordination service; counts what each process reads."""

    def __init__(self, own):
        self.own = own
        self.words = {}
        self.reads = Counter()
        self.has_changed = threading.Condition()

    def key_value_set_bytes(self, name, word):
        with self.has_changed:
            assert name not in self.words
            self.words[name] = word
            self.has_changed.notify_all()

    def blocking_key_value_get_bytes(self, name, timeout_ms):
        with self.has_changed:
            self.reads[self.own()] += 1
            assert self.has_changed.wait_for(lambda: name in self.words, timeout=60)
            return self.words[name]

    def key_value_delete(self, folder):
        with self.has_changed:
            for name in [name for name in self.words if name.startswith(f"{folder}/")]:
                del self.words[name]


@pytest.fixture
def processes(monkeypatch):
    """Runs an action in so many threads that JAX counts as processes: (service, their results)."""

    def run(number, action):
        here = threading.local()
        service = Service(lambda: here.index)
        monkeypatch.setattr(agreement.distributed.global_state, "client", service)
        monkeypatch.setattr(agreement.jax, "process_count", lambda: number)
        monkeypatch.setattr(agreement.jax, "process_index", lambda: here.index)

        class Rounds:
            def __getitem__(self, topic):
                return here.rounds[topic]

        monkeypatch.setattr(agreement, "_said", Rounds())

        def of_process(index):
            here.index, here.rounds = index, defaultdict(count)
            return action(index)

        with ThreadPoolExecutor(number) as pool:
            return service, list(pool.map(of_process, range(number)))

    return run


@pytest.mark.parametrize("number", [2, 3, 8, 13])
def test_all_hear_all_words_and_each_process_reads_at_most_thrice(processes, number):
    rounds = 5

    def action(me):
        return [agreement.said_by_all(b"%d of %d" % (at, me)) for at in range(rounds)]

    service, heard = processes(number, action)
    words = [[b"%d of %d" % (at, me) for me in range(number)] for at in range(rounds)]
    assert heard == [words] * number
    assert service.reads.total() == 2 * (number - 1) * rounds
    assert max(service.reads.values()) <= 3 * rounds
    assert len(service.words) == number  # those of rounds that all have read are gone


def test_an_error_of_process_0_is_raised_by_all(processes):
    def action(me):
        def fails():
            assert me == 0
            raise UserError("no room")

        with pytest.raises(UserError, match="^no room$"):
            agreement.on_process_0(fails)
        agreement.on_process_0(lambda: None)
        agreement.wait_for_every_process("end")
        return True

    assert processes(3, action)[1] == [True] * 3


@pytest.mark.parametrize("error", ["", "no such task"])
def test_all_run_what_process_0_names_in_its_order(processes, error):
    class Helper:
        def __init__(self):
            self.calls = []

        def half(self, number):
            self.calls.append(number)
            if number % 2:
                raise UserError("odd")  # by all alike; process 0 goes on
            return number // 2

    def action(me):
        helper, halves = Helper(), []

        def asks():
            assert me == 0
            for number in (4, 3, 8):
                with suppress(UserError):
                    halves.append(agreement.run_by_all(helper, "half", number))
            if error:
                raise UserError(error)

        said = ""
        try:
            agreement.on_process_0(asks, helper)
        except UserError as e:
            said = str(e)
        return said, helper.calls, halves

    first, *others = processes(3, action)[1]
    assert first == (error, [4, 3, 8], [2, 4]) and others == [(error, [4, 3, 8], [])] * 2


def test_any_other_error_of_process_0_ends_all(processes):
    def action(me):
        def fails():
            raise ValueError("a bug")

        said = "^process 0 failed: ValueError: a bug$" if me else "^a bug$"
        with pytest.raises(UserError if me else ValueError, match=said):
            agreement.on_process_0(fails)
        return True

    assert processes(3, action)[1] == [True] * 3


def test_a_fault_within_what_all_run_is_told_from_one_of_the_action(processes):
    class Helper:
        def half(self, number):
            raise KeyError(number)

    def action(me):
        def asks():
            with pytest.raises(agreement.HelperFailed, match="half: KeyError: 3") as caught:
                agreement.run_by_all(Helper(), "half", 3)
            raise UserError(f"told: {type(caught.value.__cause__).__name__}")

        with pytest.raises(UserError, match="^told: KeyError$"):
            agreement.on_process_0(asks, Helper())
        return True

    assert processes(3, action)[1] == [True] * 3


@pytest.mark.parametrize("fails", [None, 0, 2])
def test_what_fails_in_one_process_fails_in_all(processes, fails):
    def action(me):
        def attempt():
            if me == fails:
                raise UserError("no library here")
            return 2 * me

        try:
            return agreement.same_for_all(attempt)
        except UserError as e:
            return str(e)

    found = processes(3, action)[1]
    assert found == ([0, 2, 4] if fails is None else ["no library here"] * 3)
