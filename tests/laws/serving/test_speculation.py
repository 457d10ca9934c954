"""Law: guesses change when tokens come, not which ones, nor their log-probabilities."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.infer.drafting.repeated_texts import RepeatedTexts
from mjax.infer.engine import Engine
from mjax.infer.records import Request, RequestSample
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Limits, Scheduler
from mjax.infer.small_engine import DraftModel
from tests.laws.serving.kinds import PAGE, VOCAB, Ask, make_engine, tokens_of, with_few_programs
from tests.laws.serving.kinds import served as served_all
from tests.laws.serving.tiny import served, tiny_engine, tiny_model
from tests.marks import exhaustive, quick, slow

DRAFTS, NEW = 3, 40
KINDS = "keys and values", "windows alone", "latent", "experts"


class Guesses:
    """Guesses as a test says: `of` gets the tokens so far and the most that are wanted."""

    of = staticmethod(lambda tokens, most: [])

    def propose(self, samples: Sequence[RequestSample], most: int) -> list[list[int]]:
        return [Guesses.of(list(sample.sequence.tokens), most) for sample in samples]


@pytest.fixture(autouse=True)
def no_guesses(monkeypatch):
    monkeypatch.setattr(Guesses, "of", staticmethod(lambda tokens, most: []))


def drafting(kind: str, mesh: Mapping[str, int] | None = None, **options) -> Engine:
    return tiny_engine(tiny_model(kind), mesh, drafts=DRAFTS, drafter=Guesses(), **options)


@functools.cache
def engine(kind: str) -> Engine:
    """An engine that keeps its few programs from test to test."""
    return with_few_programs(drafting(kind))


def emptied(given: Engine, pages: int = 40) -> Engine:
    """The engine as if it had been made with pools of so many pages."""
    assert not given.has_work
    for number, lane in enumerate(given.lanes):
        pool = PagePool(pages, page=lane.pool.page)
        given.lanes[number] = Scheduler(given.limits, pool, lane.window)
    given.verified = given.accepted = 0
    return given


def asks() -> list[tuple[list[int], SamplingParams]]:
    """Prompts around the borders of pages, some with a common beginning, greedy and at random."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, VOCAB, 2 * PAGE + 3).tolist()
    others = [rng.integers(0, VOCAB, n).tolist() for n in (PAGE - 2, 1)]
    prompts = [first, first[: PAGE + 1], others[0], others[1], first]
    heat = [0.0, 1.0, 0.0, 1.0, 0.7]
    return [
        (prompt, SamplingParams(temperature=t, top_p=1 - t / 4, seed=n, max_tokens=NEW, logprobs=2))
        for n, (prompt, t) in enumerate(zip(prompts, heat, strict=True))
    ]


def oracle(requests: Sequence[Request], seed: int):
    """Guesses that are often right and of all lengths, from texts that are known already."""
    texts = [r.output.prompt_token_ids + r.output.outputs[0].token_ids for r in requests]
    rng = np.random.default_rng(seed)

    def guess(tokens: list[int], most: int) -> list[int]:
        known = next(text for text in texts if text[: len(tokens)] == tokens)
        found = known[len(tokens) :][: rng.integers(0, most + 1)]
        return [t if rng.random() < 0.8 else (t + 1) % VOCAB for t in found]

    return guess


def assert_same(one: Sequence[Request], other: Sequence[Request]) -> None:
    for a, b in zip(one, other, strict=True):
        a, b = a.output.outputs[0], b.output.outputs[0]
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
        for name in ("logprobs", "processed_logprobs"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=0, atol=1e-4)
        for mine, others in zip(a.top_logprobs, b.top_logprobs, strict=True):
            assert mine == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("kind", quick(KINDS))
def test_tokens_are_those_without_drafts(kind, monkeypatch):
    given = engine(kind)
    plain = served(emptied(given), asks())
    assert given.verified == 0 and plain[4].output.num_cached_tokens == 2 * PAGE

    monkeypatch.setattr(Guesses, "of", staticmethod(oracle(plain, 0)))
    assert_same(plain, served(emptied(given), asks()))
    assert given.verified > 20 and given.accepted > given.verified / 2

    # So few pages that rows lose theirs, and drafts find none.
    monkeypatch.setattr(Guesses, "of", staticmethod(oracle(plain, 1)))
    tight = served(emptied(given, pages=6), asks())
    assert_same(plain, tight)
    assert max(r.samples[0].sequence.admissions for r in tight) > 1 or kind == "windows alone"

    monkeypatch.setattr(Guesses, "of", staticmethod(lambda tokens, most: [7] * most))
    assert_same(plain, served(emptied(given), asks()))


