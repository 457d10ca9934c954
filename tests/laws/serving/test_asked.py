"""Law: what a request asks of its text holds in the engine: ends, bans, biases, forms, log-probs.

Units of it are in tests/unit/infer/test_requests.py; here tokens are in flight while the host
decides. References are greedy tokens of the plain forward under the same rule.
"""

import functools
import json
import re

import numpy as np
import pytest

from mjax.data.base.tokenizer import load_tokenizer
from mjax.infer.engine import LIMITED
from mjax.infer.requests import SamplingParams, Structured
from mjax.infer.scheduling.scheduler import Limits
from tests.laws.serving.kinds import (
    GAP,
    LETTERS,
    PAGE,
    VOCAB,
    Ask,
    assert_greedy,
    emptied,
    engine,
    make_engine,
    scored,
    served,
)
from tests.marks import slow

KIND = "windows in turn"
PROMPT = [5, 6, 7, 8, 9]
COMPANY = [Ask([i, 3 * i], SamplingParams(temperature=1.0, seed=i, max_tokens=30)) for i in (1, 2)]


def asked(prompt=PROMPT, **how):
    """The only sample of a request that runs beside others."""
    params = SamplingParams(**({"max_tokens": 20} | how))
    output = served(emptied(engine(KIND)), [*COMPANY, Ask(prompt, params)])[-1]
    assert output.finished
    return output.outputs[0]


@functools.cache
def free():
    """What the model says if nothing is asked."""
    return tuple(asked().token_ids)


def assert_likeliest(sample, forbidden=lambda made: (), bias=None):
    """Each token is the plain forward's likeliest of those that a rule leaves."""
    output = type("Output", (), {"prompt_token_ids": PROMPT, "outputs": [sample]})
    for number, logits in enumerate(scored(KIND, [output])[0].copy()):
        for token, value in (bias or {}).items():
            logits[token] += value
        logits[list(forbidden(sample.token_ids[:number]))] = -np.inf
        assert logits.max() - logits[sample.token_ids[number]] < GAP


@slow
def test_a_stop_id_ends_a_text_and_only_after_min_tokens():
    token = free()[4]
    first = free().index(token)
    found = asked(stop_token_ids=[token])
    assert found.token_ids == [*free()[: first + 1]]
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    assert found.text == LETTERS.decode(free()[:first])
    later = asked(stop_token_ids=[token], min_tokens=12)
    assert len(later.token_ids) >= 12 and token not in later.token_ids[:11]
    assert_likeliest(later, lambda made: [token] if len(made) < 12 else [])


@slow
def test_end_tokens_of_the_model_end_a_text_unless_ignored():
    given = emptied(engine(KIND, eos=(free()[3],)))
    asks = [
        Ask(PROMPT, SamplingParams(max_tokens=9, ignore_eos=ignored)) for ignored in (False, True)
    ]
    found, ignored = (output.outputs[0] for output in served(given, asks))
    assert found.token_ids == [*free()[: free().index(free()[3]) + 1]]
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    assert ignored.token_ids == [*free()[:9]] and ignored.finish_reason == "length"


def test_a_stop_string_over_tokens_cuts_the_text():
    text = LETTERS.decode(free())
    found = asked(stop=[text[6:9]])
    assert (found.text, found.finish_reason) == (text[: text.index(text[6:9])], "stop")
    assert found.stop_reason == text[6:9] and len(found.token_ids) == len(found.logprobs)
    assert asked(stop=[text[6:9]], include_stop_str_in_output=True).text.endswith(text[6:9])
    assert asked(stop=["never"]).text == text


def test_bad_words_bans_and_biases_hold_for_every_token():
    one, before, last = free()[2], *free()[7:9]
    words = LETTERS.decode([one]), LETTERS.decode([before, last])
    found = asked(bad_words=words)
    assert words[0] not in found.text and words[1] not in found.text

    def banned(made):
        return [one, last] if [*made[-1:]] == [before] else [one]

    assert_likeliest(found, banned)
    bias = {free()[0]: -100.0, 17: 4.0}
    assert_likeliest(asked(logit_bias=bias), bias=bias)
    allowed = {3, 31, 32, 64, 251}
    found = asked(allowed_token_ids=[*allowed])
    assert set(found.token_ids) <= allowed
    assert_likeliest(found, lambda made: set(range(VOCAB)) - allowed)


def test_five_log_probs_are_the_likeliest_ones():
    found = asked(logprobs=5)
    output = type("Output", (), {"prompt_token_ids": PROMPT, "outputs": [found]})
    assert tuple(found.token_ids) == free()
    rows = zip(scored(KIND, [output])[0], found.top_logprobs, found.logprobs, strict=True)
    for logits, top, own in rows:
        wanted = logits - np.logaddexp.reduce(logits)
        assert len(top) == 5 and max(top.values()) == own
        np.testing.assert_allclose([wanted[i] for i in top], [*top.values()], atol=1e-4)
        np.testing.assert_allclose(np.sort(wanted)[-5:], sorted(top.values()), atol=1e-4)
    assert asked(logprobs=0).top_logprobs == [
        {token: own} for token, own in zip(found.token_ids, found.logprobs, strict=True)
    ]


def test_a_text_ends_where_the_engines_length_does():
    found = asked([*range(120)], max_tokens=None)
    assert len(found.token_ids) == 8 and found.finish_reason == "length"


@slow
def test_a_sample_may_end_while_another_lane_must_be_read_first():
    """Of a form's tokens none is in flight while the next one is planned: that reads all lanes."""
    given = emptied(engine("keys and values", {"dp": 2}))
    token = served(given, [Ask(PROMPT, SamplingParams())])[0].outputs[0].token_ids[6]
    params = SamplingParams(max_tokens=40, stop_token_ids=[token])
    waits = SamplingParams(max_tokens=40, bad_words=[LETTERS.decode([3, 4])])
    asks = [Ask(PROMPT, params), Ask([1], waits), Ask([2], params), Ask([4], waits)]
    outputs = served(emptied(given), asks)
    assert outputs[0].outputs[0].stop_reason == token
    assert_greedy("keys and values", outputs)


