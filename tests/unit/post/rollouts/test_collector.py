"""Collected rollouts, on an engine of a few lines: ids, masks, versions, turns, groups, bank."""

import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.errors import UserError
from mjax.infer.requests import SamplingParams
from mjax.post.environments.environment import Turn, call_environment
from mjax.post.rollouts.bank import Bank
from mjax.post.rollouts.collector import NO_ROOM, Collector, DrawingPlan

END = 9


class Drawing:
    """An engine whose token is a function of the seed and the place; END at every fourth."""

    def __init__(self):
        self.requests, self.aborted, self.version, self.steps = {}, [], 0, 0

    @property
    def has_work(self):
        return bool(self.requests)

    def add(self, ids, params, request_id):
        assert request_id not in self.requests and params.max_tokens > 0
        lists = {"token_ids": [], "processed_logprobs": [], "weight_versions": []}
        drawn = SimpleNamespace(**lists, experts=None)
        output = SimpleNamespace(request_id=request_id, outputs=[drawn], finished=False)
        request = SimpleNamespace(output=output, ids=list(ids), params=params)
        self.requests[request_id] = request
        return request

    def step(self):
        self.steps += 1
        for name, request in list(self.requests.items()):
            drawn = request.output.outputs[0]
            place = len(request.ids) + len(drawn.token_ids)
            token = END if place % 4 == 0 else token_at(request.params.seed, place)
            drawn.token_ids.append(token)
            drawn.processed_logprobs.append(-float(np.float32(1 / (1 + place))))
            drawn.weight_versions.append(self.version)
            if token == END or len(drawn.token_ids) == request.params.max_tokens:
                request.output.finished = True
                del self.requests[name]

    def abort(self, name):
        self.aborted.append(name)
        self.requests.pop(name, None)


def token_at(seed, place):
    return (seed + 3 * place) % 8


class TwoTurns:
    """Prompts of `1 + index % 3` tokens; after the first answer (7, 8) follow."""

    def reset(self, seed, index):
        return Turn((5,) * (1 + index % 3), {"turn": 0})

    def step(self, state, ids):
        if state["turn"] == 0:
            return Turn((7, 8), {"turn": 1, "seen": list(ids)}, metrics={"asked": 1.0})
        return Turn((), None, float(sum(ids) % 3), {"tokens": len(ids)}, "answered")


class OneTurn:
    """Rewards are equal in groups whose number `is_equal` holds of."""

    def __init__(self, is_equal=lambda index: False, length=2):
        self.is_equal, self.length = is_equal, length

    def reset(self, seed, index):
        return Turn((5,) * (self.length(index) if callable(self.length) else self.length), index)

    def step(self, state, ids):
        return Turn((), None, 1.0 if self.is_equal(state) else float(ids[0] % 2))


class Calls:
    """Workers in this process that answer when they are asked, in the given order."""

    def __init__(self, environment, backwards=False):
        self.environment, self.backwards, self.waiting = environment, backwards, []

    def __enter__(self):
        return self

    def submit(self, ticket, method, *args):
        turn = call_environment(self.environment, "toy", method, json.loads(json.dumps(args)))
        self.waiting.append((ticket, turn))

    def ready(self, timeout=0):
        found, self.waiting = self.waiting, []
        return found[::-1] if self.backwards else found


class Policy:
    def __init__(self):
        self.engine = Drawing()

    def step_of(self, version):
        return 10 * version

    def memory_named(self):
        return nullcontext()


def collector(environment, **more):
    plan = {"seed": 3, "group_size": 2, "params": SamplingParams(temperature=1.0)}
    environments = Calls(environment, more.pop("backwards", False))
    bank = more.pop("bank", Bank())
    plan |= {"max_new_tokens": 6, "max_length": 20} | more
    return Collector(Policy(), lambda: environments, DrawingPlan(**plan), bank).__enter__()


def listed(groups):
    return [
        (t.group, t.sample, t.ids.tolist(), t.log_probs.tolist(), t.versions.tolist(), t.reward)
        for group in groups
        for t in group
    ]


def test_a_transcript_has_the_ids_of_all_turns_and_the_mask_of_drawn_ones():
    groups = collector(TwoTurns()).collect(0, 3)
    assert [[(t.group, t.sample) for t in g] for g in groups] == [
        [(n, 0), (n, 1)] for n in range(3)
    ]
    for t in itertools.chain(*groups):
        prompt = 1 + t.group % 3
        first = [token for token in t.ids[prompt:4]]
        assert (
            t.ids[:prompt].tolist() == [5] * prompt and t.ids[4] == END and len(first) == 4 - prompt
        )
        assert t.ids[5:7].tolist() == [7, 8]
        drawn = [*range(prompt, 5), *range(7, min(9, 7 + 6 - (5 - prompt)))]
        assert np.flatnonzero(t.is_sampled).tolist() == drawn and len(t.ids) == drawn[-1] + 1
        assert (t.versions[drawn] == 0).all() and (np.delete(t.versions, drawn) == -1).all()
        wanted = [-np.float32(1 / (1 + place)) for place in drawn]
        np.testing.assert_array_equal(t.log_probs[drawn], np.float32(wanted))
        assert not np.delete(t.log_probs, drawn).any()
        assert t.metrics == {"asked": 1.0, "tokens": len(drawn) - (5 - prompt)}
        assert t.reward == float(t.ids[7:].sum() % 3) and t.reason == "answered"
    samples = {t.ids.tobytes() for t in groups[0]}
    assert len(samples) == 2  # each has noise of its own


