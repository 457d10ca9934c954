"""The laws of every built-in environment, and what make_environment refuses."""

import json

import pytest

from mjax.errors import UserError
from mjax.post.environments.environment import (
    ENVIRONMENTS,
    Turn,
    call_environment,
    make_environment,
)
from tests.chats import write_lines
from tests.unit.post.environments.places import BYTES, END, over_bytes, text_of

PUZZLES = "arithmetic", "calculator", "countdown", "reverse_text"


@pytest.mark.parametrize("name", PUZZLES)
def test_a_prompt_is_a_function_of_seed_and_index_alone(name):
    first = over_bytes(name)
    prompts = {
        (seed, index): first.reset(seed, index) for seed in (0, 2**60, -1) for index in range(9)
    }
    again = over_bytes(name)
    for key in reversed(prompts):
        assert again.reset(*key) == prompts[key]
    texts = {turn.ids for turn in prompts.values()}
    assert len(texts) == len(prompts)
    for turn in prompts.values():
        assert not turn.is_done and json.loads(json.dumps(turn.state)) == turn.state


@pytest.mark.parametrize("name", PUZZLES)
@pytest.mark.parametrize("ids", [[], [END], [255, 254], list(range(257)), [0] * 5000])
def test_any_tokens_are_an_answer(name, ids):
    environment = over_bytes(name)
    turn = environment.step(environment.reset(0, 0).state, ids)
    assert turn.is_done and 0 <= turn.reward < 1 and turn.reason


class Broken:
    """Does what no environment should."""

    def __init__(self, chat, at="step", turn=None):
        self.at, self.turn = at, turn

    def reset(self, seed, index):
        return self._give("reset")

    def step(self, state, ids):
        return self._give("step")

    def _give(self, at):
        if at == self.at and self.turn is None:
            raise SystemExit("enough") if at == "step" else ZeroDivisionError("no prompt")
        return self.turn if at == self.at else Turn((1,), 0)


HERE = f"{__name__}:Broken"


def test_what_fails_in_step_has_no_reward_and_in_reset_is_one_line():
    broken = over_bytes(HERE)
    assert call_environment(broken, HERE, "reset", (0, 1)) == Turn((1,), 0)
    turn = call_environment(broken, HERE, "step", (0, []))
    assert turn.reward == 0 and turn.metrics == {"failed": 1.0}
    assert turn.reason.startswith("SystemExit: enough at ") and "test_environment.py" in turn.reason
    with pytest.raises(UserError, match=r"Broken: reset\(0, 1\): ZeroDivisionError: no prompt at"):
        call_environment(over_bytes(HERE, at="reset"), HERE, "reset", (0, 1))


@pytest.mark.parametrize(
    "turn", [None, 3, Turn((), {1}, None), Turn((), None, float("nan")), Turn((), None, "1")]
)
def test_a_turn_that_no_checkpoint_can_hold_has_failed(turn):
    broken = over_bytes(HERE, turn=turn or "nothing")
    assert call_environment(broken, HERE, "step", (0, [])).metrics == {"failed": 1.0}


WRONG = [
    ("arithmetik", {}, "no environment 'arithmetik'; give one of arithmetic, "),
    ("arithmetic", {"digit": 3}, "environment arithmetic: TypeError: .*digit"),
    ("arithmetic", {"digits": 0}, "arithmetic: digits=0: give 1 to 18"),
    ("countdown", {"numbers": 2.5}, "countdown: numbers=2.5: give 1 to 6"),
    ("calculator", {"calls": "4"}, "calculator: calls='4': give 1 to 10"),
    ("no_such.module:Class", {}, "No module named 'no_such'"),
    (f"{__name__}:Absent", {}, "has no attribute 'Absent'"),
    ("code", {"path": "absent.jsonl"}, "absent.jsonl"),
]


@pytest.mark.parametrize("name, args, said", WRONG)
def test_what_cannot_be_made_is_one_line(name, args, said):
    with pytest.raises(UserError, match=said) as e:
        over_bytes(name, **args)
    assert "\n" not in str(e.value)


def test_each_built_in_name_leads_to_a_class():
    for name in ENVIRONMENTS:
        with pytest.raises(UserError, match=f"environment {name}: TypeError: .*argument"):
            make_environment(name, BYTES, [END], no_such_argument=1)


def test_each_problem_of_a_file_comes_once_before_any_comes_again(tmp_path):
    from mjax.post.environments.problem_files import problem_at, read_problems

    orders = [[problem_at(seed, index, 10) for index in range(30)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    epochs = [orders[0][first : first + 10] for first in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a", "tests": ["x"]}, {"prompt": "b"}])
    with pytest.raises(UserError, match=r"p.jsonl:\d: 'tests' is not a list with something in it"):
        read_problems(path, prompt=str, tests=list)
    assert text_of(Turn((104, 105), 0)) == "hi"
