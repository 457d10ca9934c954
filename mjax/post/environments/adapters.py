"""Environments of other packages: reasoning-gym, Gymnasium with text spaces, and verifiers.

The packages are installed by who uses them. Their own state is made again from ours in each call,
so a rollout may go on in another process.
"""

import asyncio
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from mjax.errors import UserError, or_user_error
from mjax.post.environments.chat_tokens import ChatTokens, final_answer
from mjax.post.environments.environment import Turn, draws
from mjax.post.environments.problem_files import problem_at

MOST_PROMPTS = 2**31  # of a stream


class ReasoningGym:
    """A data set of reasoning-gym by its name; `config` are its own arguments."""

    def __init__(self, chat: ChatTokens, dataset: str, **config: Any):
        with or_user_error("needs `pip install reasoning-gym`", ImportError):
            import reasoning_gym
        self.chat = chat
        make = functools.partial(reasoning_gym.create_dataset, dataset, size=MOST_PROMPTS, **config)
        self.make = functools.lru_cache(maxsize=4)(make)

    def reset(self, seed: int, index: int) -> Turn:
        """An entry; the streams of two seeds begin at two random places."""
        state = {"seed": int(draws(seed, 0).integers(2**31)), "index": index}
        return Turn(self.chat.prompt(self._entry(state)[1]["question"]), state)

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The score of reasoning-gym, from 0 to 1."""
        dataset, entry = self._entry(state)
        score = float(dataset.score_answer(final_answer(self.chat.text(ids)), entry))
        return Turn((), None, score, {"correct": float(score == 1)}, "answered")

    def _entry(self, state: Any) -> tuple[Any, dict]:
        dataset = self.make(seed=state["seed"])
        return dataset, dataset[state["index"]]


class GymnasiumText:
    """An environment of Gymnasium whose observations and actions are texts.

    The reward is the sum over its steps. A step plays the former actions again, so it must be
    deterministic once it has a seed.
    """

    def __init__(self, chat: ChatTokens, id: str, turns: int = 10, **config: Any):
        with or_user_error("needs `pip install gymnasium`", ImportError):
            import gymnasium
        self.chat, self.turns = chat, turns
        with or_user_error(f"environment gymnasium: {id}: {{reason}}", gymnasium.error.Error):
            self.game = gymnasium.make(id, **config)
        for space in (self.game.observation_space, self.game.action_space):
            if not isinstance(space, gymnasium.spaces.Text):
                raise UserError(f"environment gymnasium: {id} has {space}; give one of text spaces")

    def reset(self, seed: int, index: int) -> Turn:
        """The first observation."""
        state = {"seed": int(draws(seed, index).integers(2**31)), "actions": []}
        observation, _ = self.game.reset(seed=state["seed"])
        return Turn(self.chat.prompt(observation), state)

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The observation that follows an action, or the sum of all rewards."""
        actions = [*state["actions"], self.chat.text(ids).strip()]
        if not self.game.action_space.contains(actions[-1]):
            return Turn((), None, 0.0, {}, "not in the space of actions")
        self.game.reset(seed=state["seed"])
        total = 0.0
        for action in actions:
            observation, reward, is_over, is_cut, _ = self.game.step(action)
            total += float(reward)
        if is_over or is_cut or len(actions) == self.turns:
            reason = "answered" if is_over else "turn limit"
            return Turn((), None, total, {"turns": float(len(actions))}, reason)
        return Turn(self.chat.reply(observation, ids), state | {"actions": actions})


class Verifiers:
    """The tasks of a taskset of verifiers (version 1 of its interface), an answer each.

    Rewards that need a container or tools are not computed: their tasks are refused.
    """

    def __init__(self, chat: ChatTokens, taskset: str, limit: int = 10_000, **config: Any):
        with or_user_error("needs `pip install 'verifiers>=0.4'`", ImportError):
            from verifiers import v1
        self.chat, self.v1 = chat, v1
        tasks = v1.load_taskset(v1.taskset_config_type(taskset)(id=taskset, **config))
        self.tasks = list(itertools.islice(tasks, limit))
        for task in self.tasks:
            if task.NEEDS_CONTAINER or not task.data.prompt_text or not task.hooks("reward"):
                raise UserError(f"verifiers: {taskset}: no prompt, no reward or a container")

    def reset(self, seed: int, index: int) -> Turn:
        """The prompt of a task."""
        number = problem_at(seed, index, len(self.tasks))
        return Turn(self.chat.prompt(self.tasks[number].data.prompt_text), number)

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The weighted sum of the task's rewards."""
        v1, task = self.v1, self.tasks[state]
        asked = v1.UserMessage(content=task.data.prompt_text)
        said = v1.AssistantMessage(content=self.chat.text(ids))
        nodes = [
            v1.MessageNode(message=asked),
            v1.MessageNode(message=said, parent=0, sampled=True),
        ]
        about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = v1.AgentInfo(config=v1.AgentConfig(), name="mjax", trainable=False)
        trace = v1.Trace(task=about, agent=agent, nodes=nodes)
        asyncio.run(task.score(trace))
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Turn((), None, float(trace.reward), metrics, "answered")
