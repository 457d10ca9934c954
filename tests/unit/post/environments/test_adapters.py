"""Environments of other packages keep our law: a turn is a function of the arguments alone."""

import json
import sys
from types import ModuleType

import pytest

from mjax.errors import UserError
from tests.unit.post.environments import stand_ins
from tests.unit.post.environments.places import answer, over_bytes, text_of


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    for name in ("reasoning_gym", "gymnasium", "verifiers"):
        stand_ins.use_package(monkeypatch, name, getattr(stand_ins, name))


def test_a_score_of_reasoning_gym_is_the_reward():
    args = {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2}
    first, again = over_bytes("reasoning_gym", **args), over_bytes("reasoning_gym", **args)
    turns = [first.reset(seed, index) for seed in (0, 1) for index in (0, 1, 10**6)]
    assert len({turn.ids for turn in turns}) == 6
    assert again.reset(1, 10**6) == turns[-1]
    assert json.loads(json.dumps(turns[-1].state)) == turns[-1].state
    problem = text_of(turns[-1]).partition(":")[2].removesuffix("=")
    right = answer(again, turns[-1], f"It is\n<answer>{eval(problem)}</answer>")
    assert right.reward == 1 and right.metrics == {"correct": 1.0}
    assert answer(again, turns[-1], "no").reward < 0.1


@pytest.fixture
def guessing():
    """The id of a game: guess a letter, three times at most."""
    import gymnasium

    class Guess(gymnasium.Env):
        def __init__(self, letters="abc"):
            self.letters = letters
            self.observation_space = gymnasium.spaces.Text(40)
            self.action_space = gymnasium.spaces.Text(1, charset=letters)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.letter, self.left = self.letters[self.np_random.integers(len(self.letters))], 3
            return f"one of {self.letters}?", {}

        def step(self, action):
            self.left -= 1
            is_right = action == self.letter
            return f"{self.left} left", float(is_right) - 0.1, is_right, self.left == 0, {}

    class Numbers(Guess):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.Discrete(3)

    gymnasium.register(id="Guess-v0", entry_point=Guess)
    gymnasium.register(id="Numbers-v0", entry_point=Numbers)
    return "Guess-v0"


@pytest.mark.filterwarnings("ignore")
def test_a_game_of_gymnasium_goes_on_in_any_process(guessing):
    rewards = set()
    for index in range(12):
        environment = over_bytes("gymnasium", id=guessing, letters="ab")
        turn = environment.reset(0, index)
        assert text_of(turn) == "one of ab?" and turn == environment.reset(0, index)
        turn = answer(environment, turn, "a")
        if not turn.is_done:
            assert text_of(turn) == "2 left" and turn.state["actions"] == ["a"]
            again = over_bytes("gymnasium", id=guessing, letters="ab")
            again.reset(5, 5)
            assert answer(again, turn, "b") == answer(environment, turn, "b")
            turn = answer(again, turn, "b")
        assert turn.is_done and turn.reason == "answered"
        rewards.add(round(turn.reward, 6))
    assert rewards == {0.9, 0.8}


@pytest.mark.filterwarnings("ignore")
def test_a_game_of_gymnasium_ends_by_its_turns_or_by_nonsense(guessing):
    environment = over_bytes("gymnasium", id=guessing, turns=1, letters="x" + "abcdefghijk")
    turn = environment.reset(0, 0)
    last = answer(environment, turn, "k")
    assert last.reason in ("turn limit", "answered") and last.metrics == {"turns": 1.0}
    assert answer(environment, turn, "what?").reason == "not in the space of actions"
    with pytest.raises(UserError, match="Absent.*doesn't exist"):
        over_bytes("gymnasium", id="Absent-v0")
    with pytest.raises(UserError, match=r"Numbers-v0 has Discrete\(3\); give one of text spaces"):
        over_bytes("gymnasium", id="Numbers-v0")


@pytest.fixture
def sums(monkeypatch):
    """The id of a taskset of verifiers."""
    from verifiers import v1 as vf

    class SumData(vf.TaskData):
        answer: str = ""

    class SumTask(vf.Task[SumData]):
        @vf.reward
        async def correct(self, trace) -> float:
            return 2.0 * (trace.nodes[-1].message.content == self.data.answer)

    class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
        def load(self):
            for n in range(5):
                yield SumTask(SumData(prompt=f"{n}+{n}=", answer=str(n + n)))

    module = ModuleType("sums_to_solve")
    module.Sums, module.__all__ = Sums, ["Sums"]
    module.__spec__ = __spec__  # as verifiers looks for it
    monkeypatch.setitem(sys.modules, "sums_to_solve", module)
    return "sums_to_solve"


def test_rewards_of_verifiers_are_added(sums):
    environment = over_bytes("verifiers", taskset=sums)
    turns = [environment.reset(0, index) for index in range(5)]
    assert sorted(map(text_of, turns)) == [f"{n}+{n}=" for n in range(5)]
    for turn in turns:
        n = int(text_of(turn)[0])
        assert answer(environment, turn, str(2 * n)).reward == 2
        assert answer(environment, turn, str(2 * n + 1)).reward == 0
