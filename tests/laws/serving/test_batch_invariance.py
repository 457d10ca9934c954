"""Law: with `batch_invariant` a request's log-probs have the same bits in any company.

Neither what runs beside it, when it comes, nor which of its pages were cached changes a bit.
"""

import numpy as np
import pytest

from mjax.infer.requests import SamplingParams
from tests.laws.serving.kinds import VOCAB
from tests.laws.serving.tiny import served, tiny_engine, tiny_model
from tests.marks import quick, slow

RNG = np.random.default_rng(3)
SHARED = RNG.integers(0, VOCAB, 70).tolist()
ASKS = [
    (SHARED + RNG.integers(0, VOCAB, 9).tolist(), SamplingParams(max_tokens=20)),
    (RNG.integers(0, VOCAB, 31).tolist(), SamplingParams(max_tokens=9, temperature=1.0, seed=1)),
    (SHARED + RNG.integers(0, VOCAB, 20).tolist(), SamplingParams(max_tokens=12)),
    (RNG.integers(0, VOCAB, 3).tolist(), SamplingParams(max_tokens=30, temperature=0.8, seed=2)),
    ([5, 6], SamplingParams(max_tokens=25, repetition_penalty=1.3, logprobs=3)),
    ([7, 8, 9], SamplingParams(max_tokens=15, logit_bias={3: -2.0, 4: 1.5})),
    ([9], SamplingParams(max_tokens=7, allowed_token_ids=[1, 2, 3, 5, 8, 13])),
]


def bits(request) -> list[bytes]:
    output = request.output.outputs[0]
    return [np.array(output.token_ids), np.array(output.logprobs, np.float32).tobytes()]


@pytest.mark.parametrize("kind", quick(["keys and values", "latent", "experts", "mamba"], 0))
def test_bits_do_not_depend_on_company(kind):
    given = tiny_engine(tiny_model(kind), batch_invariant=True)
    programs = given.warm_up()  # layers of decoding and of prefill, and draws of their rows
    assert programs == (4 if kind == "mamba" else 3)  # prompts with states come one at a time
    alone = [bits(served(given, [ask])[0]) for ask in ASKS]  # the third finds pages of the first
    given.lanes[0].pool.forget()
    together = [bits(request) for request in served(given, ASKS[::-1])][::-1]
    for (ids, logprobs), (wanted, wanted_logprobs) in zip(together, alone, strict=True):
        assert ids.tolist() == wanted.tolist()
        assert logprobs == wanted_logprobs
    given.sleep()
    given.wake()
    assert bits(served(given, ASKS[-1:])[0])[1] == alone[-1][1]
    assert len(given.runner.compiled) == programs


@slow
def test_a_text_begins_when_it_can_end():
    model = tiny_model("keys and values")
    given = tiny_engine(model, batch_invariant=True, pages=8)  # each needs six
    first, second = (given.add([1, 2], SamplingParams(max_tokens=90)) for _ in range(2))
    while given.has_work:
        given.step()
        assert len(given.lanes[0].running) <= 1
    for request in (first, second):
        assert request.samples[0].sequence.admissions == 1
        assert request.output.outputs[0].finish_reason == "length"
