"""Engines of another thread say what the engine itself says, and nothing is left of requests."""

import asyncio
import contextlib
import functools
import time
from collections import defaultdict

import pytest

from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.infer.requests import CompletionOutput, SamplingParams, Structured
from mjax.infer.sample import Draws
from mjax.infer.scheduling.scheduler import Limits, QueueFull
from mjax.serve.base import wire
from mjax.serve.base.engines import EngineDied, Engines, Piece
from mjax.serve.engine_server import EngineServer, in_thread
from tests.laws.serving.kinds import at_rest, make_engine
from tests.marks import slow

BYTES = load_tokenizer("byte")
PROMPT = BYTES.encode("A prompt of some letters, long enough for a page of sixty-four tokens. ")
LETTERS = range(97, 123)
FACTS = wire.ModelFacts("tiny", None, 128, 260, ends=(BYTES.eod_id,))
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    limits = Limits(rows=4, chunk=64, length=128, queued=8)
    sizes = {"limits": limits, "tokenizer": BYTES, "eos": (BYTES.eod_id,)}
    made = make_engine("bytes", pages=40, **sizes)
    made.warm_up([Draws(random=True, limited=True, top=20)])  # one program for all requests
    return made


@pytest.fixture
def server(engine):
    with in_thread(engine, FACTS) as given:
        yield given
    engine.resume()
    for left in list(engine.requests):
        engine.abort(left)
    while engine.has_work:
        engine.step()
    at_rest(engine)


@pytest.fixture
def unhurried(engine, monkeypatch):
    """An engine whose steps leave callers time to come and go."""
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.01) or step())
    return engine


def run(server: EngineServer, function):
    """The result of an asynchronous function of engines that serve."""

    async def serve():
        async with Engines([server.address], BYTES) as engines:
            await engines.ready()
            return await function(engines)

    return asyncio.run(asyncio.wait_for(serve(), 60))


async def pieces_of(engines: Engines, prompt, params, name="x") -> dict[int, list[Piece]]:
    found = defaultdict(list)
    async for piece in engines.generate(prompt, params, request_id=name):
        found[piece.index].append(piece)
    return found


def told(pieces: list[Piece]) -> dict:
    """What pieces of a sample say together, as the fields of a `CompletionOutput`."""
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    lists = "token_ids", "logprobs", "processed_logprobs", "weight_versions"
    found = {name: [x for piece in pieces for x in getattr(piece, name)] for name in lists}
    tops = [piece.top_logprobs for piece in pieces]
    found["top_logprobs"] = None if tops[0] is None else [x for top in tops for x in top]
    last = pieces[-1]
    end = {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
    text = "".join(piece.text for piece in pieces)
    return {"index": last.index, "text": text} | end | found


def directly(engine: Engine, prompt, params):
    """The output of a request of the engine itself."""
    request = engine.add(prompt, params)
    while engine.has_work:
        engine.step()
    return request.output


def whole(output: CompletionOutput) -> dict:
    """A sample as the engine gives it, without experts, which servers do not keep."""
    return {name: value for name, value in vars(output).items() if name != "experts"}


def checked(engine: Engine, *each: SamplingParams, prompt=PROMPT) -> None:
    """All requests, at a time, give what the engine gives for each alone."""
    wanted = [directly(engine, prompt, params) for params in each]
    with in_thread(engine, FACTS) as given:

        async def serve(engines):
            asks = [pieces_of(engines, prompt, p, f"r{i}") for i, p in enumerate(each)]
            served = await asyncio.gather(*asks)
            await engines.stats()  # comes after those that leave
            return served

        served = run(given, serve)
    for output, found in zip(wanted, served, strict=True):
        assert [told(found[i]) for i in sorted(found)] == [whole(one) for one in output.outputs]
        assert found[0][-1].prompt_logprobs == output.prompt_logprobs
    at_rest(engine)


@slow
def test_texts_tokens_and_logprobs_are_the_engines(engine):
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 30}
    checked(
        engine,
        SamplingParams(max_tokens=20),
        SamplingParams(**sampled, logprobs=3, prompt_logprobs=2),
        SamplingParams(**sampled, n=3, skip_special_tokens=False),
        SamplingParams(max_tokens=9, logprobs=0, stop_token_ids=range(128), min_tokens=5),
    )


def test_a_form_holds(engine):
    pytest.importorskip("llguidance")
    form = Structured(regex="[ab]{3}(cd)+!")
    checked(engine, SamplingParams(structured=form, temperature=1.0, seed=3, max_tokens=30))


