"""Transcripts: the tokens of a prompt and of what follows, with their log-probabilities.

Invariant: ids are those that the model read and drew. Nothing is decoded and encoded again, so each
turn continues the tokens before it. All lists of a transcript have one entry a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NOT_SAMPLED = -1  # in place of a version


@dataclass(frozen=True)
class Transcript:
    """A finished rollout.

    group: number of its prompt in the stream of prompts. sample: its number among those of it.
    ids: int32 [n]. is_sampled: bool [n], the tokens that the policy drew.
    log_probs: float32 [n], of the distribution that they were drawn from; 0 of other tokens.
    versions: int32 [n], the updates of the weights before each draw; -1 of other tokens.
    reason: why it ended, for people.
    experts: int16 [n - 1, layers, k], those that all tokens but the last went to as they were read,
        or None.
    """

    group: int
    sample: int
    ids: np.ndarray
    log_probs: np.ndarray
    is_sampled: np.ndarray
    versions: np.ndarray
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    experts: np.ndarray | None = None

    @property
    def length(self) -> int:
        """The tokens that were drawn."""
        return int(self.is_sampled.sum())


@dataclass
class OpenRollout:
    """A transcript while it is made.

    state: what the environment knows of it, a JSON value.
    unjudged: tokens at its end that were drawn, and that the environment has not answered.
    is_asking: whether the environment was given these.
    reward: None while it goes on.
    """

    group: int
    sample: int
    state: Any
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    unjudged: int = 0
    is_asking: bool = False
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    experts: np.ndarray | None = None

    @property
    def drawn(self) -> int:
        return sum(self.is_sampled)

    def add_given(self, ids: Sequence[int]) -> None:
        """Add tokens of the environment."""
        self._add(ids, [0.0] * len(ids), [NOT_SAMPLED] * len(ids))

    def add_drawn(
        self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Add tokens of the policy."""
        self._add(ids, log_probs, versions)

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.ids += map(int, ids)
        self.log_probs += log_probs
        self.versions += versions
        self.is_sampled += [version != NOT_SAMPLED for version in versions]

    def transcript(self) -> Transcript:
        assert self.reward is not None
        return Transcript(
            group=self.group,
            sample=self.sample,
            ids=np.array(self.ids, np.int32),
            log_probs=np.array(self.log_probs, np.float32),
            is_sampled=np.array(self.is_sampled, bool),
            versions=np.array(self.versions, np.int32),
            reward=self.reward,
            metrics=dict(self.metrics),
            reason=self.reason,
            experts=self.experts,
        )
