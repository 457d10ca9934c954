"""Stand-ins for packages that are not installed: the part of their documented interface in use.

With `pip install reasoning-gym gymnasium 'verifiers>=0.4'` the tests take the packages themselves.
"""

import importlib.util
import random
import sys
from types import ModuleType, SimpleNamespace


def use_package(monkeypatch, name: str, stand_in: ModuleType) -> None:
    """Let a package be imported, or its stand-in where it is not installed."""
    if importlib.util.find_spec(name) is None:
        monkeypatch.setitem(sys.modules, name, stand_in)


# ---- reasoning-gym -------------------------------------------------------------------------------


class _ChainSum:
    def __init__(self, size: int, seed: int, min_terms: int = 2, max_terms: int = 6):
        self.size, self.seed, self.terms = size, seed, (min_terms, max_terms)

    def __getitem__(self, index: int) -> dict:
        rng = random.Random(self.seed + index)
        numbers = [rng.randint(1, 9999) for _ in range(rng.randint(*self.terms))]
        problem = " + ".join(map(str, numbers))
        return {"question": f"sum: {problem} =", "answer": str(sum(numbers)), "metadata": {}}

    def score_answer(self, answer: str, entry: dict) -> float:
        return float(answer == entry["answer"])


reasoning_gym = ModuleType("reasoning_gym")
reasoning_gym.create_dataset = lambda name, size, seed, **config: _ChainSum(size, seed, **config)

# ---- Gymnasium -----------------------------------------------------------------------------------


class _Text:
    def __init__(self, max_length: int, charset: str = ""):
        self.max_length, self.charset = max_length, frozenset(charset)

    def contains(self, text: object) -> bool:
        return isinstance(text, str) and 0 < len(text) <= self.max_length and self.has(text)

    def has(self, text: str) -> bool:
        return self.charset.issuperset(text)


class _Env:
    def reset(self, *, seed=None, options=None):
        self.np_random = SimpleNamespace(integers=random.Random(seed).randrange)


_made: dict = {}


class _GymnasiumError(Exception):
    """As of gymnasium.error."""


def _make(id: str, **config: object) -> _Env:
    if id not in _made:
        raise _GymnasiumError(f"Environment `{id}` doesn't exist.")
    return _made[id](**config)


gymnasium = ModuleType("gymnasium")
gymnasium.Env = _Env
gymnasium.spaces = SimpleNamespace(Text=_Text, Discrete=lambda n: f"Discrete({n})")
gymnasium.error = SimpleNamespace(Error=_GymnasiumError)
gymnasium.register = lambda id, entry_point: _made.update({id: entry_point})
gymnasium.make = _make

# ---- verifiers -----------------------------------------------------------------------------------


def _record(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**({"rewards": {}, "metrics": {}} | fields))


class _Task:
    NEEDS_CONTAINER = False
    key = hash = "one"

    def __init__(self, data: object, config: object = None):
        self.data = data

    def hooks(self, attribute: str) -> list:
        names = [name for name in dir(self) if not name.startswith("_")]
        return [getattr(self, n) for n in names if hasattr(getattr(self, n), f"is_{attribute}")]

    async def score(self, trace: SimpleNamespace, runtime: object = None) -> None:
        trace.reward = sum([await reward(trace) for reward in self.hooks("reward")])


class _TaskData:
    def __init__(self, **fields: object):
        self.__dict__.update(fields, prompt_text=fields.get("prompt") or "")

    def __init_subclass__(cls) -> None:
        pass


class _Taskset:
    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __init__(self, config: object):
        self.config = config

    def __iter__(self):
        return iter(self.load())


def _reward(function):
    function.is_reward = True
    return function


def _load_taskset(config: SimpleNamespace) -> _Taskset:
    module = sys.modules[config.id]
    return getattr(module, module.__all__[0])(config)


_Task.__class_getitem__ = classmethod(lambda cls, _: cls)
verifiers = ModuleType("verifiers")
verifiers.v1 = SimpleNamespace(
    Task=_Task,
    TaskData=_TaskData,
    Taskset=_Taskset,
    TasksetConfig=_record,
    reward=_reward,
    load_taskset=_load_taskset,
    taskset_config_type=lambda id: _record,
    **dict.fromkeys(
        "UserMessage AssistantMessage MessageNode TraceTask AgentInfo AgentConfig Trace".split(),
        _record,
    ),
)
