"""Law: log-probabilities of a prompt are those of the training forward, however it is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.infer.engine import Engine
from mjax.infer.records import Request
from mjax.infer.requests import SamplingParams
from mjax.interop.pretrained import Pretrained
from tests.laws.serving.kinds import VOCAB, with_few_programs
from tests.laws.serving.tiny import served, tiny_engine, tiny_model
from tests.marks import slow

LENGTHS = 70, 1, 2, 33, 100
BOUND = 1e-5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Logits exist for 16 tokens at a time, so that a chunk has several such parts."""
    monkeypatch.setattr("mjax.infer.sample._LOGITS", 16 * VOCAB)


@functools.cache
def model(kind: str) -> Pretrained:
    return tiny_model(kind, initializer_range=0.1)


@functools.cache
def engine(kind: str, chunk: int = 32) -> Engine:
    """An engine that keeps its few programs from test to test."""
    return with_few_programs(tiny_engine(model(kind), chunk=chunk))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def asks(most: list[int]) -> list[tuple[list[int], SamplingParams]]:
    return [
        (prompt, SamplingParams(max_tokens=1, prompt_logprobs=k))
        for prompt, k in zip(prompts(), most, strict=True)
    ]


@functools.cache
def trained(kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(scores of training's head, log-probabilities of all tokens) for each prompt."""
    given, found = model(kind), []
    rows = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, prompt in zip(rows, prompts(), strict=True):
        row[: len(prompt)] = prompt
    labels = jnp.roll(jnp.asarray(rows), -1, 1)
    scores = given.token_log_probs(given.params, jnp.asarray(rows), labels)
    whole = jax.nn.log_softmax(given.model(jnp.asarray(rows)), -1)
    for number, length in enumerate(LENGTHS):
        places = number, slice(length - 1)
        found.append((np.asarray(scores[places]), np.asarray(whole[places])))
    return found


def assert_trained(kind: str, requests: list[Request]) -> None:
    for request, (scores, whole) in zip(requests, trained(kind), strict=True):
        first, *rest = request.output.prompt_logprobs
        assert first is None and len(rest) == len(request.output.prompt_token_ids) - 1
        wanted = request.params.prompt_logprobs
        labels = request.output.prompt_token_ids[1:]
        for found, label, score, row in zip(rest, labels, scores, whole, strict=True):
            assert found[label] == pytest.approx(float(score), abs=BOUND)
            best = np.sort(row)[::-1][:wanted]
            np.testing.assert_allclose(list(found.values())[:wanted], best, rtol=0, atol=BOUND)
            assert all(row[id] == pytest.approx(value, abs=BOUND) for id, value in found.items())
            assert wanted <= len(found) <= wanted + 1


@slow
@pytest.mark.parametrize(
    "kind", ["keys and values", *(pytest.param(k, marks=slow) for k in ("latent", "experts"))]
)
@pytest.mark.parametrize("chunk", [32, pytest.param(16, marks=slow), pytest.param(128, marks=slow)])
def test_scores_are_those_of_training(kind, chunk):
    given = engine(kind, chunk)
    assert_trained(kind, served(given, asks([0] * 5)))
    assert_trained(kind, served(given, asks([3, 0, 1, 20, 2])))  # again: caches have every prefix
    alone = [served(given, [ask])[0] for ask in asks([0] * 5)]
    assert_trained(kind, alone)


@slow
def test_recurrent_layers_and_lanes_score_as_training_does():
    assert_trained("mamba", served(engine("mamba"), asks([0] * 5)))
    given = tiny_engine(model("keys and values"), {"dp": 2, "tp": 2})
    assert_trained("keys and values", served(given, asks([2] * 5)))


def test_samples_beside_are_those_without_scores():
    given = engine("keys and values")
    options = {"n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 2}
    prompt = prompts()[3]
    [plain] = served(given, [(prompt, SamplingParams(**options))])
    [scored] = served(given, [(prompt, SamplingParams(**options, prompt_logprobs=0))])
    for one, other in zip(plain.output.outputs, scored.output.outputs, strict=True):
        assert one.token_ids == other.token_ids
    assert scored.samples[0].sequence.hits == 0 and plain.output.prompt_logprobs is None
