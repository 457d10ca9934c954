"""Law: each request has the numbers of the model with its own adapter, whatever runs beside it."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.infer.llm import LLM
from mjax.infer.requests import RequestOutput, SamplingParams
from mjax.interop.adapter_stack import with_stack
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.pretrained import Pretrained
from mjax.models.base.context import Context, tokens_of
from tests.adapters import drawn_adapters
from tests.laws.serving.kinds import VOCAB, with_few_programs
from tests.laws.serving.tiny import served, tiny_engine, tiny_model, write_hugging_face
from tests.marks import slow

NAMES = "one", "two"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a Hugging Face model base/ and two adapters of other ranks, one/ and two/."""
    home, plain = tmp_path_factory.mktemp("adapters"), tiny_model("keys and values")
    cfg, specs = plain.cfg, plain.definition.specs
    write_hugging_face(plain, home / "base")
    for rank, name in enumerate(NAMES, 2):
        drawn = drawn_adapters(specs, rank=rank, scale=float(rank))
        write_adapter(home / name, cfg, specs, drawn)
    return home


@pytest.fixture(scope="module")
def model(home) -> Pretrained:
    return with_stack(tiny_model("keys and values"), [home / name for name in NAMES])


def assert_of_adapter(model: Pretrained, output: RequestOutput, slot: int) -> None:
    """The log-probabilities of a prompt and its new tokens are those of a plain forward."""
    made = output.outputs[0]
    prompt = output.prompt_token_ids
    ids = jnp.array([prompt + made.token_ids])
    info = replace(tokens_of(ids.shape), adapters=jnp.array([slot]))
    x, _, _ = model.model.hidden(ids, info, Context())
    of_all = np.asarray(jax.nn.log_softmax(model.model.logits(x)[0]))
    wanted = [row[token] for row, token in zip(of_all, ids[0, 1:].tolist(), strict=False)]
    scores = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    found = [of_token[id] for of_token, id in scores] + made.logprobs
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def kept(model):
    """Makes an engine for all tests, within the first one, where pages are small."""
    return functools.cache(lambda: with_few_programs(tiny_engine(model, adapters=NAMES)))


@pytest.fixture
def given(kept) -> Engine:
    return kept()


def check(model: Pretrained, given: Engine) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (40, 5, 40, 33)]
    adapters = ["one", None, "two", "two"]
    asks = [
        (prompt, SamplingParams(max_tokens=8, adapter=name, prompt_logprobs=0))
        for prompt, name in zip(prompts, adapters, strict=True)
    ]
    for request in served(given, asks):
        slot = given.adapters.get(request.params.adapter, 0)
        assert_of_adapter(model, request.output, slot)


@slow
def test_rows_of_a_step_have_adapters_of_their_own(model, given):
    check(model, given)
    with pytest.raises(UserError, match="adapter=three is not among .*: one, two"):
        given.add([1], SamplingParams(adapter="three"))


@slow
def test_adapters_share_no_prefix(given):
    prompt = np.random.default_rng(1).integers(0, VOCAB, 80).tolist()
    hits = []
    for name in ("one", "two", None, "two", "one"):
        [request] = served(given, [(prompt, SamplingParams(max_tokens=1, adapter=name))])
        hits.append(request.output.num_cached_tokens > 0)
    assert hits == [False, False, False, True, True]


@slow
@pytest.mark.parametrize("tp", [1, 2])
def test_llm_takes_folders_of_adapters(tp, home, model):
    llm = LLM(
        home / "base",
        adapters={name: home / name for name in NAMES},
        tensor_parallel_size=tp,
        num_speculative_tokens=2,
        max_num_seqs=2,
        max_num_prefill_tokens=32,
    )
    params = [
        SamplingParams(max_tokens=8, adapter=name, prompt_logprobs=0) for name in (*NAMES, None)
    ]
    for slot, output in zip((1, 2, 0), llm.generate([[7, 8, 9]] * 3, params), strict=True):
        assert_of_adapter(model, output, slot)


@slow
def test_drafts_know_the_adapter_of_their_row(model):
    check(model, tiny_engine(model, adapters=NAMES, drafts=3))
