"""Law: what an engine cannot serve is refused in one line, and nothing of it stays behind."""

import numpy as np
import pytest

from mjax.errors import UserError
from mjax.infer.llm import LLM
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Draws
from mjax.infer.scheduling.scheduler import Limits, QueueFull
from tests.laws.serving.kinds import (
    LENGTH,
    PAGE,
    Ask,
    assert_greedy,
    at_rest,
    engine,
    make_engine,
    served,
)
from tests.marks import quick

KIND = "keys and values"
FEW = SamplingParams(max_tokens=5)
REFUSED = [
    ([], FEW, "a prompt of 0 tokens"),
    ([252], FEW, r"ids in \[0, 252\)"),
    ([3, -1], FEW, r"ids in \[0, 252\)"),
    ("text", FEW, "a prompt is a str: .*give a list of token ids"),
    (None, FEW, "a prompt is a NoneType"),
    ([1.5], FEW, "a prompt is a list: .*float"),
    ([[1, 2]], FEW, "a prompt is a list"),
    ([1] * LENGTH, FEW, "leaves no room"),
    ([1] * 120, FEW.model_copy(update={"max_tokens": 9}), "more than 128"),
    ([1], SamplingParams(max_tokens=2**31 - 1), "lower max_tokens"),
    ([1], {"max_tokens": 3}, "params is a dict; give SamplingParams"),
    ([1], None, "params is a NoneType"),
    ([1], SamplingParams(logit_bias={252: 1.0}), "outside the vocabulary of 252"),
]


@pytest.mark.parametrize("prompt, params, message", REFUSED)
def test_a_request_that_cannot_be_served_is_refused_in_one_line(prompt, params, message):
    given = engine(KIND)
    with pytest.raises(UserError, match=message) as error:
        given.add(prompt, params)
    assert "\n" not in str(error.value)
    at_rest(given)


LIMITS = [
    (dict(rows=0), "rows is 0"),
    (dict(rows=2.5), "rows is 2.5"),
    (dict(chunk=0), "chunk is 0"),
    (dict(length=-1), "length is -1"),
]


@pytest.mark.parametrize("limits, message", LIMITS)
def test_limits_are_integers_of_at_least_1(limits, message):
    with pytest.raises(UserError, match=message):
        Limits(**limits)


MADE = [
    (dict(pages=0), "a cache of 0 pages"),
    (dict(pages=1), "a cache of 1 pages"),
    (dict(cache_dtype="int4"), "cache_dtype=int4"),
    (dict(dtype="int32"), "dtype=int32: give one of bfloat16"),
    (dict(dtype="half a float"), "dtype=half a float"),
]


@pytest.mark.parametrize("options, message", MADE)
def test_an_engine_of_nonsense_is_refused_in_one_line(options, message):
    with pytest.raises(UserError, match=message):
        make_engine(KIND, **options)


def test_a_cache_in_8_bits_without_keys_and_values_is_refused():
    with pytest.raises(UserError, match="cache_dtype=fp8: .* no keys and values in pages"):
        make_engine("latent", cache_dtype="fp8")


ODD = [
    dict(rows=1),
    dict(chunk=1),
    dict(chunk=37),
    dict(rows=3),
    dict(tokens=1),
    dict(tokens=2, chunk=100),
    dict(length=10**9),
]


@pytest.mark.parametrize("limits", quick(ODD))
def test_odd_limits_serve_as_any_other(limits):
    given = make_engine(KIND, limits=Limits(**({"rows": 4, "chunk": 64, "length": 128} | limits)))
    assert given.limits.length == LENGTH
    prompts = [[3], [*range(20)], [*range(40)]]
    assert_greedy(KIND, served(given, [Ask(prompt, FEW) for prompt in prompts]))