def test_stop_strings_cut_the_text_at_every_place(engine):
    params = {"max_tokens": 20, "temperature": 0.7, "seed": 5, "allowed_token_ids": LETTERS}
    text = directly(engine, PROMPT, SamplingParams(**params)).outputs[0].text
    assert len(text) == 20
    spans = [(i, i + size) for size in (1, 3) for i in range(0, len(text) - size, 3)]
    for include in (False, True):
        for few in (spans[i : i + 8] for i in range(0, len(spans), 8)):
            more = {"include_stop_str_in_output": include}
            checked(engine, *(SamplingParams(**params, **more, stop=text[a:b]) for a, b in few))


def test_a_request_whose_samples_have_all_stopped_leaves_its_engine(unhurried):
    params = SamplingParams(max_tokens=50, allowed_token_ids=LETTERS)
    text = directly(unhurried, PROMPT, params).outputs[0].text
    params = params.model_copy(update={"stop": (text[3],)})

    async def serve(engines):
        found = await pieces_of(engines, PROMPT, params)
        await asyncio.sleep(0.2)
        return told(found[0]), (await engines.stats())[0]

    with in_thread(unhurried, FACTS) as given:
        found, stats = run(given, serve)
    assert found["text"] == text[: text.index(text[3])] and found["stop_reason"] == text[3]
    assert (stats["requests"], stats["running"], stats["pages_used"]) == (0, 0, 0)
    assert stats["generation_tokens"] < 50


def test_a_sample_that_has_stopped_leaves_those_of_its_request_that_go_on(unhurried):
    params = {"n": 3, "temperature": 1.0, "seed": 3, "allowed_token_ids": LETTERS}
    made = directly(unhurried, PROMPT, SamplingParams(**params, max_tokens=50)).outputs
    stop = made[1].text[2:4]
    ask = SamplingParams(**params, max_tokens=50, stop=stop)
    wanted = directly(unhurried, PROMPT, ask).outputs
    lengths = [len(one.token_ids) for one in wanted]
    assert sorted(lengths)[0] == 4 and sorted(lengths)[-1] == 50
    running = []

    async def serve(engines):
        found = defaultdict(list)
        async for piece in engines.generate(PROMPT, ask, request_id="x"):
            found[piece.index].append(piece)
            running.append(len(unhurried.lanes[0].running))
        return found

    with in_thread(unhurried, FACTS) as given:
        found = run(given, serve)
    assert [told(found[i]) for i in range(3)] == [whole(one) for one in wanted]
    assert min(running[:-4]) < 3
    at_rest(unhurried)


