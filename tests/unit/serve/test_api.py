"""Replies of the routes are what the published client reads, and say what the engine says."""

import base64
import io
import json
import re
from collections import defaultdict
from dataclasses import replace

import httpx
import jax
import numpy as np
import pytest
from PIL import Image

from mjax.infer.requests import SamplingParams
from mjax.serve.base.engines import Piece
from mjax.serve.base.wire import ImageFacts
from tests.laws.serving.kinds import model
from tests.marks import slow

openai = pytest.importorskip("openai")
HI = [{"role": "user", "content": "Hi."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Bonn", "Rom"]}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def post(live):
    """The JSON of a reply, which must be of status 200."""

    def posted(path: str, **body) -> dict:
        reply = httpx.post(f"{live.url}{path}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return posted


@pytest.fixture
def events(live):
    """The events of a stream."""

    def read(path: str, **body) -> list[dict]:
        with httpx.stream("POST", f"{live.url}{path}", json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    return read


@pytest.fixture
def says(live, monkeypatch):
    """Make the engines say these texts, a piece of one token each."""

    def say(*texts: str) -> None:
        async def generate(prompt, params, **_):
            for number, text in enumerate(texts):
                reason = "stop" if number == len(texts) - 1 else None
                yield Piece(0, text, [number], [-1.0], None, [0], reason)

        monkeypatch.setattr(live.engines, "generate", generate)

    return say


async def outputs_of(engines, prompt, params) -> dict:
    """The tokens and log-probabilities of each sample, from the engines themselves."""
    found = defaultdict(lambda: ([], [], []))
    async for piece in engines.generate(prompt, params, request_id="itself"):
        texts, tokens, logprobs = found[piece.index]
        texts.append(piece.text)
        tokens.extend(piece.token_ids)
        logprobs.extend(piece.logprobs)
    return {index: ("".join(own[0]), *own[1:]) for index, own in found.items()}


def test_a_completion_says_what_the_engine_says(live, client):
    params = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=9, logprobs=2)
    prompt = live.engine.tokenizer.encode("Some words")
    own = live.run(outputs_of(live.engines, prompt, params))
    given = {"n": 3, "temperature": 0.7, "seed": 5, "max_tokens": 9, "logprobs": 2}
    made = client.completions.create(model="tiny", prompt="Some words", **given)
    assert made.id.startswith("cmpl-") and made.object == "text_completion"
    for choice in made.choices:
        text, tokens, logprobs = own[choice.index]
        assert choice.text == text and choice.finish_reason in ("length", "stop")
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-5)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(tokens)
        assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs)
    usage = made.usage
    assert usage.prompt_tokens == 10 and usage.total_tokens == 10 + usage.completion_tokens
    assert usage.completion_tokens == sum(len(tokens) for _, tokens, _ in own.values())
    ids = client.completions.create(model="tiny", prompt=prompt, **given)
    assert [c.text for c in ids.choices] == [c.text for c in made.choices]


def test_several_prompts_are_numbered_by_prompt_and_sample(client, post, events):
    prompts = ["One", "Two", "Three"]
    given = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 4}
    made = client.completions.create(model="tiny", prompt=prompts, **given)
    assert [choice.index for choice in made.choices] == [*range(6)]
    for number, prompt in enumerate(prompts):
        alone = client.completions.create(model="tiny", prompt=prompt, **given)
        own = made.choices[2 * number : 2 * number + 2]
        assert [choice.text for choice in alone.choices] == [choice.text for choice in own]
    texts = defaultdict(str)
    for chunk in events("/v1/completions", prompt=prompts, **given):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice.index: choice.text for choice in made.choices}


@pytest.mark.parametrize("most", [0, 1])
def test_echo_scores_the_prompt_as_a_plain_forward_does(live, post, most):
    """What lm-eval's local-completions reads."""
    prompt = live.engine.tokenizer.encode("A prompt that is scored.")
    given = {"echo": True, "logprobs": 1, "max_tokens": most, "temperature": 0, "seed": 1234}
    (choice,) = post("/v1/completions", model="tiny", prompt=[prompt], **given)["choices"]
    found, logprobs = choice["logprobs"], plain_logprobs(prompt)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert len(found["tokens"]) == len(prompt) + most
    scores = [logprobs[i, token] for i, token in enumerate(prompt[1:])]
    assert found["token_logprobs"][1 : len(prompt)] == pytest.approx(scores, abs=1e-3)
    best = [max(top.values()) for top in found["top_logprobs"][1 : len(prompt)]]
    assert best == pytest.approx([*logprobs[: len(prompt) - 1].max(-1)], abs=1e-3)
    assert choice["text"].startswith("A prompt that is scored.")
    assert found["text_offset"][: len(prompt)] == [*range(len(prompt))]
    streamed = echo_of_stream(live.url, {"prompt": [prompt], **given})
    assert streamed == choice["text"]