@exhaustive
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}])
def test_lanes_and_cut_heads_verify_as_one_device_does(mesh, monkeypatch):
    plain = served(engine("keys and values"), asks())
    monkeypatch.setattr(Guesses, "of", staticmethod(oracle(plain, 0)))
    given = drafting("keys and values", mesh)
    assert_same(plain, served(given, asks()))
    assert given.accepted > 20


@exhaustive
def test_bits_do_not_depend_on_guesses_of_others(monkeypatch):
    given = drafting("keys and values", batch_invariant=True)
    plain = served(given, asks())
    monkeypatch.setattr(Guesses, "of", staticmethod(oracle(plain, 0)))
    for one, other in zip(plain, served(emptied(given), asks()), strict=True):
        assert one.output.outputs[0].logprobs == other.output.outputs[0].logprobs


def test_a_text_that_repeats_comes_in_few_steps(monkeypatch):
    """It also shows that rules of a row hold in all its places."""
    given = emptied(engine("keys and values"))
    monkeypatch.setattr(given, "_drafter", RepeatedTexts())
    params = SamplingParams(max_tokens=21, allowed_token_ids=[5])
    [request] = served(given, [([1, 5, 5, 5], params)])
    assert request.output.outputs[0].token_ids == [5] * 21
    assert (given.verified, given.accepted) == (5, 15)


@exhaustive
def test_a_model_guesses_its_own_tokens_at_every_temperature():
    model = tiny_model("keys and values")
    plain = served(engine("keys and values"), asks())
    small = tiny_engine(model, limits=Limits(rows=2, chunk=32, length=80))
    given = tiny_engine(model, drafts=DRAFTS, drafter=DraftModel(small))
    assert_same(plain, served(given, asks()))
    assert given.accepted > 0.9 * DRAFTS * (given.verified - len(plain))  # fewer at the ends


def test_rules_that_depend_on_the_text_exclude_drafts(monkeypatch):
    given = emptied(engine("keys and values"))
    monkeypatch.setattr(Guesses, "of", staticmethod(lambda tokens, most: [7] * most))
    served(given, [([1], SamplingParams(max_tokens=4, repetition_penalty=1.2))])
    assert given.verified == 0
    served(given, [([1], SamplingParams(max_tokens=6, min_tokens=3))])
    assert given.verified == 2  # of the fourth and the fifth token; the sixth has no room


@slow
def test_a_form_takes_guesses_and_stays_the_same():
    """Also guesses that it forbids, and those after which it is complete."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer("byte")
    forms = "(ab|cd){9}e", "x{12}(y|z){9}", "[a-d]{20}"
    how = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    asks = [Ask([65], SamplingParams(structured={"regex": form}, **how)) for form in forms]
    texts = []
    for drafts in (0, DRAFTS):
        options = {"tokenizer": tokenizer, "eos": (tokenizer.eod_id,), "drafts": drafts}
        given = make_engine("bytes", **options)
        texts.append(tokens_of(served_all(given, asks)))
    assert texts[0] == texts[1] and given.accepted > 10


def test_an_end_among_right_drafts_ends_the_text(monkeypatch):
    given = emptied(engine("keys and values"))
    prompt, params = [3, 1, 4], SamplingParams(max_tokens=12)
    [plain] = served(given, [(prompt, params)])
    made = plain.output.outputs[0].token_ids
    monkeypatch.setattr(Guesses, "of", staticmethod(oracle([plain], 2)))
    stop = SamplingParams(max_tokens=12, stop_token_ids=[made[5]])
    [request] = served(given, [(prompt, stop)])
    assert request.output.outputs[0].token_ids == made[: made.index(made[5]) + 1]
    assert request.output.outputs[0].finish_reason == "stop"


def test_models_with_states_refuse_drafts():
    with pytest.raises(UserError, match="drafts=3: .* recurrent"):
        drafting("mamba")
