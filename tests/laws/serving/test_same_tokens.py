"""Law: a request's greedy tokens are those of the plain forward, whatever happens around it.

Each token of an engine is compared with the likeliest one of a forward of the whole text, which
knows no cache. So all settings of one model agree with each other, but for ties.
"""

import jax
import numpy as np
import pytest

from mjax.infer.caches.contiguous import empty_cache, extend
from mjax.infer.caches.paged import _in_8_bits
from mjax.infer.requests import SamplingParams
from mjax.models.attention.caches import KeysValues
from tests.laws.serving.kinds import (
    KINDS,
    LENGTH,
    VOCAB,
    Ask,
    assert_greedy,
    emptied,
    engine,
    logprobs_of,
    make_engine,
    model,
    preemptions,
    requested,
    scored,
    served,
    tokens_of,
)
from tests.marks import quick, slow

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
    if given.lanes[0].pool.snapshots:  # the second time keeps states, the third goes on from them
        assert [output.num_cached_tokens for output in served(given, asks)] == [0, 0, 0]
    again = served(given, asks)
    assert_greedy(kind, again)
    hits = [output.num_cached_tokens for output in again]
    assert hits[0] == 48 and hits[2] >= 32, hits


CASES = [("windows in turn", True), ("hybrid", False)]  # kind, and whether with all sizes
CASES += [(kind, True) for kind in KINDS if kind != "windows in turn"]


@pytest.mark.parametrize("kind, all_sizes", quick(CASES, 0, 1))
def test_greedy_tokens_are_the_plain_forwards(kind, all_sizes):
    check_all(kind, engine(kind, all_sizes=all_sizes))


def test_a_preempted_sample_that_gets_its_slot_again_gets_other_pages():
    given = emptied(engine("keys and values"), pages=9)
    victim = given.add(range(1, 18), SamplingParams(max_tokens=31, priority=1))
    others = [given.add(range(30, 55), SamplingParams(max_tokens=40))]
    others.append(given.add([60], SamplingParams(max_tokens=31)))
    given.step()
    slot, pages = victim.samples[0].sequence.slot, victim.samples[0].sequence.pages
    while not others[-1].output.finished:
        given.step()
    assert preemptions([victim]) == 0 and victim.samples[0].sequence.queued
    others.append(given.add([3, 2], SamplingParams(max_tokens=9)))  # takes the slot just left
    while given.has_work:
        given.step()
        again = victim.samples[0].sequence
        assert again.slot in (slot, -1) and (again.pages != pages or again.slot == -1)
    assert preemptions([victim]) == 1
    assert_greedy("keys and values", [request.output for request in (victim, *others)])


MESHES = [
    ("experts", {"dp": 2, "ep": 2, "tp": 2}),
    ("keys and values", {"tp": 2}),
    ("keys and values", {"tp": 4}),  # more than kv heads
    ("keys and values", {"dp": 8}),
    ("windows in turn", {"dp": 2, "tp": 2}),
    ("windows alone", {"dp": 2}),
    ("sinks", {"tp": 4}),
    ("latent", {"tp": 4}),
    ("mamba", {"tp": 4}),
    ("deltanet", {"dp": 2, "tp": 4}),
    ("hybrid", {"ep": 2, "tp": 2}),
    ("experts", {"ep": 4}),
]


@pytest.mark.parametrize("kind, mesh", quick(MESHES))
def test_greedy_tokens_are_the_plain_forwards_on_a_mesh(kind, mesh):
    given = engine(kind, mesh)
    lanes = len(given.lanes)
    assert lanes == mesh.get("dp", 1) * mesh.get("ep", 1)
    for asks, pages in ((ASKS, 40), (ASKS[::-1] * lanes, 9)):
        emptied(given, pages=pages)
        outputs = served(given, asks)
        assert_greedy(kind, outputs[: len(ASKS)])
        assert tokens_of(outputs) == tokens_of(outputs[: len(ASKS)] * (len(asks) // len(ASKS)))
    if given.lanes[0].pool.snapshots:
        emptied(given)
        again = [served(given, [ASKS[0]] * 2 * lanes) for _ in range(3)][-1]
        assert {output.num_cached_tokens for output in again} == {48}
        assert_greedy(kind, again)


@pytest.mark.parametrize("kind", quick(["windows in turn", "hybrid"], 0))
def test_in_one_compiled_size_neighbors_change_no_bit(kind):
    given = engine(kind)
    alone = [served(emptied(given), [ask])[0] for ask in ASKS[:4]]
    together = served(emptied(given), ASKS[:4])
    assert tokens_of(together) == tokens_of(alone)
    assert logprobs_of(together) == logprobs_of(alone)


PAGES_OF_64 = ["keys and values", "windows alone", "latent", "hybrid"]


@pytest.mark.parametrize("kind", quick(PAGES_OF_64))
def test_pages_of_64_tokens_give_the_same_tokens(kind, monkeypatch):
    for module in ("engine", "programs", "step_runner"):
        monkeypatch.setattr(f"mjax.infer.{module}.PAGE", 64)
    asks = [Ask([*SHARED, *range(30), i], SamplingParams(max_tokens=50)) for i in range(4)]
    given = make_engine(kind, pages=12)
    assert_greedy(kind, served(given, asks))
    assert given.lanes[0].pool.page == 64


# Largest difference of log-probs to a contiguous cache that is rounded to e4m3, and to none.
OF_ROUNDED, OF_WHOLE = 1e-3, 1.0


@slow
def test_an_fp8_cache_equals_a_contiguous_one_that_is_rounded(monkeypatch):
    kind = "keys and values"
    outputs = served(engine(kind, cache_dtype="fp8"), ASKS)

    def rounded(x):
        bits, scales = _in_8_bits(x, True)
        return bits.astype(x.dtype) * scales[..., None].astype(x.dtype)

    write = KeysValues.write
    monkeypatch.setattr(
        KeysValues, "write", lambda self, k, v, new: write(self, rounded(k), rounded(v), new)
    )
    cfg, definition, params, _ = model(kind)
    given = definition.bind(params)
    cache = empty_cache(cfg, 1, LENGTH, np.float32)
    forward = jax.jit(lambda ids: given.logits(extend(given, cache, ids)[0])[0])
    for output, plain in zip(outputs, scored(kind, outputs), strict=True):
        made = output.outputs[0]
        prompt, count = output.prompt_token_ids, len(made.token_ids)
        text = np.zeros((1, LENGTH), np.int32)
        text[0, : len(prompt) + count] = [*prompt, *made.token_ids]
        of_all = jax.nn.log_softmax(forward(text))[len(prompt) - 1 :]
        near = of_all[np.arange(count), np.array(made.token_ids)]
        assert np.abs(np.subtract(near, made.logprobs)).max() < OF_ROUNDED
        whole = jax.nn.log_softmax(plain)[np.arange(len(plain)), np.array(made.token_ids)]
        assert 0 < np.abs(np.subtract(whole, made.logprobs)).max() < OF_WHOLE


@pytest.mark.parametrize("largest", [0, 1e-36, 3e38])
def test_numbers_of_any_size_are_cached_in_8_bits(largest):
    """fp32 has no normal number that is 448 times smaller than 1e-36."""
    x = np.float32(largest) * np.linspace(-1, 1, 8, dtype=np.float32)[None, None, None]
    bits, scales = _in_8_bits(x, True)
    found = bits.astype(np.float32) * scales[..., None]
    np.testing.assert_allclose(found, x, rtol=2**-4, atol=0)