def test_whoever_leaves_frees_pages_at_once(unhurried, server):
    async def serve(engines):
        for number in range(8):  # before it is added, and later
            task = asyncio.create_task(pieces_of(engines, PROMPT, LONG, "cancelled"))
            await asyncio.sleep(0.01 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        stream = engines.generate(PROMPT, LONG, request_id="leaves")
        await anext(stream)
        await stream.aclose()
        return (await engines.stats())[0]

    stats = run(server, serve)
    assert (stats["requests"], stats["running"], stats["waiting"]) == (0, 0, 0)
    assert stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages"]


def test_a_process_that_is_gone_frees_its_pages(unhurried, server):
    async def leaves(engines):
        await anext(engines.generate(PROMPT, LONG, request_id="lost"))
        for replica in engines._replicas:  # nothing says that it goes
            replica.socket.close(0)

    with contextlib.suppress(asyncio.CancelledError):
        run(server, leaves)
    until = time.monotonic() + 60
    while run(server, lambda engines: engines.stats())[0]["requests"]:
        assert time.monotonic() < until


def test_an_error_is_its_requests_own(unhurried, server, monkeypatch):
    add = unhurried.add

    def fails(prompt, params, **named):
        if len(prompt) == 3:
            raise BaseException("a library panics\nat length")
        return add(prompt, params, **named)

    monkeypatch.setattr(unhurried, "add", fails)

    async def serve(engines):
        beside = asyncio.create_task(pieces_of(engines, PROMPT, LONG, "same"))
        await asyncio.sleep(0.05)
        wrong = [
            ("a", [], "0 tokens"),
            ("b", [1, 2, 3], "a library panics$"),
            ("c", [260], "outside|260"),
            ("d", [2**70], "cannot be read"),
            ("e", [-1], "ids in"),
            ("same", [1], "running already"),
        ]
        for name, prompt, message in wrong:
            with pytest.raises(UserError, match=message):
                await pieces_of(engines, prompt, LONG, name)
        deep = functools.reduce(lambda inner, _: {"a": inner}, range(100_000), {})
        for schema in (deep, {"a": 2**70}, {"a": "\ud800"}):
            form = Structured.model_construct(json_schema=schema)
            params = LONG.model_copy(update={"ignore_eos": False, "structured": form})
            with pytest.raises(UserError):
                await pieces_of(engines, [1], params, "f")
        with pytest.raises(UserError, match="no command explode"):
            await engines.command("explode")
        return told((await beside)[0])

    assert len(run(server, serve)["token_ids"]) == 50


def test_a_full_queue_says_so(unhurried, server):
    async def serve(engines):
        asks = [pieces_of(engines, PROMPT, LONG, str(i)) for i in range(20)]
        return await asyncio.gather(*asks, return_exceptions=True)

    found = run(server, serve)
    full = [error for error in found if isinstance(error, QueueFull)]
    assert full and all(isinstance(one, dict | QueueFull) for one in found)


def test_an_engine_that_fails_tells_everyone(engine, monkeypatch):
    def fails():
        raise RuntimeError("out of memory\nand more")

    async def serve(engines):
        asks = [pieces_of(engines, PROMPT, LONG, str(i)) for i in range(3)]
        found = await asyncio.gather(*asks, return_exceptions=True)
        with pytest.raises(EngineDied, match="out of memory"):
            await pieces_of(engines, PROMPT, LONG)
        with pytest.raises(EngineDied, match="out of memory"):
            await engines.stats()
        return found, engines.is_alive

    monkeypatch.setattr(engine, "step", fails)
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    with in_thread(engine, FACTS) as given:
        errors, is_alive = run(given, serve)
    monkeypatch.undo()
    assert not is_alive
    for error in errors:
        assert type(error) is EngineDied and str(error).endswith("error: out of memory")
    for left in list(engine.requests):
        engine.abort(left)
    at_rest(engine)


def test_a_step_is_a_message(unhurried, server, monkeypatch):
    messages = []
    send = server._send
    monkeypatch.setattr(server, "_send", lambda client, m: messages.append(m) or send(client, m))

    async def serve(engines):
        asks = [pieces_of(engines, PROMPT, LONG, str(i)) for i in range(4)]
        await asyncio.gather(*asks)

    run(server, serve)
    steps = [message for message in messages if isinstance(message, wire.Step)]
    assert len(steps) <= server.counts.steps < 90
    parts = sum(len(part.token_ids) for step in steps for part in step.parts)
    tokens = sum(len(step.tokens) for step in steps)
    # The first and the last token of a sample come with more than a token.
    assert (parts, tokens) == (4 * 2, 4 * 48)


def test_an_abort_from_elsewhere_gives_what_is_there(engine, server, monkeypatch):
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.2) or step())  # 10 s in all

    async def serve(engines):
        task = asyncio.create_task(pieces_of(engines, PROMPT, LONG, "mine"))
        while server.counts.steps < 3:
            await asyncio.sleep(0.02)
        async with Engines([server.address], BYTES) as others:
            await others.abort("unknown")
            await others.abort("mine")
            return told((await task)[0])

    found = run(server, serve)
    assert found["finish_reason"] == "abort" and 0 < len(found["token_ids"]) < 50


@slow
def test_a_paused_engine_keeps_its_requests(unhurried, server):
    async def serve(engines):
        task = asyncio.create_task(pieces_of(engines, PROMPT, LONG))
        await asyncio.sleep(0.1)
        await engines.command("pause")
        steps = [(await engines.stats())[0]["steps"] for _ in range(2) if not time.sleep(0.1)]
        await engines.command("resume")
        await task
        await engines.command("sleep")
        with pytest.raises(UserError, match="sleeps"):
            await pieces_of(engines, PROMPT, LONG)
        await engines.command("wake")
        cached = [(await pieces_of(engines, PROMPT, LONG))[0][-1].cached_tokens for _ in "ab"]
        await engines.command("reset_prefix_cache")
        return steps, [*cached, (await pieces_of(engines, PROMPT, LONG))[0][-1].cached_tokens]

    steps, cached = run(server, serve)
    assert steps[0] == steps[1] and cached == [0, 64, 0]
