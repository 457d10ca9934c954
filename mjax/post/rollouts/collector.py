"""Collects rollouts: groups of answers to prompts, drawn by the engine, judged by an environment.

After a turn that was drawn the environment's tokens follow, and a new request goes on over the same
ids, whose caches the engine still has. Invariants: the tokens of a rollout are a function of (seed,
prompt, sample) and the weights, for its noise depends on them and on the place of a token alone.
So a phase that is done again after a kill gives the same transcripts. A group is used as a whole.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, Self

import numpy as np

from mjax.errors import UserError
from mjax.infer.records import Request
from mjax.infer.requests import SamplingParams
from mjax.post.environments.shared_calls import SharedCalls
from mjax.post.rollouts.bank import Bank, PromptGroup
from mjax.post.rollouts.policy_engine import PolicyEngine
from mjax.post.rollouts.transcript import OpenRollout, Transcript

_RESET = -1  # in place of a sample
_PATIENCE = 0.05  # seconds for answers of the environment, while nothing is drawn
_MOST_SKIPPED = 1000  # prompts in a row that are too long
_MOST_DROPPED = 8  # times the groups of a step
NO_ROOM = "length"  # why a rollout ended that had no room for more


class EnvironmentCalls(Protocol):
    """Calls of environments that are under way (`environments/workers.py`)."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *failure: object) -> None: ...

    def submit(self, ticket: Hashable, method: Literal["reset", "step"], *args: Any) -> None: ...

    def ready(self, timeout: float = 0) -> Sequence[tuple[Any, Any]]: ...


@dataclass(frozen=True)
class DrawingPlan:
    """How rollouts are drawn.

    params: of all requests, but for their seeds and lengths.
    max_new_tokens: drawn for a transcript in all its turns. max_length: tokens of a transcript.
    name: goes before the ids of its requests.
    """

    seed: int
    group_size: int
    params: SamplingParams
    max_new_tokens: int
    max_length: int
    name: str = ""

    def room(self, rollout: OpenRollout, more: int = 0) -> int:
        """The tokens that may be drawn for a rollout, after `more` of the environment."""
        left = self.max_length - len(rollout.ids) - more
        return min(self.max_new_tokens - rollout.drawn, left)