def plain_logprobs(prompt: list[int]) -> np.ndarray:
    tiny = model("bytes")
    rows = np.zeros((1, tiny.cfg.max_position_embeddings), np.int32)
    rows[0, : len(prompt)] = prompt
    return np.asarray(jax.nn.log_softmax(tiny.logits(tiny.params, rows)[0], axis=-1))


def echo_of_stream(url: str, body: dict) -> str:
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_a_stream_of_a_chat_adds_up_to_the_reply(client):
    given = {"n": 2, "temperature": 0.9, "seed": 2, "max_tokens": 30, "logprobs": True}
    given |= {"top_logprobs": 3, "model": "tiny", "messages": HI}
    whole = client.chat.completions.create(**given)
    texts, logprobs, reasons, usage = defaultdict(str), defaultdict(list), {}, []
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**given, stream=True, stream_options=options):
        if not chunk.choices:
            usage.append(chunk.usage)
            continue
        assert chunk.usage is None
        (choice,) = chunk.choices
        if choice.index not in texts:
            assert choice.delta.role == "assistant"
        texts[choice.index] += choice.delta.content or ""
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason
        assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)
    assert [one.model_dump() for one in usage] == [
        whole.usage.model_copy(
            update={"prompt_tokens_details": one.prompt_tokens_details}
        ).model_dump()
        for one in usage
    ] and len(usage) == 1


def test_without_include_usage_each_chunk_has_a_choice(events):
    for path, own in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {})):
        body = own or {"messages": HI}
        chunks = events(path, max_tokens=3, **body)
        assert all(chunk["choices"] for chunk in chunks)
        assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("several", [True, False])
