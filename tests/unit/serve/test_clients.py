"""Published clients work with the server as with OpenAI's: lm-eval, LangChain, LiteLLM.

Each test is skipped where its client is not installed.
"""

import asyncio
import importlib.util
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flax import nnx

from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.infer.engine import Engine
from mjax.infer.sample import Draws
from mjax.infer.scheduling.scheduler import Limits
from mjax.interop.pretrained import Pretrained
from mjax.models import build, split
from mjax.serve.base.engines import Piece
from tests.chats import END, write_tokenizer
from tests.laws.serving.kinds import BYTES, LENGTH, SMALL, model
from tests.marks import exhaustive, slow
from tests.unit.serve.conftest import TEMPLATE, behind_socket, served

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Bonn", "Rom"]}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
PLACES = [{"place": "Bonn", "days": 1}, {"place": "Rom", "days": 2}]
REPLY = "Let me see.\n" + "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(place)}}}\n</tool_call>'
    for place in PLACES
)
PAIRS = [
    ("The cat", " sat"),
    ("The cat ", "sat on it"),
    ("", "alone"),
    ("A long context, of which much is seen. " * 2, "yes"),
    ("One", "x" * 30),
]


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"needs {name}")


@pytest.fixture
def calls_tools(live, monkeypatch):
    """Make the engine answer with two calls, four letters at a time."""

    async def generate(prompt, params, **_):
        for at in range(0, len(REPLY), 4):
            reason = "stop" if at + 4 >= len(REPLY) else None
            yield Piece(0, REPLY[at : at + 4], [at], [-1.0], None, [0], reason)
            await asyncio.sleep(0)

    monkeypatch.setattr(live.engines, "generate", generate)