@dataclass
class Collector:
    """Rollouts of one policy in one environment; a context that has the environment's workers.

    open_environments: gives the context whose calls are those of the environment.
    requests: those in the engine, by group and sample.
    seconds: time that went into "rollout" and "rewards".
    beat: is called now and then, as a sign of life.
    """

    policy: PolicyEngine
    open_environments: Callable[[], EnvironmentCalls]
    plan: DrawingPlan
    bank: Bank = field(default_factory=Bank)
    requests: dict[tuple[int, int], Request] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    beat: Callable[[], None] = lambda: None
    _environments: Any = None
    _stepping: set[tuple[int, int]] = field(default_factory=set)  # whose step is under way
    _has_news: bool = False  # whether the environment has answered since groups were looked at
    _ahead: Future | None = None
    _is_stopped: threading.Event = field(default_factory=threading.Event)
    _last: dict | None = None  # the record when the environments ended

    def __enter__(self) -> Self:
        self._last = None
        self._is_stopped.clear()
        self._environments = SharedCalls(self.open_environments, self._is_stopped.is_set)
        self._environments.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        """End the environments, and what the engine still draws for them."""
        if self._ahead is not None:
            self._is_stopped.set()
            wait([self._ahead])
            self._ahead = None
        self._last = self.bank.record(self._so_far)
        self._environments.__exit__(*failure)
        for number in list(self.bank.groups):
            self.abort(number)

    # ---- a phase ---------------------------------------------------------------------------------

    def collect(
        self,
        phase: int,
        wanted: int,
        depth: int = 0,
        is_of_use: Callable[[list[Transcript]], bool] = lambda group: True,
    ) -> list[list[Transcript]]:
        """So many complete groups, the oldest first, with the weights that the engine has.

        phase: its number. depth: phases that a group may go on for after that of its beginning.
        Groups that are not `is_of_use` are replaced by others, up to a bound. A phase that was
        drawn ahead is as it is.
        """
        self.settle()
        if self.bank.drawn is None:
            self._draw(phase, wanted, depth, is_of_use)
        numbers, self.bank.drawn = self.bank.drawn or [], None
        return [_transcripts(self.bank.groups.pop(number)) for number in numbers]

    def draw_ahead(self, phase: int, **options: Any) -> None:
        """Begin the phase that the next `collect` asks for, beside what the trainer does.

        options: those of `collect`.
        """
        self._ahead = self.policy.draw_beside(partial(self._draw, phase, **options))

    def settle(self) -> None:
        """Wait for a phase that is drawn ahead."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None

    def _draw(
        self,
        phase: int,
        wanted: int,
        depth: int = 0,
        is_of_use: Callable[[list[Transcript]], bool] = lambda group: True,
    ) -> None:
        """Draw until the groups of a phase are complete, and name them in the bank."""
        self.seconds, self.bank.dropped = {"rollout": 0.0, "rewards": 0.0}, 0
        self._go_on()
        self._begin(wanted * (1 + depth) - len(self.bank.groups), phase)
        complete: list[int] = []
        self._has_news = True
        while True:
            if self._has_news:
                self._has_news = False
                complete = self._complete(wanted, phase, is_of_use)
                groups = self.bank.groups.values()
                is_due = all(g.is_complete for g in groups if g.begun <= phase - depth)
                if is_due and len(complete) >= wanted:
                    break
            self._advance()
        complete.sort(key=lambda number: (self.bank.groups[number].begun, number))
        self.bank.drawn = complete[:wanted]

    def _complete(
        self, wanted: int, phase: int, is_of_use: Callable[[list[Transcript]], bool]
    ) -> list[int]:
        """The numbers of complete groups; those of no use are replaced."""
        groups = self.bank.groups
        complete = [number for number, group in groups.items() if group.is_complete]
        for number in list(complete):
            if self.bank.dropped >= _MOST_DROPPED * wanted:
                break
            if not is_of_use(_transcripts(groups[number])):
                complete.remove(number)
                del groups[number]
                self.bank.dropped += 1
                self._begin(1, phase)
        return complete

    def abort(self, number: int) -> None:
        """Forget a group, whatever has become of it."""
        self.bank.groups.pop(number, None)
        for key in [key for key in self.requests if key[0] == number]:
            request = self.requests.pop(key)
            self.policy.engine.abort(request.output.request_id)

    def record(self) -> dict:
        """The bank as JSON, with what is drawn ahead, and the tokens of requests so far.

        After the end of the environments it is as it was then.
        """
        if self._last is not None:
            return self._last
        if self._ahead is not None:
            wait([self._ahead])  # the next phase tells of errors, once the state is saved
        return self.bank.record(self._so_far)

    # ---- prompts ---------------------------------------------------------------------------------

    def _begin(self, count: int, phase: int) -> None:
        """Begin groups of so many prompts, in the order of the stream."""
        bank, plan, skipped, longest = self.bank, self.plan, 0, 0
        while count > 0:
            numbers = range(bank.cursor, bank.cursor + count)
            prompts = self._prompts(numbers)
            bank.cursor = numbers.stop
            for number, ids, state in prompts:
                longest = max(longest, len(ids))
                if len(ids) + plan.max_new_tokens > plan.max_length:
                    skipped += 1
                    continue
                size = range(plan.group_size)
                group = PromptGroup(phase, [OpenRollout(number, n, state) for n in size])
                bank.groups[number] = group
                for rollout in group.rollouts:
                    rollout.add_given(ids)
                    self._add_request(rollout)
                count -= 1
            if skipped > _MOST_SKIPPED:
                raise UserError(
                    f"reinforce.environment: {skipped} prompts in a row are too long, of up to "
                    f"{longest} tokens; with reinforce.max_new_tokens={plan.max_new_tokens} they "
                    f"must fit {plan.max_length}: raise data.seq_length"
                )
        bank.skipped += skipped

    def _prompts(self, numbers: range) -> list[tuple[int, Sequence[int], Any]]:
        """(number, ids, state) of prompts, in order."""
        for number in numbers:
            self._environments.submit((number, _RESET), "reset", self.plan.seed, number)
        found: dict[int, Any] = {}
        while len(found) < len(numbers):
            for (number, sample), turn in self._turns(_PATIENCE):
                if sample == _RESET:
                    found[number] = turn
                else:
                    self._take_turn((number, sample), turn)
        for number, turn in found.items():
            if turn.reward is not None or not turn.ids:
                raise UserError(
                    f"reinforce.environment: reset of prompt {number} gives no prompt to answer"
                    f"{f' ({turn.reason})' if turn.reason else ''}; mend the environment"
                )
        return [(number, found[number].ids, found[number].state) for number in numbers]

    # ---- turns -----------------------------------------------------------------------------------

    def _add_request(self, rollout: OpenRollout) -> None:
        """Let the engine go on with a rollout."""
        plan, place = self.plan, (rollout.group, rollout.sample)
        own = {"seed": seed_of(plan.seed, *place), "max_tokens": plan.room(rollout)}
        self.requests[place] = self.policy.engine.add(
            rollout.ids,
            plan.params.model_copy(update=own),
            request_id=f"{plan.name}{rollout.group}.{rollout.sample}.{len(rollout.ids)}",
        )

    def _advance(self) -> None:
        """One step of the engine, and the answers of the environment that are there."""
        self.beat()
        engine = self.policy.engine
        if engine.has_work:
            began = time.perf_counter()
            with self.policy.memory_named():
                engine.step()
            self.seconds["rollout"] += time.perf_counter() - began
        ended = [place for place, request in self.requests.items() if request.output.finished]
        for place in ended:
            rollout = self._rollout(place)
            self._add_drawn(rollout, self.requests.pop(place))
            self._submit_step(rollout)
        for place, turn in self._turns(0 if engine.has_work else _PATIENCE):
            self._take_turn(place, turn)

    def _add_drawn(self, rollout: OpenRollout, request: Request) -> None:
        """Add what a request has drawn."""
        drawn = request.output.outputs[0]
        versions = list(map(self.policy.step_of, drawn.weight_versions))
        rollout.add_drawn(drawn.token_ids, drawn.processed_logprobs, versions)
        rollout.unjudged += len(drawn.token_ids)
        if drawn.experts is not None:
            rollout.experts = np.asarray(drawn.experts)[: len(rollout.ids) - 1]

    def _submit_step(self, rollout: OpenRollout) -> None:
        """Give the environment the tokens that it has not seen."""
        answer = rollout.ids[len(rollout.ids) - rollout.unjudged :]
        place = rollout.group, rollout.sample
        rollout.is_asking = True
        self._stepping.add(place)
        began = time.perf_counter()
        self._environments.submit(place, "step", rollout.state, answer)
        self.seconds["rewards"] += time.perf_counter() - began

    def _turns(self, timeout: float) -> Sequence[tuple[Any, Any]]:
        began = time.perf_counter()
        found = self._environments.ready(timeout)
        self.seconds["rewards"] += time.perf_counter() - began
        return found

    def _take_turn(self, place: tuple[int, int], turn: Any) -> None:
        """Take what the environment answers to a turn."""
        self._stepping.remove(place)
        if place[0] not in self.bank.groups:  # aborted meanwhile
            return
        rollout, plan = self._rollout(place), self.plan
        rollout.state, rollout.unjudged, rollout.is_asking = turn.state, 0, False
        self._has_news = True
        rollout.metrics |= turn.metrics
        if turn.reward is not None:
            rollout.reward, rollout.reason = float(turn.reward), turn.reason
        elif plan.room(rollout, len(turn.ids)) <= 0:
            rollout.reward, rollout.reason = 0.0, NO_ROOM
        else:
            rollout.add_given(turn.ids)
            self._add_request(rollout)

    def _rollout(self, place: tuple[int, int]) -> OpenRollout:
        return self.bank.groups[place[0]].rollouts[place[1]]

    # ---- between phases --------------------------------------------------------------------------

    def _so_far(self, rollout: OpenRollout) -> OpenRollout:
        """A rollout with the tokens that its request has drawn."""
        request = self.requests.get((rollout.group, rollout.sample))
        if request is None:
            return rollout
        lists = {n: list(getattr(rollout, n)) for n in ("ids", "log_probs", "is_sampled")}
        copy = dataclasses.replace(rollout, versions=list(rollout.versions), **lists)
        self._add_drawn(copy, request)
        return copy

    def _go_on(self) -> None:
        """Take up rollouts that nobody works on, as those of a checkpoint."""
        for group in self.bank.groups.values():
            for rollout in group.rollouts:
                place = rollout.group, rollout.sample
                if rollout.reward is not None or place in self.requests or place in self._stepping:
                    continue
                self._submit_step(rollout) if rollout.is_asking else self._add_request(rollout)


def _transcripts(group: PromptGroup) -> list[Transcript]:
    return [rollout.transcript() for rollout in group.rollouts]


def seed_of(*numbers: int) -> int:
    """The seed of a rollout's noise: of the run, the number of its prompt, and its own."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