def test_transcripts_do_not_depend_on_the_order_of_answers_nor_on_neighbors():
    expected = listed(collector(TwoTurns()).collect(0, 4))
    assert listed(collector(TwoTurns(), backwards=True).collect(0, 4)) == expected
    one_by_one = collector(TwoTurns())
    assert listed([one_by_one.collect(n, 1)[0] for n in range(4)]) == expected


def test_a_rollout_without_room_for_more_ends_with_the_reward_0():
    (group,) = collector(TwoTurns(), max_new_tokens=3).collect(0, 1)
    assert all(t.reward == 0 and t.reason == NO_ROOM and t.length == 3 for t in group)
    (group,) = collector(TwoTurns(), max_length=7, max_new_tokens=5).collect(0, 1)
    assert all(t.reason == NO_ROOM and len(t.ids) == 5 for t in group)


def test_prompts_that_are_too_long_are_skipped_and_counted_and_too_many_are_refused():
    found = collector(OneTurn(length=lambda index: 2 if index % 3 else 15))
    groups = found.collect(0, 4)
    assert [group[0].group for group in groups] == [1, 2, 4, 5]
    assert found.bank.skipped == 2 and found.bank.cursor == 6
    with pytest.raises(UserError, match="prompts in a row are too long, of up to 15 tokens"):
        collector(OneTurn(length=15)).collect(0, 4)
    with pytest.raises(UserError, match="reset of prompt 0 gives no prompt"):
        collector(OneTurn(length=0)).collect(0, 1)


def test_an_environment_that_fails_gives_the_reward_0_and_says_why():
    class Failing(OneTurn):
        def step(self, state, ids):
            raise ValueError("no such thing")

    (group,) = collector(Failing()).collect(0, 1)
    assert all(t.reward == 0 and t.metrics == {"failed": 1.0} for t in group)
    assert "no such thing" in group[0].reason


def test_groups_of_equal_rewards_are_replaced_up_to_a_bound():
    def differ(group):
        return len({t.reward for t in group}) > 1

    found = collector(OneTurn(lambda index: index < 3), group_size=8)
    groups = found.collect(0, 2, is_of_use=differ)
    assert found.bank.dropped >= 3 and min(g[0].group for g in groups) >= 3
    assert all(map(differ, groups)) and not found.bank.groups
    endless = collector(OneTurn(lambda index: True))
    assert len(endless.collect(0, 2, is_of_use=differ)) == 2 and endless.bank.dropped == 16


class Slow(OneTurn):
    """Two more turns for prompts whose number is even."""

    def reset(self, seed, index):
        return Turn((5, 5), {"left": 0 if index % 2 else 2})

    def step(self, state, ids):
        if state["left"]:
            return Turn((6,), {"left": state["left"] - 1})
        return Turn((), None, 1.0)


def test_a_group_goes_on_for_as_many_phases_as_its_age_may_have_and_keeps_its_versions():
    found = collector(Slow(), max_new_tokens=12)
    ages = set()
    for phase in range(6):
        found.policy.engine.version = phase
        groups = found.collect(phase, 2, depth=1)
        assert len(groups) == 2
        for t in itertools.chain(*groups):
            versions = t.versions[t.is_sampled]
            assert (np.diff(versions) >= 0).all()
            ages.add(phase - int(versions.min()) // 10)
        assert len(found.bank.groups) == 2  # as many begin as are used
    assert ages == {0, 1}


def test_a_bank_goes_on_from_a_checkpoint_to_the_bit():
    whole = collector(Slow(), max_new_tokens=12)
    parts = collector(Slow(), max_new_tokens=12)
    whole.collect(0, 2, depth=1), parts.collect(0, 2, depth=1)
    for _ in range(1):
        whole._advance(), parts._advance()  # requests are in the middle of a turn
    assert whole.requests
    record = json.loads(json.dumps(parts.record()))
    assert Bank.of_record(record).record() == record
    resumed = collector(Slow(), max_new_tokens=12, bank=Bank.of_record(record))
    for phase in range(1, 4):
        assert listed(resumed.collect(phase, 2, depth=1)) == listed(
            whole.collect(phase, 2, depth=1)
        )


def test_an_aborted_group_leaves_nothing_behind():
    found = collector(Slow(), max_new_tokens=12)
    found.collect(0, 2, depth=1)
    number = next(iter(found.bank.groups))
    asked = [place for place in found.requests if place[0] == number]
    found.abort(number)
    assert len(found.policy.engine.aborted) == len(asked) > 0
    assert number not in {group for group, _ in found.requests} | found.bank.groups.keys()
    groups = found.collect(1, 2, depth=1)
    assert number not in {t.group for t in itertools.chain(*groups)}
