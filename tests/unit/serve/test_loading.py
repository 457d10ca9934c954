"""Commands that change a served model: adapters, other weights, embeddings."""

import asyncio
import base64
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from mjax.checkpoint.base.source import array_source
from mjax.data.multimodal.pictures import packed_prompt, patches_of_picture
from mjax.errors import UserError
from mjax.infer.llm import LLM
from mjax.infer.records import WarmPrograms
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Draws, RowRules, draws_of
from mjax.interop.huggingface.families.engine import config_from_hf, config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.pretrained import Pretrained
from mjax.models import build, definition_of, split
from mjax.models.base.context import Context, tokens_of
from mjax.serve.api.images import expanded_ids, images_of
from mjax.serve.base.engines import Engines
from mjax.serve.engine_server import in_thread
from mjax.serve.loading import _USUAL, ServedModel
from mjax.serve.options import ServeOptions
from mjax.serve.protocol.chat_request import Message, MessagePart
from mjax.serve.protocol.completion_request import CompletionRequest
from mjax.serve.protocol.errors import ApiError
from tests.adapters import drawn_adapters
from tests.laws.serving.tiny import tiny_model
from tests.marks import exhaustive, slow
from tests.unit.infer.test_whole_prompts import encoder_decoder, llava, qwen_vl

SIZES = {"tokenizer": "byte", "max_num_seqs": 2, "max_num_prefill_tokens": 16}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
PARAMS = SamplingParams(max_tokens=5, logprobs=0)


def written(model: Pretrained, folder: Path) -> Path:
    cfg, specs = model.cfg, model.definition.specs
    config = {"config.json": json.dumps(config_to_hf(cfg)).encode()}
    read = array_source(cfg, model.params).read
    export(read, cfg, specs, slots(cfg, specs), folder, "float32", extras=config)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a model, base/, another of its kind, other/, and adapters, one/ and two/."""
    home, model = tmp_path_factory.mktemp("loading"), tiny_model("keys and values", vocab_size=260)
    written(model, home / "base")
    params = jax.tree.map(lambda p: 1.2 * p, model.params)
    written(Pretrained(model.cfg, model.definition, params, None, None), home / "other")
    for rank, name in enumerate(("one", "two"), 2):
        drawn = drawn_adapters(model.definition.specs, rank=rank, scale=float(rank))
        write_adapter(home / name, model.cfg, model.definition.specs, drawn)
    return home


def run(model: ServedModel, function):
    """The result of an asynchronous function of the model's engines."""

    async def serve(address):
        async with Engines([address]) as engines:
            await engines.ready()
            return await function(engines)

    with in_thread(model.engine, model.facts, model.add_commands) as server:
        return asyncio.run(asyncio.wait_for(serve(server.address), 120))


async def logprobs(engines: Engines, adapter: str | None = None) -> list[float]:
    params = PARAMS.model_copy(update={"adapter": adapter})
    stream = engines.generate([7, 8, 9], params, request_id="x")
    return [value async for piece in stream for value in piece.logprobs]


def wanted(folder: Path, adapters: dict[str, Path]) -> dict[str | None, list[float]]:
    """What a model says without an adapter and with each of some, as it is loaded with them."""
    llm = LLM(folder, adapters=adapters, **SIZES)
    names = [None, *adapters]
    params = [PARAMS.model_copy(update={"adapter": name}) for name in names]
    outputs = llm.generate([[7, 8, 9]] * len(names), params)
    return {n: o.outputs[0].logprobs for n, o in zip(names, outputs, strict=True)}


