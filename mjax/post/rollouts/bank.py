"""The bank: rollouts that wait between steps, in work or finished, and where the prompts go on.

A checkpoint holds it as JSON. Invariant: `Bank.of_record(bank.record())` is equal to the bit.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mjax.objectives.fields import HostBatch
from mjax.post.rollouts.transcript import OpenRollout

_TOKEN_LISTS = {"ids": "<i4", "log_probs": "<f8", "versions": "<i4"}


@dataclass
class PromptGroup:
    """The rollouts of one prompt. begun: number of the rollout phase that it began in."""

    begun: int
    rollouts: list[OpenRollout]

    @property
    def is_complete(self) -> bool:
        return all(rollout.reward is not None for rollout in self.rollouts)


@dataclass
class Bank:
    """Groups by the numbers of their prompts.

    cursor: the next prompt. skipped: prompts so far that were too long.
    drawn: groups of the next phase, if it is drawn already. dropped: groups of equal rewards that
        the last phase left out.
    """

    cursor: int = 0
    skipped: int = 0
    groups: dict[int, PromptGroup] = field(default_factory=dict)
    drawn: list[int] | None = None
    dropped: int = 0

    def record(self, so_far: Callable[[OpenRollout], OpenRollout] = lambda own: own) -> dict:
        """The bank as JSON. `so_far` adds to a rollout what its request has drawn so far."""
        groups = {}
        for number, group in self.groups.items():
            rollouts = [_rollout_record(so_far(rollout)) for rollout in group.rollouts]
            groups[str(number)] = {"begun": group.begun, "rollouts": rollouts}
        own = {"cursor": self.cursor, "skipped": self.skipped, "groups": groups}
        return own | {"drawn": self.drawn, "dropped": self.dropped}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Bank":
        groups = {}
        for number, group in record["groups"].items():
            rollouts = list(map(_rollout_of, group["rollouts"]))
            groups[int(number)] = PromptGroup(group["begun"], rollouts)
        own = record["cursor"], record["skipped"], groups
        return cls(*own, record.get("drawn"), record.get("dropped", 0))


def _rollout_record(rollout: OpenRollout) -> dict:
    record = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}
    record |= {
        name: array_text(np.array(record[name], kind)) for name, kind in _TOKEN_LISTS.items()
    }
    del record["is_sampled"]  # as versions say
    if rollout.experts is not None:
        record["experts"] = array_text(rollout.experts)
    return json.loads(json.dumps(record))


def _rollout_of(record: Mapping[str, Any]) -> OpenRollout:
    lists = {name: array_of(record[name]).tolist() for name in _TOKEN_LISTS}
    found = OpenRollout(record["group"], record["sample"], record["state"])
    found.add_drawn(lists["ids"], lists["log_probs"], lists["versions"])
    for name in ("unjudged", "is_asking", "reward", "metrics", "reason"):
        setattr(found, name, record[name])
    if record.get("experts") is not None:
        found.experts = array_of(record["experts"])
    return found


def array_text(array: np.ndarray) -> list:
    """An array as JSON, to the bit."""
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def array_of(text: list) -> np.ndarray:
    """The array of `array_text`."""
    kind, shape, data = text
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape).copy()


def batch_record(batch: HostBatch) -> dict:
    """A batch as JSON."""
    return {name: array_text(np.asarray(array)) for name, array in batch.items()}


def recorded_batch(record: Mapping[str, list]) -> HostBatch:
    """The batch of `batch_record`."""
    return {name: array_of(text) for name, text in record.items()}
