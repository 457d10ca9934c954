"""Law: a request's greedy tokens are those of the plain forward, whatever happens around it.

Each token of an engine is compared with the likeliest one of a forward of the whole text, which
knows no cache. So all settings of one model agree with each other, but for ties.
"""

import numpy as np
import pytest

from mjax.infer.requests import SamplingParams
from tests.laws.serving.kinds import (
    KINDS,
    VOCAB,
    Ask,
    assert_greedy,
    emptied,
    engine,
    logprobs_of,
    preemptions,
    requested,
    served,
    tokens_of,
)
from tests.marks import quick

RNG = np.random.default_rng(0)
SHARED = RNG.integers(0, VOCAB, 37).tolist()  # two pages and a bit
PROMPTS = [
    RNG.integers(0, VOCAB, 50).tolist(),
    [7],
    [*SHARED, 5],
    RNG.integers(0, VOCAB, 16).tolist(),
    [*SHARED, 9, 9],
    RNG.integers(0, VOCAB, 33).tolist(),
]
NEW = 40
ASKS = [Ask(prompt, SamplingParams(max_tokens=NEW - 5 * i)) for i, prompt in enumerate(PROMPTS)]


def check_all(kind, given):
    """Serve under every setting; the settings go through pairs of values."""
    recurrent = not given.lanes[0].pool.cache_prefixes
    for asks, chunk, pages in (
        (ASKS, 64, 40),
        (ASKS[::-1], 8, 40),
        ([Ask(a.prompt, a.params, 3 * i) for i, a in enumerate(ASKS)], 64, 9),
        ([Ask(a.prompt, a.params, 50 * i) for i, a in enumerate(ASKS[:3])], 32, 40),
    ):
        emptied(given, chunk, pages)
        requests = requested(given, asks)
        outputs = [request.output for request in requests]
        assert_greedy(kind, outputs)
        assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == len(outputs)
        assert (preemptions(requests) > 0) == (pages == 9 and given.lanes[0].window is None)
    again = served(given, asks)
    assert_greedy(kind, again)
    hits = [output.num_cached_tokens for output in again]
    assert hits == [0, 0, 0] if recurrent else hits[0] == 48 and hits[2] >= 32, hits


@pytest.mark.parametrize("kind", quick(KINDS, 1, 7))
def test_greedy_tokens_are_the_plain_forwards(kind):
    check_all(kind, engine(kind))


def test_a_preempted_sample_that_gets_its_slot_again_gets_other_pages():
    given = emptied(engine("keys and values"), pages=9)
    victim = given.add(range(1, 18), SamplingParams(max_tokens=31, priority=1))
    others = [given.add(range(30, 55), SamplingParams(max_tokens=40))]
    others.append(given.add([60], SamplingParams(max_tokens=31)))
    given.step()
    slot, pages = victim.samples[0].tokens.slot, victim.samples[0].tokens.pages
    while not others[-1].output.finished:
        given.step()
    assert preemptions([victim]) == 0 and victim.samples[0].tokens.queued
    others.append(given.add([3, 2], SamplingParams(max_tokens=9)))  # takes the slot just left
    while given.has_work:
        given.step()
        again = victim.samples[0].tokens
        assert again.slot in (slot, -1) and (again.pages != pages or again.slot == -1)
    assert preemptions([victim]) == 1
    assert_greedy("keys and values", [request.output for request in (victim, *others)])