@slow
def test_a_text_that_ends_while_a_lane_is_read_leaves_no_page_half_written():
    """The place of its last token was planned, in a step that then left the token out."""
    given = emptied(engine("keys and values", {"dp": 2}))
    text = served(given, [Ask(PROMPT, SamplingParams(max_tokens=27))])[0].outputs[0].token_ids
    assert (len(PROMPT) + 27) % PAGE == 0 and text.index(text[-1]) == 26
    served(emptied(given), [Ask([9] * 60, SamplingParams())])  # its pages hold other things
    ends = SamplingParams(max_tokens=40, stop_token_ids=[text[-1]])
    waits = SamplingParams(max_tokens=40, bad_words=[LETTERS.decode([3, 4])])
    ended, _ = served(emptied(given), [Ask(PROMPT, ends), Ask([1], waits)])
    assert ended.outputs[0].token_ids == text
    assert_greedy("keys and values", served(given, [Ask([*PROMPT, *text, 1], SamplingParams())]))


@pytest.mark.parametrize("sampled", [True, False])
def test_penalties_count_the_prompt_and_the_text(sampled):
    how = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    found = asked(**how, max_tokens=40) if not sampled else None
    if sampled:  # a nearly greedy one
        found = asked(**how, max_tokens=40, temperature=1e-6, seed=0)
    output = type("Output", (), {"prompt_token_ids": PROMPT, "outputs": [found]})
    made = np.zeros(VOCAB)
    for token, logits in zip(found.token_ids, scored(KIND, [output])[0], strict=True):
        seen = (made > 0) | np.isin(np.arange(VOCAB), PROMPT)
        changed = np.where(seen, np.where(logits < 0, logits * 1.4, logits / 1.4), logits)
        changed = changed - 0.7 * (made > 0) - 0.4 * made
        assert changed.max() - changed[token] < GAP
        made[token] += 1
    assert made.max() > 0


def test_a_structured_text_has_its_form_whatever_runs_beside_it():
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer("byte")
    given = make_engine("bytes", tokenizer=tokenizer, eos=(tokenizer.eod_id,))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}, "b": {"type": "boolean"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    forms = {"json_schema": schema}, {"regex": "[ab]{4}(x|yz)"}
    asks = [
        Ask([65 + i], SamplingParams(max_tokens=60, structured=Structured(**form), **how))
        for i, form in enumerate(forms)
        for how in ({}, {"temperature": 1.0, "seed": 1})
    ]
    company = [Ask([3], SamplingParams(max_tokens=50))]
    outputs = served(given, company + asks)[1:]
    for output in outputs:
        sample = output.outputs[0]
        assert sample.finish_reason == "stop", sample
        if "{" in sample.text:
            assert json.loads(sample.text).keys() == {"a", "b"}
        else:
            assert re.fullmatch("[ab]{4}(x|yz)", sample.text)
    alone = [served(emptied(given), [ask])[0].outputs[0].text for ask in asks]
    assert alone == [output.outputs[0].text for output in outputs]


@slow
def test_an_engine_warm_for_rules_compiles_none_for_random_ones():
    limits = Limits(rows=1, chunk=16, length=64)
    given = make_engine(KIND, limits=limits, pages=9, all_sizes=True)
    compiled = given.warm_up([LIMITED], all_rules=True)
    rng = np.random.default_rng(4)
    kinds = [
        {},
        {"logit_bias": {int(t): -9.0 for t in rng.integers(0, VOCAB, 9)}},
        {"allowed_token_ids": [3, 31, 32, 64]},
        {"bad_words": [LETTERS.decode([5]), LETTERS.decode([7])]},
        {"stop_token_ids": [3, 4], "min_tokens": 3},
    ]
    asks = []
    for number in range(30):
        params = kinds[rng.integers(5)] | {"temperature": float(rng.integers(2)), "seed": number}
        prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
        asks.append(Ask(prompt, SamplingParams(max_tokens=5, **params), 3 * number))
    outputs = served(given, asks)
    assert len(given.runner.compiled) == compiled == 4  # three of layers
    for output, ask in zip(outputs, asks, strict=True):
        made = set(output.outputs[0].token_ids)
        assert made <= set(ask.params.allowed_token_ids or made)
        assert not ask.params.bad_words or made.isdisjoint({5, 7})
    plain = [output for output, ask in zip(outputs, asks, strict=True) if is_plain(ask.params)]
    assert plain
    assert_greedy(KIND, plain)


def is_plain(params):
    return SamplingParams(max_tokens=5, seed=params.seed) == params


@slow
def test_a_warm_engine_compiles_nothing_for_random_requests():
    given = make_engine(KIND, limits=Limits(rows=2, chunk=16, length=64), pages=9, all_sizes=True)
    compiled = given.warm_up()
    rng = np.random.default_rng(3)
    asks = []
    for number in range(70):
        how = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 3}]
        params = how[rng.integers(len(how))] | {"max_tokens": int(rng.integers(1, 8))}
        if "temperature" in params and rng.integers(3) == 0:
            params["n"] = 2
        prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
        asks.append(Ask(prompt, SamplingParams(**params, seed=number), 2 * number))
    outputs = served(given, asks)
    assert len(given.runner.compiled) == compiled == 4  # two of layers
    hot = [output for output, ask in zip(outputs, asks, strict=True) if not ask.params.temperature]
    assert_greedy(KIND, hot)