def test_demanded_calls_are_well_formed(client, several):
    given = {"model": "tiny", "messages": HI, "tools": [WEATHER, STOP], "max_tokens": 60}
    given |= {"tool_choice": "required", "parallel_tool_calls": several, "seed": 1}
    whole = client.chat.completions.create(**given).choices[0]
    calls = whole.message.tool_calls
    assert calls and whole.message.content is None
    if not several:
        assert len(calls) == 1
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        if whole.finish_reason == "tool_calls" and call.function.name == "weather":
            assert json.loads(call.function.arguments)["place"] in ("Bonn", "Rom")
    parts = defaultdict(list)
    for chunk in client.chat.completions.create(**given, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            parts[call.index].append(call)
    for index, call in enumerate(calls):
        first, *rest = parts[index]
        assert first.function.name == call.function.name and first.id
        assert all(one.id is None and one.function.name is None for one in rest)
        assert "".join(one.function.arguments for one in parts[index]) == call.function.arguments


def test_a_named_call_has_the_arguments_of_its_schema(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    made = client.chat.completions.create(
        model="tiny", messages=HI, tools=[STOP, WEATHER], tool_choice=choice, max_tokens=60
    ).choices[0]
    (call,) = made.message.tool_calls
    assert call.function.name == "weather" and made.finish_reason == "tool_calls"
    assert {*json.loads(call.function.arguments)} == {"place", "days"}


def test_calls_in_a_text_are_found(client, says):
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
    given = {"model": "tiny", "messages": HI, "tools": [WEATHER]}
    says("Let me", " see. ", call[:20], call[20:], "")
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content.strip() == "Let me see."
    (made,) = whole.message.tool_calls
    assert json.loads(made.function.arguments) == {"place": "Bonn"}
    chunks = [*client.chat.completions.create(**given, stream=True)]
    parts = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == made.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_is_sent_under_both_names(live, post, events, says, monkeypatch):
    service = live.app.state.service
    monkeypatch.setattr(service, "options", replace(service.options, reasoning_parser="qwen3"))
    says("<think>", "I ", "think", "</think>", "So.", "")
    made = post("/v1/chat/completions", messages=HI)
    message = made["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "I think"
    assert message["content"] == "So."
    assert 0 < made["usage"]["completion_tokens_details"]["reasoning_tokens"] < 6
    deltas = [c["choices"][0]["delta"] for c in events("/v1/chat/completions", messages=HI)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "I think"
    hidden = post("/v1/chat/completions", messages=HI, include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]


FORMS = [
    ({"response_format": {"type": "json_object"}, "max_tokens": 4}, r"\{.*"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}}}, "7"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes.", "no*"]}}, r"yes\.|no\*"),
    ({"guided_regex": "c+d", "max_tokens": 3}, "c+d?"),
    ({"guided_json": {"const": "x"}}, '"x"'),
    ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
]


@pytest.mark.parametrize("form, pattern", FORMS)
def test_texts_have_the_form_that_is_asked(post, form, pattern):
    body = {"messages": HI, "max_tokens": 20, "seed": 3} | form
    text = post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, text, re.DOTALL)


def test_characters_of_several_tokens_come_whole(events, post):
    body = {"messages": HI, "structured_outputs": {"regex": "(é|漢|😀){4}"}, "max_tokens": 40}
    whole = post("/v1/chat/completions", **body, seed=4)["choices"][0]["message"]["content"]
    chunks = events("/v1/chat/completions", **body, seed=4, logprobs=True)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == whole and {*whole} <= {*"é漢😀"} and len(whole) == 4
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    raw = b"".join(bytes(t["bytes"]) for one in logprobs if one for t in one["content"])
    assert raw.removesuffix(b"<|im_end|>").decode() == whole


def test_a_last_message_is_continued(live, post):
    said = [*HI, {"role": "assistant", "content": "The answer is "}]
    ids = post("/tokenize", messages=said, continue_final_message=True)["tokens"]
    assert post("/detokenize", tokens=ids)["prompt"].endswith("assistant\nThe answer is ")
    opened = post("/tokenize", messages=HI, chat_template_kwargs={"word": "W"})["tokens"]
    assert post("/detokenize", tokens=opened)["prompt"].endswith("assistant\nW")
    made = post("/v1/chat/completions", messages=said, continue_final_message=True, max_tokens=1)
    assert made["usage"]["prompt_tokens"] == len(ids)


def test_parts_of_messages_are_joined(post):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = post("/tokenize", messages=[{"role": "user", "content": "one\ntwo"}])
    assert post("/tokenize", messages=[{"role": "user", "content": parts}]) == joined


def test_ids_go_in_and_come_out(live, post, events):
    given = {"temperature": 1.0, "seed": 8, "n": 2, "max_tokens": 6, "logprobs": 2}
    body = {"token_ids": [1, 2, 3], "sampling_params": given | {"top_k": 5}}
    made = post("/inference/v1/generate", **body)
    params = SamplingParams(**body["sampling_params"])
    own = live.run(outputs_of(live.engines, [1, 2, 3], params))
    for choice in made["choices"]:
        _, tokens, logprobs = own[choice["index"]]
        assert choice["token_ids"] == tokens
        assert choice["logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert len(choice["weight_versions"]) == len(choice["top_logprobs"]) == len(tokens)
        assert all(
            p >= q - 1e-6 for p, q in zip(choice["processed_logprobs"], logprobs, strict=True)
        )
    parts = defaultdict(list)
    for chunk in events("/inference/v1/generate", **body):
        for choice in chunk["choices"]:
            parts[choice["index"]] += choice["token_ids"]
    assert parts == {choice["index"]: choice["token_ids"] for choice in made["choices"]}


def test_embeddings_are_what_the_engine_gives(live, client, monkeypatch):
    """The client asks for base64 unless its caller says otherwise."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
    asked = []

    async def embed(prompts, pooling, adapter):
        asked.append(([len(prompt) for prompt in prompts], pooling))
        return rows[: len(prompts)]

    monkeypatch.setattr(live.engines, "embed", embed, raising=False)
    made = client.embeddings.create(model="tiny", input=["one", "three"])
    units = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    assert np.allclose([one.embedding for one in made.data], units) and asked[-1] == (
        [3, 5],
        "last",
    )
    assert made.usage.prompt_tokens == made.usage.total_tokens == 8
    plain = client.embeddings.create(
        model="tiny", input=[1, 2], encoding_format="float", extra_body={"normalize": False}
    )
    assert plain.data[0].embedding == [1.0, 2.0, 3.0]


def test_models_are_listed_with_adapters(live, client, monkeypatch):
    facts = replace(live.engines.facts, adapters=("poems",))
    monkeypatch.setattr(live.engines, "facts", facts)
    base, adapter = client.models.list().data
    assert base.id == "tiny" and base.max_model_len == 128 and base.parent is None
    assert adapter.id == "poems" and adapter.parent == "tiny"
    assert client.models.retrieve("poems") == adapter
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("prose")


def test_messages_have_the_names_that_templates_read(live, post, monkeypatch):
    prompts = live.app.state.service.prompts
    source = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.tool_calls }};"
    source = f"{source}{{% endfor %}}"
    monkeypatch.setattr(prompts, "template", replace(prompts.template, source=source))
    call = {"function": {"name": "f", "arguments": '{"a": [1]}'}}
    said = [
        {"role": "developer", "content": ""},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
    ]
    text = post("/detokenize", tokens=post("/tokenize", messages=said)["tokens"])["prompt"]
    assert text.startswith("system::;assistant:Hm.:[") and "'arguments': {'a': [1]}" in text


def test_images_stand_where_their_marks_are(live, post, monkeypatch):
    image = ImageFacts((250,) * 4, 8, 3, (0.5,), (0.5,))
    monkeypatch.setattr(live.engines, "facts", replace(live.engines.facts, image=image))
    asked = []

    async def generate(prompt, params, images, **_):
        asked.append((prompt, images))
        yield Piece(0, "a", [1], [0.0], None, [0], "stop")

    monkeypatch.setattr(live.engines, "generate", generate)
    encoded = io.BytesIO()
    Image.new("RGB", (16, 12), (255, 0, 0)).save(encoded, "PNG")
    url = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "See?"}]
    post("/v1/chat/completions", messages=[{"role": "user", "content": parts}])
    ((prompt, (pixels,)),) = asked
    plain = post("/tokenize", messages=[{"role": "user", "content": "\nSee?"}])["tokens"]
    begin = prompt.index(250)
    assert prompt[begin : begin + 4] == [250] * 4
    assert prompt[:begin] + prompt[begin + 4 :] == plain
    assert pixels.shape == (8, 8, 3) and np.allclose(pixels[0, 0], [1, -1, -1])
    for wrong in ("data:image/png;base64,AAAA", "data:image/png;base64,?", "file:///etc/passwd"):
        parts[0]["image_url"]["url"] = wrong
        body = {"messages": [{"role": "user", "content": parts}]}
        reply = httpx.post(f"{live.url}/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages.content.image_url"
    said = {"messages": [{"role": "user", "content": "<image>"}]}
    assert httpx.post(f"{live.url}/v1/chat/completions", json=said).status_code == 400


def test_further_fields_of_vllm(post):
    body = {"messages": HI, "max_tokens": 4, "seed": 1, "return_token_ids": True}
    made = post("/v1/chat/completions", **body, prompt_logprobs=0, logprobs=True)
    (choice,) = made["choices"]
    assert len(choice["token_ids"]) == 4 and len(made["prompt_token_ids"]) == len(
        made["prompt_logprobs"]
    )
    named = post(
        "/v1/completions", prompt="a", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True
    )
    assert all(name.startswith("token_id:") for name in named["choices"][0]["logprobs"]["tokens"])
    cut = post("/v1/completions", prompt="abcdef", max_tokens=1, truncate_prompt_tokens=2)
    assert cut["usage"]["prompt_tokens"] == 2
    harmless = {"user": "me", "metadata": {"a": 1}, "store": False, "unknown": None}
    assert post("/v1/completions", prompt="a", max_tokens=1, **harmless)["choices"]


@slow
def test_stop_strings_and_bias(live, post):
    biases = {str(live.engine.tokenizer.id_of(letter)): 100 for letter in "ab"}
    body = {"prompt": "x", "max_tokens": 50, "logit_bias": biases, "seed": 1}
    made = post("/v1/completions", **body, stop=["ab", "ba"])["choices"][0]
    assert made["finish_reason"] == "stop" and made["stop_reason"] in ("ab", "ba")
    kept = post("/v1/completions", **body, stop="b", include_stop_str_in_output=True)
    assert kept["choices"][0]["text"].endswith("b")
