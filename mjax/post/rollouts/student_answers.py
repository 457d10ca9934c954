"""Batches of a distillation on answers that the student draws, and the prompts of conversations.

The teacher rates each token that was drawn over the whole vocabulary, in the pass of the step
(`post/teacher.py`): GKD (arXiv 2306.13649). Invariant: whether a step is on answers that were drawn
is a function of the seed and the step. The others read what they would without any.
"""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.conversations.rows import ConversationDataset
from mjax.errors import UserError
from mjax.objectives.fields import HostBatch
from mjax.post.environments.environment import Turn
from mjax.post.environments.problem_files import problem_at
from mjax.post.rollouts.batches import RolloutStream
from mjax.post.rollouts.collector import seed_of
from mjax.post.rollouts.figures import PhaseFigures
from mjax.post.rollouts.transcript import Transcript
from mjax.run.batches import BatchStream, RowsOf


@dataclass
class ConversationPrompts:
    """The prompts of conversations, in the place of an environment; answers have the reward 0.

    Each prompt comes once an epoch, in an order that the seed gives.
    """

    prompts: Sequence[np.ndarray]
    _turns: list[tuple[Hashable, Turn]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Nothing is held."""

    def submit(self, ticket: Hashable, method: Literal["reset", "step"], *args: Any) -> None:
        """Give a prompt, or end the answer to one."""
        turn = Turn((), None, 0.0)
        if method == "reset":
            seed, index = args
            ids = self.prompts[problem_at(seed, index, len(self.prompts))]
            turn = Turn(tuple(ids.tolist()), None)
        self._turns.append((ticket, turn))

    def ready(self, timeout: float = 0) -> Sequence[tuple[Hashable, Turn]]:
        """The turns since the last call."""
        turns, self._turns = self._turns, []
        return turns


def conversation_prompts(cfg: Config, tokenizer: Tokenizer) -> ConversationPrompts:
    """The texts before all answers that the training part of `data.conversations` has a loss on.

    Raises `UserError` where there are none.
    """
    shares = [1.0, 0.0, 0.0] if cfg.data.valid_paths else cfg.data.split
    found: list[np.ndarray] = []
    for path in cfg.data.conversations.paths:
        rows = ConversationDataset(path, "train", shares, None, cfg, tokenizer)
        for number, places in zip(rows.numbers, rows.lengths, strict=True):
            ids, is_answer = rows.source[number]
            begins = np.flatnonzero(is_answer[1 : places + 1] & ~is_answer[:places]) + 1
            found += [ids[:begin] for begin in begins]
    if not found:
        raise UserError("data.conversations: no answer has a prompt; give records with questions")
    return ConversationPrompts(found)


@dataclass
class StudentStream(RolloutStream):
    """Batches of rollouts whose tokens a teacher rates, and of data.

    data: of the other steps; None: there are none. has_rewards: whether rewards say anything.
    """

    data: BatchStream | None = None
    has_rewards: bool = True
    _is_drawn: bool = True  # the last batch

    def draws(self, step: int) -> bool:
        """Whether the batch with this number is of rollouts."""
        share = self.trainer.cfg.distill.student_share
        return seed_of(self.trainer.cfg.run.seed, step) < share * 2**32

    def batches(self, start: int, count: int, rows: RowsOf) -> Iterator[HostBatch]:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self.collector)
            data = None
            if self.data is not None:
                data = self.data.batches(start, count, rows)
                opened.enter_context(contextlib.closing(data))
            for step in range(start, start + count):
                given = None if data is None else next(data)
                self._is_drawn = self.draws(step)
                yield self.next_batch(step) if self._is_drawn else given

    def describe(self, start: int, count: int, most: int) -> str:
        if self._is_drawn or self.data is None:
            return super().describe(start, count, most)
        return self.data.describe(start, count, most)

    def _batches_of(self, groups: Sequence[Sequence[Transcript]]) -> list[HostBatch]:
        return [pack.batch() for pack in self._packs(groups)]

    # ---- the log ---------------------------------------------------------------------------------

    def figures_at(self, step: int) -> PhaseFigures:
        if not self._is_drawn:
            return {"student_drawn": 0.0}
        found = super().figures_at(step)
        if not self.has_rewards:
            of_rewards = "reward", "reward_std", "frac_reward_zero_std"
            found = {name: value for name, value in found.items() if name not in of_rewards}
        return found if self.data is None else found | {"student_drawn": 1.0}

    def line_at(self, step: int) -> str:
        line = super().line_at(step) if self._is_drawn else ""
        return line if self.has_rewards else line.removesuffix(" (reward 0)")
