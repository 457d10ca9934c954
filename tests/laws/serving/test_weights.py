"""Law: weights change between two tokens, caches come and go, requests leave: the rest stays right.

After `update_weights` tokens are those of the new weights, and no page of the old ones is read by a
request that comes later.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.errors import UserError
from mjax.infer.requests import SamplingParams
from mjax.models import build, split
from tests.laws.serving.kinds import (
    VOCAB,
    Ask,
    assert_greedy,
    at_rest,
    emptied,
    engine,
    model,
    on_mesh,
    preemptions,
    served,
    tokens_of,
)

KIND = "keys and values"
RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (50, 20, 37)]
ASKS = [Ask(prompt, SamplingParams(max_tokens=30)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def others():
    """Other weights of the same model."""
    return split(build(model(KIND).cfg, nnx.Rngs(9)))[1]


@pytest.fixture
def given():
    """An engine with the first weights, before and after."""
    made = engine(KIND)
    yield made
    made.resume()
    for name in list(made.requests):
        made.abort(name)
    while made.has_work:
        made.step()
    made.wake()
    made.update_weights(model(KIND).params)
    at_rest(made)


def steps(given, count):
    return [update for _ in range(count) for update in given.step()]


def test_new_weights_give_their_own_tokens_and_find_no_old_prefix(given, others):
    before = served(given, ASKS)
    assert [o.num_cached_tokens for o in served(given, ASKS)] == [48, 16, 32]
    compiled = len(given.runner.compiled)
    given.update_weights(others)
    after = served(given, ASKS)
    assert [o.num_cached_tokens for o in after] == [0, 0, 0]
    assert_greedy(KIND, after, others)
    assert tokens_of(after) != tokens_of(before) and len(given.runner.compiled) == compiled
    assert {v for o in after for v in o.outputs[0].weight_versions} == {given.version}


def test_a_request_goes_on_with_new_weights_and_each_token_says_which(given, others):
    old = given.version
    running = given.add(PROMPTS[0], SamplingParams(max_tokens=30))
    steps(given, 9)
    found = given.update_weights(others)
    assert [update.request for update in found] == [running], "a token was in flight"
    made = len(running.output.outputs[0].token_ids)
    late = given.add(PROMPTS[0], SamplingParams(max_tokens=30))
    while given.has_work:
        given.step()
    versions = running.output.outputs[0].weight_versions
    assert versions == [old] * made + [old + 1] * (30 - made) and made == 9
    assert late.output.num_cached_tokens == 0
    assert_greedy(KIND, [late.output], others)
    again = served(given, [ASKS[0]])[0]
    assert again.num_cached_tokens == 48, "what the late request computed is new"
    assert_greedy(KIND, [again], others)


def test_a_request_preempted_across_an_update_reads_no_old_page(given, others):
    emptied(given, pages=9)
    for prompt in PROMPTS[1:]:
        given.add(prompt, SamplingParams(max_tokens=80, ignore_eos=True))
    requests = list(given.requests.values())
    while not preemptions(requests) and not any(s.samples[0].sequence.queued for s in requests):
        given.step()
        assert given.has_work
    given.update_weights(others)
    while given.has_work:
        given.step()
    # A preempted sample is computed anew, so its later tokens are those of the new weights alone.
    late = [r for r in requests if preemptions([r])]
    assert late
    for request in late:
        made = request.output.outputs[0]
        first = made.weight_versions.index(given.version)
        request.output.prompt_token_ids = [
            *request.output.prompt_token_ids,
            *made.token_ids[:first],
        ]
        made.token_ids, made.logprobs = made.token_ids[first:], made.logprobs[first:]
    assert_greedy(KIND, [r.output for r in late], others)


def test_a_pause_loses_nothing(given):
    wanted = tokens_of(served(given, ASKS))
    requests = [given.add(ask.prompt, ask.params) for ask in ASKS]
    updates = steps(given, 7) + given.pause()
    assert not given.has_work and given.step() == [] == given.pause()
    late = given.add([1], SamplingParams(max_tokens=3))
    assert given.step() == [] and not late.output.finished
    given.resume()
    while given.has_work:
        updates += given.step()
    assert tokens_of(r.output for r in requests) == wanted
    assert len(updates) == 3 * 30 + 3 and late.output.finished


def test_sleep_frees_caches_and_wakes_to_the_same_tokens(given, others):
    wanted = tokens_of(served(given, ASKS))
    given.add([1], SamplingParams())
    with pytest.raises(UserError, match="finish or abort"):
        given.sleep()
    given.pause()
    with pytest.raises(UserError, match="finish or abort"):
        given.sleep()
    given.resume()
    given.abort(next(iter(given.requests)))
    given.step()
    arrays = jax.tree.leaves(given.runner._state)
    given.sleep()
    given.sleep()
    assert all(array.is_deleted() for array in arrays)
    with pytest.raises(UserError, match="sleeps"):
        given.add([1], SamplingParams())
    given.update_weights(others)
    given.update_weights(model(KIND).params)
    given.wake()
    given.wake()
    after = served(given, ASKS)
    assert tokens_of(after) == wanted and after[0].num_cached_tokens == 0


def test_an_engine_that_slept_without_weights_wants_some(given, others):
    wanted = tokens_of(served(given, ASKS))
    given.sleep(weights=True)
    given.wake()
    with pytest.raises(UserError, match="without weights"):
        given.add([1], SamplingParams())
    with pytest.raises(UserError, match="no weights"):
        given.warm_up()
    _, definition, params, _ = model(KIND)
    given.update_weights(on_mesh(definition, params, {"tp": 2}))
    assert tokens_of(served(given, ASKS)) == wanted


def test_weights_of_another_model_change_nothing(given):
    wanted = tokens_of(served(given, ASKS))
    params = model(KIND).params
    for wrong in (
        {},
        {**params, "extra": params},
        jax.tree.map(lambda p: p[..., :1], params),
        None,
    ):
        with pytest.raises(UserError, match="weights"):
            given.update_weights(wrong)
    assert tokens_of(served(given, ASKS)) == wanted


def test_weights_that_are_gone_or_of_another_dtype_change_nothing(given, others):
    wanted = tokens_of(served(given, ASKS))
    integers = jax.tree.map(lambda p: p.astype(jnp.int32), others)
    gone = jax.tree.map(lambda p: p + 0, others)
    jax.tree.leaves(gone)[-1].delete()
    for wrong, message in ((integers, "has dtype int32"), (gone, "is deleted")):
        with pytest.raises(UserError, match=message):
            given.update_weights(wrong)
    assert tokens_of(served(given, ASKS)) == wanted


@pytest.mark.parametrize("both_fit", [True, False])
def test_an_update_that_fails_midway_is_mended_by_another(given, others, both_fit, monkeypatch):
    wanted = tokens_of(served(given, ASKS))
    requests = [given.add(ask.prompt, ask.params) for ask in ASKS]
    steps(given, 7)
    version = given.version

    def failing(*arguments):
        raise MemoryError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("mjax.infer.step_runner.fit_twice", lambda params: both_fit)
        patch.setattr("mjax.infer.step_runner.take_apart", failing)
        given.update_weights(others)
    assert given.version == version and given.has_work == both_fit
    if not both_fit:
        assert given.step() == []
        with pytest.raises(UserError, match="an update of them failed"):
            given.add([1], SamplingParams())
        given.update_weights(model(KIND).params)
    while given.has_work:
        given.step()
    assert tokens_of(request.output for request in requests) == wanted
    assert given.version == version + (not both_fit)


def test_weights_may_lie_on_another_mesh(given, others):
    _, definition, _, _ = model(KIND)
    given.update_weights(on_mesh(definition, others, {"dp": 2, "tp": 2}))
    assert_greedy(KIND, served(given, ASKS), others)


def leave(given, state):
    """Add a request, bring it into a state, and abort it there."""
    params = SamplingParams(max_tokens=60, temperature=1.0, n=2, seed=0)
    request = given.add(range(60), params, request_id="leaves")
    if state != "queued":
        given.step()
    if state in ("decodes", "preempted", "half ended"):
        steps(given, 10)
    if state == "half ended":
        request.samples[0].answer.finish("stop")
        given._end(request.samples[0])
    if state == "preempted":
        for sample in request.samples:
            given._read(all_but=0)
            lane = given.lanes[0]
            lane._stop(sample.sequence)
            lane._enqueue(sample.sequence)
    given.abort("leaves")
    given.abort("leaves")
    return request


@pytest.mark.parametrize("state", ["queued", "prefills", "decodes", "preempted", "half ended"])
def test_a_request_may_leave_in_every_state(given, state):
    emptied(given, chunk=16)
    beside = given.add(PROMPTS[0], SamplingParams(max_tokens=30))
    steps(given, 3)
    request = leave(given, state)
    reasons = [sample.finish_reason for sample in request.output.outputs]
    assert reasons == ["stop" if state == "half ended" else "abort", "abort"]
    assert request.output.finished
    made = tokens_of([request.output])
    while given.has_work:
        given.step()
    at_rest(given)
    assert tokens_of([request.output]) == made, "nothing comes after the end"
    given.abort("leaves")
    given.abort("never came")
    assert_greedy(KIND, [beside.output, *served(given, ASKS)])
