"""Law: layers in stages over pp make the tokens of one device, whatever happens around them.

Parts of a step are small here, so that several are under way at a time.
"""

import jax
import pytest

from mjax.errors import UserError
from mjax.infer.llm import LLM
from mjax.infer.requests import SamplingParams
from mjax.infer.stages import layers_in_stages
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.sharding.mesh import tensor_parallel_mesh
from tests.adapters import drawn_adapters
from tests.laws.serving.kinds import (
    LENGTH,
    Ask,
    assert_greedy,
    at_rest,
    emptied,
    engine,
    make_engine,
    model,
    preemptions,
    requested,
    served,
    tokens_of,
)
from tests.laws.serving.test_same_tokens import ASKS, PROMPTS
from tests.laws.serving.tiny import tiny_engine, tiny_model, write_hugging_face
from tests.marks import exhaustive, quick, slow

CASES = [
    ("windows in turn", {"pp": 2}),  # both kinds in one slot
    ("hybrid of five", {"pp": 4}),
    ("five windows in turn", {"pp": 4, "tp": 2}),
    ("latent experts", {"pp": 2, "tp": 2}),
    ("experts", {"pp": 2, "ep": 2, "tp": 2}),
    ("keys and values", {"dp": 2, "pp": 2, "tp": 2}),
    ("three layers", {"pp": 2}),
    ("mamba", {"pp": 2, "tp": 2}),
    ("deltanet", {"pp": 2}),
    ("sinks", {"pp": 2, "cp": 2}),
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(layers_in_stages, "LEAST_ROWS", 1)
    monkeypatch.setattr(layers_in_stages, "LEAST_TOKENS", 8)


@pytest.mark.parametrize("kind, mesh", quick(CASES))
def test_stages_give_the_plain_forwards_tokens(kind, mesh):
    given = engine(kind, mesh)
    lanes = len(given.lanes)
    late = [Ask(ask.prompt, ask.params, 3 * i) for i, ask in enumerate(ASKS)]
    for asks, chunk, pages in ((ASKS, 64, 40), (ASKS[::-1], 8, 40), (late * lanes, 64, 9)):
        emptied(given, chunk, pages)
        requests = requested(given, asks)
        assert_greedy(kind, [request.output for request in requests])
        assert (preemptions(requests) > 0) == (pages == 9)
    emptied(given)
    assert_greedy(kind, served(given, ASKS[1:2]))  # one request is fewer than stages
    again = [served(given, [ASKS[0]] * 2 * lanes) for _ in range(3)][-1]
    assert {output.num_cached_tokens for output in again} == {48}
    assert_greedy(kind, again)
    changes(kind, given)


def changes(kind, given):
    """Requests leave, weights change, caches come and go; no new program is compiled."""
    compiled = len(given.runner.compiled)
    beside = given.add(PROMPTS[0], SamplingParams(max_tokens=30))
    for state in range(4):
        leaving = given.add(PROMPTS[4], SamplingParams(max_tokens=40))
        for _ in range(state):
            given.step()
        given.abort(leaving.output.request_id)
    while given.has_work:
        given.step()
    at_rest(given)
    assert_greedy(kind, [beside.output])
    others = jax.tree.map(lambda x: 0.9 * x, model(kind).params)  # on one device
    given.update_weights(others)
    assert_greedy(kind, served(given, ASKS[:3]), others)
    given.sleep(weights=True)
    given.wake()
    given.update_weights(model(kind).params)
    assert_greedy(kind, served(given, ASKS[:3]))
    assert len(given.runner.compiled) == compiled


def bytes_on(device, arrays) -> int:
    shards = [shard for array in jax.tree.leaves(arrays) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_a_device_holds_weights_and_pages_of_its_stage_alone():
    given = engine("windows in turn", {"pp": 2})
    params = model("windows in turn").params
    names = given.runner._layout.stacks
    whole = sum(leaf.nbytes for name in names for leaf in jax.tree.leaves(params[name]))
    for device in jax.devices()[:2]:
        assert bytes_on(device, {name: given.runner.params[name] for name in names}) == whole / 2
    given.runner._take_state()
    caches = given.runner._state.caches
    alone = engine("windows in turn").programs.bytes_of_caches()
    assert bytes_on(jax.devices()[0], caches) == given.programs.bytes_of_caches() == alone / 2


def test_what_stages_lack_is_refused():
    with pytest.raises(UserError, match=r"4 stages .*has 2 layers"):
        make_engine("keys and values", {"pp": 4})
    for sizes in ((0, 1), (1, 0), (3, 3), (-2, -2)):
        with pytest.raises(UserError, match="some: there are 8 devices"):
            tensor_parallel_mesh(sizes[0], "some", sizes[1])


@slow
def test_drafters_without_a_stage_are_refused():
    predicts = tiny_model("keys and values", num_nextn_predict_layers=1)
    with pytest.raises(UserError, match="mtp with pp or pipeline_parallel_size"):
        tiny_engine(predicts, {"pp": 2}, drafts=1, drafter="mtp")


HOT = {"max_tokens": 30, "temperature": 0.9, "n": 2, "logprobs": 3, "presence_penalty": 0.5}


OPTIONS = [{"drafts": 2, "weight_dtype": "fp8", "cache_dtype": "fp8"}, {"batch_invariant": True}]


@exhaustive
@pytest.mark.parametrize("options", quick(OPTIONS))
def test_samples_are_those_of_one_device(options):
    asks = [Ask(prompt, SamplingParams(seed=i, **HOT)) for i, prompt in enumerate(PROMPTS)]
    asks.append(Ask(PROMPTS[0], SamplingParams(max_tokens=5, prompt_logprobs=2)))
    found = served(make_engine("three layers", {"pp": 2}, **options), asks)
    wanted = served(make_engine("three layers", **options), asks)
    assert tokens_of(found) == tokens_of(wanted)
    pairs = zip(found[-1].prompt_logprobs[1:], wanted[-1].prompt_logprobs[1:], strict=True)
    for one, other in pairs:
        assert one == pytest.approx(other, abs=1e-4)


@exhaustive
def test_llm_loads_each_stage(tmp_path):
    """A layer count that stages do not divide, from a Hugging Face folder, with an adapter."""
    plain = tiny_model("keys and values", num_hidden_layers=3)
    folder, specs = write_hugging_face(plain, tmp_path / "base"), plain.definition.specs
    write_adapter(tmp_path / "one", plain.cfg, specs, drawn_adapters(specs, rank=2))
    options = {"max_num_seqs": 2, "max_num_prefill_tokens": 32, "max_model_len": LENGTH}
    options |= {"adapters": {"one": tmp_path / "one"}, "max_loras": 2, "max_lora_rank": 2}
    params = [SamplingParams(max_tokens=8, adapter=name) for name in ("one", None, "one")]
    wanted = LLM(folder, **options).generate(PROMPTS[:3], params)
    llm = LLM(folder, pipeline_parallel_size=2, tensor_parallel_size=2, **options)
    assert tokens_of(llm.generate(PROMPTS[:3], params)) == tokens_of(wanted)