def test_one_page_serves_what_fits_into_it():
    given = make_engine(KIND, pages=2)
    assert_greedy(
        KIND, served(given, [Ask([1, 2, i], SamplingParams(max_tokens=14)) for i in (1, 2)])
    )
    with pytest.raises(UserError, match="2 cache pages of 1"):
        given.add([1, 2, 3], SamplingParams(max_tokens=15))
    at_rest(given)


def test_without_a_known_memory_one_row_has_room_for_its_whole_length():
    given = make_engine(KIND, pages=None, limits=Limits(rows=1, chunk=64, length=LENGTH))
    assert given.programs.sizes.pages > LENGTH // PAGE
    given.add([1], SamplingParams(max_tokens=None))


def test_ids_of_requests_are_unique_and_free_again_after_the_end():
    given = engine(KIND)
    mine = given.add([1], FEW, request_id="a")
    with pytest.raises(UserError, match="request a is running"):
        given.add([2], FEW, request_id="a")
    number = int(given.add([1], FEW).output.request_id)
    taken = given.add([1], FEW, request_id=str(number + 2))
    others = [given.add([1], FEW) for _ in range(3)]
    assert len({r.output.request_id for r in (mine, taken, *others)}) == 5
    given.abort("never came")
    while given.has_work:
        given.step()
    again = given.add([1], FEW, request_id="a")
    while given.has_work:
        given.step()
    assert again.output.outputs[0].token_ids == mine.output.outputs[0].token_ids
    at_rest(given)


def test_a_full_queue_takes_no_sample_of_a_request():
    limits = Limits(rows=4, chunk=64, length=128, queued=3)
    given = make_engine(KIND, limits=limits)
    given.add([1], FEW)
    with pytest.raises(QueueFull):
        given.add([1], SamplingParams(n=3, temperature=1.0))
    assert len(given.lanes[0].waiting) == 1 and len(given.requests) == 1
    given.abort(next(iter(given.requests)))
    at_rest(given)


def test_a_sleeping_engine_says_so_and_a_second_one_does_not_mind():
    first, second = make_engine(KIND), engine(KIND)
    first.sleep()
    for refused in (lambda: first.add([1], FEW), first.warm_up):
        with pytest.raises(UserError, match="sleeps"):
            refused()
    assert first.step() == []
    assert_greedy(KIND, served(second, [Ask(np.array([1, 2]), FEW)]))
    with pytest.raises(ValueError):
        second.warm_up([Draws(top=10**6)])
    assert_greedy(KIND, served(second, [Ask([1, 2], FEW)]))


def test_a_refused_prompt_leaves_nothing_of_its_batch():
    llm = object.__new__(LLM)  # without files
    llm.engine, llm.tokenizer, llm.folder = engine(KIND), None, None
    for prompts, message in (
        ([[1], [999]], "a prompt of 1 tokens"),
        ([[1], "text"], "no tokenizer"),
        (None, "prompts are a NoneType"),
        (7, "prompts are a int"),
    ):
        with pytest.raises(UserError, match=message):
            llm.generate(prompts)
        assert not llm.engine.requests
    with pytest.raises(UserError, match="params is a dict"):
        llm.generate([[1]], {"max_tokens": 3})
    llm.engine.pause()
    with pytest.raises(UserError, match="resume it"):
        llm.generate([[1]])
    llm.engine.resume()
    at_rest(llm.engine)
    found = llm.generate(np.array([[5, 6], [7, 8]]), FEW)
    assert_greedy(KIND, found)
    assert llm.generate([]) == []
    assert llm.generate((5, 6), FEW)[0].outputs[0].token_ids == found[0].outputs[0].token_ids


def test_a_call_that_is_interrupted_leaves_no_page_that_was_not_written(monkeypatch):
    """As by Ctrl-C while a program is compiled, whose pages are planned."""
    llm = object.__new__(LLM)  # without files
    llm.engine = engine(KIND)
    prompt = [*range(100, 140)]

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.runner, "forward_program", interrupted)
        llm.generate(prompt, FEW)
    at_rest(llm.engine)
    assert_greedy(KIND, llm.generate(prompt, FEW))
