"""Oracle: the sampling rules equal the processors of `transformers`, one by one and chained.

One order differs: theirs adds biases and forbids tokens in the order of its list, ours forbids
last. No test here depends on it, as forbidden logits are minus infinity either way.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from mjax.infer.records import row_rules
from mjax.infer.requests import Answer, SamplingParams, TokenRules
from mjax.infer.sample import Sampling, TokenCounts, biased, forbidden, penalized, settings_of
from mjax.infer.sampling.limits import within_limits

ROWS, VOCAB = 16, 211
CASES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 9},
    "top_k_beyond": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-4},
    "min_p": {"min_p": 0.07},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "chain": {
        "repetition_penalty": 1.2,
        "temperature": 1.4,
        "top_k": 40,
        "top_p": 0.8,
        "min_p": 0.02,
    },
}
PROCESSORS = {  # in the order in which `generate` runs them
    "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
    "temperature": theirs.TemperatureLogitsWarper,
    "top_k": theirs.TopKLogitsWarper,
    "top_p": theirs.TopPLogitsWarper,
    "min_p": theirs.MinPLogitsWarper,
}


@pytest.mark.parametrize("case", CASES)
def test_limits_equal_transformers(case):
    rng = np.random.default_rng(len(case))
    logits = (3 * rng.normal(size=(ROWS, VOCAB))).astype(np.float32)
    text = rng.integers(0, VOCAB, (ROWS, 30))
    expected = torch.tensor(logits)
    for name, make in PROCESSORS.items():
        if name in CASES[case]:
            expected = make(CASES[case][name])(torch.tensor(text), expected)
    settings = settings_of([Sampling(**{"temperature": 1.0, **CASES[case]})] * ROWS)
    seen = np.zeros((ROWS, VOCAB), bool)
    seen[np.arange(ROWS)[:, None], text] = True
    z = penalized(jnp.asarray(logits), TokenCounts(seen, 0 * jnp.asarray(text)[:, :1]), settings)
    temperature = settings["temperature"][:, None]
    stays = within_limits(z, temperature, settings)
    ours = jnp.where(stays, z / temperature, -jnp.inf)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected.numpy()))
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5)
    left = np.isfinite(ours).sum()
    assert left < ROWS * VOCAB or not {"top_k", "top_p", "min_p", "chain"} & {case}


def test_biases_bad_words_and_least_lengths_equal_transformers():
    """Bad words and lengths look at what was made, so theirs read that without a prompt."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(ROWS, VOCAB))).astype(np.float32)
    made = rng.integers(0, 4, (ROWS, 12))
    bias, ends = {5: 1.5, 200: -30.0, 0: 4.0}, [7, 9]
    words = [(1, 2), (3,), (0, 1, 2), (2, 2, 1, 3), (50, 51)]
    params = SamplingParams(min_tokens=13, max_tokens=99)
    rules = TokenRules(frozenset(ends), bias, None, tuple(words))
    answers = [Answer(params, rules, None, [4]) for _ in range(ROWS)]
    for answer, row in zip(answers, made.tolist(), strict=True):
        for token in row:
            answer.push(token)
    found = row_rules(answers, [0] * ROWS, VOCAB)
    ours = np.asarray(forbidden(biased(jnp.asarray(logits), found), found))
    text, expected = torch.tensor(made), torch.tensor(logits)
    for processor in (
        theirs.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        theirs.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None),
        theirs.MinNewTokensLengthLogitsProcessor(0, 13, ends, device="cpu"),
    ):
        expected = processor(text, expected)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected.numpy()))
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)
    assert np.isneginf(ours[:, [3, 7, 9]]).all() and np.isneginf(ours[:, 2]).any()
