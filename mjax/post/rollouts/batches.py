"""The batches of a run on rollouts: a phase of drawing gives those of one or more steps.

Invariants: in synchronous mode a phase is a function of the weights and the cursor of prompts, so
one that a kill cuts short is done again whole. A checkpoint records the state between two phases,
and the batches of a phase that are left.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.models.base.context import Documents
from mjax.objectives.fields import HostBatch
from mjax.post.base.roles import rows_of_process
from mjax.post.policy.advantages import (
    advantages_of,
    divergence_costs,
    is_informative,
    shaped_rewards,
)
from mjax.post.policy.critic import Critic
from mjax.post.rollouts.bank import Bank, batch_record, recorded_batch
from mjax.post.rollouts.collector import Collector
from mjax.post.rollouts.figures import PhaseFigures, reward_figures, time_figures, transcript_line
from mjax.post.rollouts.packing import PackedTranscripts, packed_transcripts
from mjax.post.rollouts.ppo_batches import ppo_batches
from mjax.post.rollouts.transcript import Transcript
from mjax.run.batches import RowsOf
from mjax.train.trainer import Trainer

# Returns fields of a batch [B, S], by name, such as log-probabilities of its labels under a role.
Scorer = Callable[[HostBatch], dict[str, np.ndarray]]


@dataclass
class RolloutStream:
    """Batches of rollouts that the trainer's own policy draws.

    phase: the next one. waiting: batches of the phase before that are left.
    """

    trainer: Trainer
    collector: Collector
    tokenizer: Tokenizer
    score: Scorer
    critic: Critic | None = None
    phase: int = 0
    waiting: list[HostBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._record = self.collector.record()
        self._seconds: dict[str, float] = {}
        self._figures: PhaseFigures = {}
        self._shown = ""
        self._given = 0.0  # when the last batch was

    @property
    def settings(self) -> ReinforceConfig:
        return self.trainer.cfg.reinforce

    @property
    def documents(self) -> Documents:
        return Documents(self.trainer.cfg.data.seq_length)  # no bound: answers may be short

    def batches(self, start: int, count: int, rows: RowsOf) -> Iterator[HostBatch]:
        with self.collector:
            for step in range(start, start + count):
                left = start + count - step
                yield self.next_batch(step, left <= self.settings.updates_per_rollout)

    def next_batch(self, step: int, is_last: bool = False) -> HostBatch:
        """This process's rows of the next batch of rollouts, for the weights after so many steps.

        is_last: whether no phase follows.
        """
        self._seconds = {}
        if not self.waiting:
            self._next_phase(step, is_last)
        batch = self.waiting.pop(0)
        self._update_critic(batch)
        self._given = time.perf_counter()
        return rows_of_process(self.trainer, batch)

    def _update_critic(self, batch: HostBatch) -> None:
        """The step of the critic that goes before one of the policy."""
        if self.critic is not None:
            began = time.perf_counter()
            self._figures = self._figures | self.critic.update(batch)
            self._seconds["critic"] = time.perf_counter() - began

    def describe(self, start: int, count: int, most: int) -> str:
        return f"rollouts of phase {self.phase - 1}"

    # ---- resuming --------------------------------------------------------------------------------

    def record_at(self, step: int) -> dict:
        bank = self.collector.record() if self._depths[0] else self._record
        record = {"bank": bank, "phase": self.phase}
        record["waiting"] = list(map(batch_record, self.waiting))
        record |= {"figures": self._figures, "shown": self._shown}
        critic = {} if self.critic is None else {"critic": self.critic.record()}
        return {"rollouts": record, **critic}

    def go_on(self, record: dict) -> None:
        """Go on from the record of a checkpoint."""
        found = record.get("rollouts")
        if found is not None:
            self.collector.bank = Bank.of_record(found["bank"])
            self.phase = found["phase"]
            self.waiting = list(map(recorded_batch, found["waiting"]))
            self._record = found["bank"]
            self._figures, self._shown = found["figures"], found["shown"]

    # ---- a phase ---------------------------------------------------------------------------------

    @property
    def _depths(self) -> tuple[int, int]:
        """(phases that are drawn ahead, those that a group may go on for after its first)."""
        depth = self.settings.max_staleness // self.settings.updates_per_rollout
        ahead = min(depth, 1) if self.collector.policy.place.is_apart else 0
        return ahead, depth - ahead

    def _next_phase(self, step: int, is_last: bool) -> None:
        """Take the rollouts of a phase, and make the batches of its steps.

        Meanwhile the engine goes on with the next phase, if it may draw ahead.
        """
        settings, collector, policy = self.settings, self.collector, self.collector.policy
        ahead, depth = self._depths
        options: dict[str, Any] = {"wanted": settings.prompts_per_step, "depth": depth}
        if settings.drops_equal_groups:
            options["is_of_use"] = _is_of_use
        began = time.perf_counter()
        collector.settle()
        settled = time.perf_counter()
        jax.block_until_ready(policy.take_weights().runner.params)
        handed_over = time.perf_counter()
        groups = collector.collect(self.phase, **options)
        drawn = time.perf_counter()
        if depth == 0:
            policy.rest()
        self.phase += 1
        self._seconds = {"hand_over": handed_over - settled, **collector.seconds}
        self._figures = reward_figures(groups, settings.max_new_tokens, step)
        self._figures |= {
            "groups_dropped": collector.bank.dropped,
            "prompts_skipped": collector.bank.skipped,
        }
        if ahead:
            self._seconds["waiting"] = (settled - began) + (drawn - handed_over)
            if not is_last:
                collector.draw_ahead(self.phase, **options)
        else:
            self._record = collector.record()
        began = time.perf_counter()
        self.waiting = self._batches_of(groups)
        self._seconds["log_probs"] = time.perf_counter() - began
        self._shown = transcript_line(groups[0][0], self.tokenizer)

    def _packs(self, groups: Sequence[Sequence[Transcript]]) -> list[PackedTranscripts]:
        """The transcripts of each step of a phase, which has as many groups as the others."""
        cfg, packs = self.trainer.cfg, []
        size = len(groups) // self.settings.updates_per_rollout
        for first in range(0, len(groups), size):
            transcripts = [t for group in groups[first : first + size] for t in group]
            sizes = cfg.train.global_batch_size, cfg.data.seq_length
            packs.append(packed_transcripts(transcripts, *sizes))
        return packs

    def _batches_of(self, groups: Sequence[Sequence[Transcript]]) -> list[HostBatch]:
        """The batches of the steps of a phase."""
        settings, packs = self.settings, self._packs(groups)
        fields = []
        for pack in packs:
            blank = [t.log_probs for t in pack.transcripts]  # advantages follow from the scores
            fields.append(self.score(pack.batch(advantages=blank)))
        if self.critic is not None:
            return ppo_batches(settings, packs, fields)
        rewards = self._rewards(packs, fields)
        transcripts = [t for pack in packs for t in pack.transcripts]
        numbers = np.array([t.group for t in transcripts])
        lengths = np.array([t.length for t in transcripts])
        advantages = advantages_of(settings, rewards, numbers, lengths)
        found, begin = [], 0
        for pack, scored in zip(packs, fields, strict=True):
            own = advantages[begin : begin + len(pack.transcripts)]
            begin += len(own)
            of_tokens = [a * t.is_sampled for a, t in zip(own, pack.transcripts, strict=True)]
            found.append(pack.batch(advantages=of_tokens) | scored)
        return found

    def _rewards(
        self, packs: list[PackedTranscripts], fields: list[dict[str, np.ndarray]]
    ) -> np.ndarray:
        """The rewards of all transcripts, float64 [n], with what the settings take off them."""
        settings = self.settings
        transcripts = [t for pack in packs for t in pack.transcripts]
        rewards = np.array([t.reward for t in transcripts], np.float64)
        lengths = np.array([t.length for t in transcripts])
        rewards = shaped_rewards(settings, rewards, lengths)
        if settings.kl_coef > 0 and settings.kl_in_reward:
            costs = []
            for pack, scored in zip(packs, fields, strict=True):
                own = divergence_costs(settings, scored["old_log_probs"], scored["ref_log_probs"])
                pairs = zip(pack.taken(own), pack.transcripts, strict=True)
                costs += [float(of_tokens[t.is_sampled].sum()) for of_tokens, t in pairs]
            rewards = rewards - np.array(costs)
        return rewards

    # ---- the log ---------------------------------------------------------------------------------

    def figures_at(self, step: int) -> PhaseFigures:
        """The figures of a step that has just ended."""
        seconds = {"rollout": 0.0} | self._seconds
        seconds["update"] = time.perf_counter() - self._given
        return self._figures | time_figures(seconds)

    def line_at(self, step: int) -> str:
        """A transcript that the step was trained on."""
        return self._shown


def _is_of_use(group: Sequence[Transcript]) -> bool:
    rewards = np.array([t.reward for t in group], np.float64)
    return bool(is_informative(rewards, np.zeros(len(group), np.int64)).all())