@slow
def test_random_weights_need_a_config_alone(home, tmp_path):
    """And are of one model whatever the devices."""
    (tmp_path / "config.json").write_bytes((home / "base" / "config.json").read_bytes())
    with pytest.raises(UserError, match="safetensors"):
        LLM(tmp_path, **SIZES)
    with pytest.raises(UserError, match="max_model_len=9999: the model has .* positions"):
        LLM(tmp_path, load_format="dummy", max_model_len=9999, **SIZES)
    with pytest.raises(UserError, match="load_format='none': give auto or dummy"):
        LLM(tmp_path, load_format="none", **SIZES)
    one, two = (
        LLM(tmp_path, load_format="dummy", tensor_parallel_size=tp, **SIZES).engine.runner.params
        for tp in (1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert min(np.std(np.asarray(array)) for array in one["dense"]["attention"]["kv"]) > 0.01
    model = tmp_path / "model.yaml"
    model.write_text("data: {mock: true}\nmodel: {num_hidden_layers: 1, hidden_size: 32}")
    with pytest.raises(UserError, match="a config file has no weights; --load-format dummy"):
        LLM(model, **SIZES)
    options = ServeOptions(str(model), "m", engine={"load_format": "dummy", **SIZES}, warm_up=False)
    served = ServedModel(options)
    assert served.engine.cfg.hidden_size == 32 and served.facts.vocab_size == 256


@slow
def test_adapters_and_weights_change_while_a_model_is_served(home):
    engine = {**SIZES, "max_loras": 1, "max_lora_rank": 3}
    options = ServeOptions(str(home / "base"), "base", engine=engine, warm_up=False)
    model = ServedModel(options)

    async def serve(engines):
        found = {"plain": await logprobs(engines)}
        compiled = len(model.engine.runner.compiled)
        for name in ("one", "two"):
            await engines.command("load_adapter", name=name, path=str(home / name))
            assert engines.facts.adapters == (name,)
            found[name] = await logprobs(engines, name)
            with pytest.raises(UserError, match="all 1 slots"):
                await engines.command("load_adapter", name="c", path=str(home / "one"))
            with pytest.raises(UserError, match="there already"):
                await engines.command("load_adapter", name=name, path=str(home / "one"))
            if name == "one":
                await engines.command("unload_adapter", name=name)
                with pytest.raises(UserError, match="adapter=one"):
                    await logprobs(engines, name)
        assert await logprobs(engines) == found["plain"]
        said = await engines.command("reload", path=str(home / "other"))
        assert said == {"version": 1}
        found |= {"other": await logprobs(engines), "two of other": await logprobs(engines, "two")}
        assert len(model.engine.runner.compiled) == compiled
        for name, given in (
            ("reload", {"path": str(home / "none")}),
            ("reload", {"path": str(home / "one")}),
            ("load_adapter", {"name": "x", "path": str(home / "none")}),
            ("unload_adapter", {"name": "x"}),
        ):
            with pytest.raises(UserError):
                await engines.command(name, **given)
        assert await logprobs(engines) == found["other"]
        return found

    found = run(model, serve)
    folders = {name: home / name for name in ("one", "two")}
    of_base, of_other = (wanted(home / folder, folders) for folder in ("base", "other"))
    own = {"plain": of_base[None], "one": of_base["one"], "two": of_base["two"]}
    own |= {"other": of_other[None], "two of other": of_other["two"]}
    for name, values in own.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5)
    assert not np.allclose(found["other"], found["plain"], atol=1e-2)


@slow
def test_embeddings_of_a_decoder_and_of_an_encoder(home, tmp_path):
    cfg = config_from_hf(BERT)
    encoder = Pretrained(cfg, definition_of(cfg), split(build(cfg, nnx.Rngs(0)))[1], None, None)
    decoder = tiny_model("keys and values", vocab_size=260)
    folders = {written(encoder, tmp_path / "encoder"): encoder, home / "base": decoder}
    texts = [[1, 2, 3], [4, 5, 6]]
    for folder, plain in folders.items():
        options = ServeOptions(str(folder), "m", engine=SIZES, warm_up=False)
        served = ServedModel(options)

        async def serve(engines):
            with pytest.raises(UserError, match="pooling=max"):
                await engines.embed(texts, "max")
            if engines.facts.is_encoder:
                with pytest.raises(UserError, match="continues no text"):
                    await logprobs(engines)
            return await engines.embed(texts, "mean"), (await engines.stats())[0]["pages"]

        found, _ = run(served, serve)
        ids = jax.numpy.array(texts)
        x, _, _ = plain.model.hidden(ids, tokens_of(ids.shape), Context())
        np.testing.assert_allclose(found, x.mean(1), rtol=0, atol=1e-5)


@exhaustive
@pytest.mark.parametrize("make", [llava, encoder_decoder])
def test_prompts_with_images_and_those_that_an_encoder_reads(make, tmp_path, monkeypatch):
    (definition, params, cfg), prompts, items = make()
    loaded = Pretrained(cfg, definition, params, None, None)
    monkeypatch.setattr("mjax.serve.loading.config_in", lambda path: loaded.cfg)
    monkeypatch.setattr("mjax.interop.random_weights.from_pretrained", lambda path, **named: loaded)
    sizes = {**SIZES, "max_num_prefill_tokens": 64, "dtype": "float32"}
    model = ServedModel(ServeOptions(str(tmp_path), "m", engine=sizes, warm_up=False))
    wanted = []
    for prompt, given in zip(prompts, items, strict=True):
        request = model.engine.add(prompt, PARAMS, items=given)
        while model.engine.has_work:
            model.engine.step()
        wanted.append(request.output.outputs[0].token_ids)

    async def serve(engines):
        found = []
        for prompt, given in zip(prompts, items, strict=True):
            images = [] if given is None else [*given["vision"]]
            named = {"request_id": "x", "images": images}
            pieces = [piece async for piece in engines.generate(prompt, PARAMS, **named)]
            found.append([token for piece in pieces for token in piece.token_ids])
        with pytest.raises(UserError, match="no tower|are given"):
            wrong = 257 if make is llava else 9
            named = {"request_id": "y", "images": [np.zeros((8, 8, 3), np.float32)]}
            await anext(engines.generate([1, wrong], PARAMS, **named))
        if engines.facts.reads_source:
            with pytest.raises(UserError, match="no embeddings"):
                await engines.embed([[1]], "mean")
        return found, engines.facts

    found, facts = run(model, serve)
    assert found == wanted
    assert facts.has_images == (make is llava) == (facts.image is not None)
    if make is llava:
        assert (len(facts.image.tokens), facts.image.side, facts.image.channels) == (4, 8, 3)


@exhaustive
def test_messages_with_pictures_of_any_size_say_what_the_engine_says(tmp_path, monkeypatch):
    """By a template that writes the token of an image itself, as Qwen's do."""
    (definition, params, cfg), _, _ = qwen_vl()
    loaded = Pretrained(cfg, definition, params, None, None)
    monkeypatch.setattr("mjax.serve.loading.config_in", lambda path: loaded.cfg)
    monkeypatch.setattr("mjax.interop.random_weights.from_pretrained", lambda path, **named: loaded)
    sizes = {**SIZES, "max_num_prefill_tokens": 64, "dtype": "float32"}
    model = ServedModel(ServeOptions(str(tmp_path), "m", engine=sizes, warm_up=False))
    files, rng = [], np.random.default_rng(1)
    for size in ((9, 20, 3), (24, 8, 3)):
        files.append(io.BytesIO())
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(files[-1], "PNG")
    encoded = [file.getvalue() for file in files]
    vision, before = cfg.vision, [5, cfg.vision.image_token_id, 3, cfg.vision.image_token_id, 9]
    image = model.facts.image
    cut = [patches_of_picture(each, vision, image.mean, image.std) for each in encoded]
    prompt, packed = packed_prompt(before, cut, vision)
    request = model.engine.add(prompt, PARAMS, items={"vision": packed})
    while model.engine.has_work:
        model.engine.step()
    urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in encoded]
    parts = [MessagePart(type="image_url", image_url=url) for url in urls]
    pixels = images_of(image, [Message(role="user", content=parts)])
    ids = expanded_ids(lambda text: [1], "no mark", before, image, pixels)
    assert ids == prompt
    with pytest.raises(ApiError, match="stands for an image"):
        expanded_ids(lambda text: [1], "no mark", before, image, pixels[:1])

    async def serve(engines):
        for wrong in (pixels[::-1], pixels[:1], [pixels[0]] * 9):  # other sizes, numbers, too many
            with pytest.raises(UserError, match="that stand for|patches"):
                await anext(engines.generate(ids, PARAMS, request_id="y", images=wrong))
        stream = engines.generate(ids, PARAMS, request_id="x", images=pixels)
        return [token async for piece in stream for token in piece.token_ids]

    assert run(model, serve) == request.output.outputs[0].token_ids


@pytest.mark.parametrize(
    "given, drawn",
    [
        ({"temperature": 0.0}, Draws()),
        ({}, Draws(random=True)),
        ({"top_p": 0.9}, Draws(random=True, limited=True)),
    ],
)
def test_a_request_computes_the_draws_that_it_needs_alone(given, drawn):
    """On a GPU; thresholds of top-p took 18 % of a step of 256 rows that had none."""
    params = CompletionRequest(prompt="a", **given).params(SamplingParams())
    warm, wanted = WarmPrograms(_USUAL[2], all_rules=True), draws_of([params.sampling])
    assert warm.choose(wanted, RowRules(), 256, 128_000, 1) == (drawn, RowRules())
