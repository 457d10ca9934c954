"""Unit tests of calls that processes share: here threads are the processes."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from mjax.errors import ReplicasDiffer, UserError
from mjax.post.environments import shared_calls
from mjax.post.environments.environment import Turn
from mjax.post.environments.shared_calls import SharedCalls

COUNT = 2


class Late:
    """Answers a call when it is asked for turns the second time, unless its prompt is `hurried`."""

    hurried = (3,)

    def __init__(self):
        self.made, self.waiting, self.is_closed = [], [], False

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.is_closed = True

    def submit(self, ticket, method, *args):
        if args == ("no prompt",):
            raise UserError("there is no prompt")
        self.made.append(ticket)
        self.waiting.append([ticket[0] in self.hurried, ticket])

    def ready(self, timeout=0):
        due = [ticket for is_due, ticket in self.waiting if is_due]
        self.waiting = [[True, ticket] for is_due, ticket in self.waiting if not is_due]
        return [(ticket, Turn((ticket[0],), None)) for ticket in due]


@pytest.fixture
def as_processes(monkeypatch):
    """Runs an action in threads that JAX counts as processes; returns what each gave."""
    number, barrier, words = threading.local(), threading.Barrier(COUNT), [b""] * COUNT

    def said_by_all(word, topic):
        words[number.own] = word
        barrier.wait(10)
        found = list(words)
        barrier.wait(10)
        return found

    monkeypatch.setattr(shared_calls, "said_by_all", said_by_all)
    monkeypatch.setattr(shared_calls.jax, "process_count", lambda: COUNT)
    monkeypatch.setattr(shared_calls.jax, "process_index", lambda: number.own)

    def run(action):
        def of_process(index):
            number.own = index
            return action()

        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(of_process, range(COUNT)))

    return run


def test_all_get_the_same_turns_in_the_order_of_asking_and_each_call_is_made_once(as_processes):
    def action():
        with SharedCalls(Late) as calls:
            for prompt in (5, 2, 3, 4):
                calls.submit((prompt, 0), "reset", 0, prompt)
            found = [[ticket[0] for ticket, _ in calls.ready()] for _ in range(3)]
            return found, calls._own.made, calls._own

    one, other = as_processes(action)
    assert one[0] == other[0] == [[3], [5, 2, 4], []]
    assert one[1] == [(2, 0), (4, 0)] and other[1] == [(5, 0), (3, 0)]
    assert one[2].is_closed and other[2].is_closed


def test_an_error_of_one_is_raised_by_all(as_processes):
    def action():
        with SharedCalls(Late) as calls:
            calls.submit((1, 0), "reset", "no prompt")
            with pytest.raises(UserError, match="there is no prompt"):
                calls.ready()
            return True

    assert as_processes(action) == [True, True]


@pytest.mark.parametrize("asking", [(0, 1), (0,), (1,)])
def test_processes_that_have_drawn_other_answers_say_so(as_processes, asking):
    """Also where an answer has ended in one of them alone, which the other does not wait for."""

    def action():
        me = shared_calls.jax.process_index()
        with SharedCalls(Late) as calls:
            calls.ready()
            if me in asking:
                calls.submit((1, 0), "step", None, [5, me])
            with pytest.raises(ReplicasDiffer, match="other answers"):
                calls.ready()
            return True

    assert as_processes(action) == [True, True]


def test_all_stop_at_the_step_at_which_one_is_stopped(as_processes):
    def action():
        turns, me = [], shared_calls.jax.process_index()
        with SharedCalls(Late, lambda: me == 1 and len(turns) == 3) as calls:
            with pytest.raises(CancelledError):
                while True:
                    turns.append(calls.ready())
            return len(turns)

    assert as_processes(action) == [3, 3]