@slow
@needs("lm_eval")
@pytest.mark.parametrize("batch, concurrent", [(1, 1), (3, 2)])
def test_lm_eval_finds_the_scores_of_our_own_harness(live, batch, concurrent):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from mjax.evaluate.harness import HarnessModel

    tiny, folder = model("bytes"), Path(live.engine.folder)
    pretrained = Pretrained(tiny.cfg, tiny.definition, tiny.params, None, folder)
    own = HarnessModel(pretrained, load_tokenizer(folder), batch_size=3, max_length=LENGTH - 1)
    theirs = LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions",
        model="tiny",
        max_length=LENGTH,
        batch_size=batch,
        num_concurrent=concurrent,
        custom_prefix_token_id=live.engine.eos[0],  # ours takes no BOS that the model does not get
    )
    assert theirs.tokenizer_backend == "remote"

    def asked(kind: str, *given: tuple) -> list:
        return [Instance(kind, {}, args, n, ("tiny", n, 1)) for n, args in enumerate(given)]

    def scores(adapter, kind: str, *given: tuple) -> list:
        return getattr(adapter, kind)(asked(kind, *given))

    found, expected = (scores(each, "loglikelihood", *PAIRS) for each in (theirs, own))
    assert [total for total, _ in found] == pytest.approx([s for s, _ in expected], abs=2e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = [("A text that is scored whole.",), ("Another one.",)]
    found, expected = (scores(each, "loglikelihood_rolling", *texts) for each in (theirs, own))
    assert found == pytest.approx(expected, abs=2e-3)
    settings = {"until": ["q"], "max_gen_toks": 12}
    given = [("The cat", dict(settings)), ("One", dict(settings))]
    found, expected = (scores(each, "generate_until", *given) for each in (theirs, own))
    assert found == expected


@slow
@needs("langchain_openai")
def test_langchain_streams_calls_and_usage(live, calls_tools):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{live.url}/v1", api_key="none", model="tiny", stream_usage=True)
    bound = chat.bind_tools([WEATHER])
    whole = bound.invoke("Weather?")
    assert whole.content == "Let me see." and [c["args"] for c in whole.tool_calls] == PLACES
    pieces = [*bound.stream("Weather?")]
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert len(pieces) > 20 and total.content == "Let me see."
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [
        ("weather", place) for place in PLACES
    ]
    assert len({call["id"] for call in total.tool_calls}) == 2
    assert total.usage_metadata["input_tokens"] > 0 < total.usage_metadata["output_tokens"]


@slow
@needs("langchain_openai")
def test_langchain_gets_forms_and_embeddings(live, monkeypatch):
    pytest.importorskip("llguidance")
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    given = {"base_url": f"{live.url}/v1", "api_key": "none", "model": "tiny"}
    chat = ChatOpenAI(**given, max_tokens=80, temperature=1.0, seed=1)
    schema = WEATHER["function"]["parameters"] | {"title": "Weather"}
    for method in ("json_schema", "function_calling"):
        made = chat.with_structured_output(schema, method=method).invoke("Weather?")
        assert made["place"] in ("Bonn", "Rom") and made["days"] in (1, 2)
    (call,) = chat.bind_tools([WEATHER], tool_choice="weather").invoke("Weather?").tool_calls
    assert call["name"] == "weather" and call["args"]["days"] in (1, 2)

    async def embed(prompts, pooling, adapter):
        return np.array([[3.0, 4.0 * len(prompt)] for prompt in prompts], np.float32)

    monkeypatch.setattr(live.engines, "embed", embed)
    vectors = OpenAIEmbeddings(**given, check_embedding_ctx_length=False).embed_documents(["a"])
    assert vectors[0] == pytest.approx([0.6, 0.8])


@slow
@needs("litellm")
def test_litellm_streams_calls_and_texts(live, monkeypatch, request):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    import litellm

    given = {"model": "openai/tiny", "api_base": f"{live.url}/v1", "api_key": "none"}
    ask = {"messages": [{"role": "user", "content": "Hi."}], "seed": 5, "max_tokens": 12}
    whole = litellm.completion(**given, **ask)
    said = litellm.completion(**given, **ask, stream=True, stream_options={"include_usage": True})
    chunks = [*said]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage.completion_tokens > 0
    ask = {"prompt": "Once", "seed": 5, "max_tokens": 8, "temperature": 0}
    made = litellm.text_completion(**given | {"model": "text-completion-openai/tiny"}, **ask)
    assert made.usage.completion_tokens == 8 and isinstance(made.choices[0].text, str)
    request.getfixturevalue("calls_tools")
    ask = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
    calls = litellm.completion(**given, **ask).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == PLACES
    chunks = [*litellm.completion(**given, **ask, stream=True)]
    built = litellm.stream_chunk_builder(chunks, messages=ask["messages"]).choices[0]
    assert [json.loads(c.function.arguments) for c in built.message.tool_calls] == PLACES
    assert built.finish_reason == "tool_calls"


# ---- random forms ----------------------------------------------------------------------------


class Schemas:
    """Random JSON schemas whose texts are short."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    @classmethod
    def of(cls, seed: int) -> dict:
        return cls(seed).some(3)

    def some(self, depth: int) -> dict:
        kinds = [self._string, self._number, self._enum, self._plain]
        if depth:
            kinds += [self._object, self._object, self._array, self._either]
        kind = self._random.choice(kinds)
        return kind(depth - 1) if kind in (self._object, self._array, self._either) else kind()

    def _object(self, depth: int) -> dict:
        names = self._random.sample(
            ["a", "b c", "é", 'q"', "name", "x/y"], self._random.randint(0, 3)
        )
        required = [name for name in names if self._random.random() < 0.6]
        found = {"type": "object", "properties": {name: self.some(depth) for name in names}}
        return found | {"required": required, "additionalProperties": False}

    def _array(self, depth: int) -> dict:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        found = {"type": "array", "minItems": least, "maxItems": most}
        if least == most and self._random.random() < 0.3:
            return found | {"prefixItems": [self.some(depth) for _ in range(most)], "items": False}
        return found | {"items": self.some(depth)}

    def _either(self, depth: int) -> dict:
        return {"anyOf": [self.some(depth), self.some(depth)]}

    def _string(self) -> dict:
        least = self._random.randint(0, 3)
        return {"type": "string"} | self._random.choice(
            [
                {"minLength": least, "maxLength": least + self._random.randint(0, 4)},
                {"pattern": "^[a-f]{2,4}(-[0-9]+)?$"},
                {"format": self._random.choice(["uuid", "ipv4"])},
            ]
        )

    def _number(self) -> dict:
        least = self._random.randint(-500, 500)
        most = least + self._random.randint(0, 1000)
        bounds = {"minimum": least, "maximum": most}
        if self._random.random() < 0.3:
            bounds = {"exclusiveMinimum": least - 1, "exclusiveMaximum": most + 1}
        return {"type": "integer"} | bounds

    def _enum(self) -> dict:
        values = ["", "a", "ü\n", 5, -1.5, None, True, [1, "x"], {"k": []}]
        if self._random.random() < 0.3:
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, 3)}

    def _plain(self) -> dict:
        return {"type": self._random.choice(["null", "boolean", ["null", "boolean"]])}


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory):
    """A server of the tiny model with room for long texts."""
    folder = write_tokenizer(tmp_path_factory.mktemp("forms") / "tokenizer", TEMPLATE, bos=False)
    tokenizer = load_tokenizer(folder)
    cfg = ModelConfig(**nested(SMALL | BYTES | {"max_position_embeddings": 1024}))
    definition, params = split(build(cfg, nnx.Rngs(0)))
    limits = Limits(rows=8, chunk=64, length=1024, queued=256)
    ends = (tokenizer.id_of(END),)
    given = {"dtype": "float32", "tokenizer": tokenizer, "eos": ends, "pages": 600}
    made = Engine(definition, params, cfg, limits=limits, **given)
    made.runner.sizes = tuple(sizes[-1:] for sizes in made.runner.sizes)
    made.folder = folder
    made.warm_up([Draws(random=True)])
    with behind_socket(made) as behind, served(behind) as live:
        yield live


@exhaustive
def test_200_random_schemas_give_what_they_describe(long_texts):
    pytest.importorskip("llguidance")
    validators = pytest.importorskip("jsonschema_rs")
    found = {json.dumps(schema): schema for schema in map(Schemas.of, range(400))}
    schemas = [*found.values()][:200]
    assert len(schemas) == 200

    def answer(number: int) -> SimpleNamespace:
        form = {"name": "form", "schema": schemas[number], "strict": True}
        body = {"messages": [{"role": "user", "content": f"Number {number}?"}], "seed": number}
        body |= {"response_format": {"type": "json_schema", "json_schema": form}}
        body |= {"temperature": 1.0, "max_tokens": 900}
        reply = httpx.post(f"{long_texts.url}/v1/chat/completions", json=body, timeout=300)
        assert reply.status_code == 200, (schemas[number], reply.text)
        return SimpleNamespace(schema=schemas[number], **reply.json()["choices"][0])

    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(answer, range(len(schemas)))]
    assert {made.finish_reason for made in answers} == {"stop"}
    for made in answers:
        value = json.loads(made.message["content"])
        validator = validators.validator_for(made.schema, validate_formats=True)
        assert validator.is_valid(value), (made.schema, value)
    long_texts.at_rest()
