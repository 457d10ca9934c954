"""The engine for asyncio: many callers at a time, who leave, fail, pause and close."""

import asyncio
import threading
import time

import pytest

from mjax.errors import UserError
from mjax.infer.async_engine import AsyncEngine, EngineDied
from mjax.infer.requests import SamplingParams
from tests.laws.serving.kinds import PAGE, assert_greedy, at_rest, emptied, engine, model
from tests.marks import slow

KIND = "keys and values"
LONG = SamplingParams(max_tokens=100)


@pytest.fixture
def given(monkeypatch):
    for module in ("engine", "programs", "step_runner"):
        monkeypatch.setattr(f"mjax.infer.{module}.PAGE", PAGE)
    made = emptied(engine(KIND))
    yield made
    made.resume()
    while made.has_work:
        made.step()
    at_rest(made)


@pytest.fixture
def unhurried(given, monkeypatch):
    """An engine whose steps leave callers time to come and go."""
    step = given.step
    monkeypatch.setattr(given, "step", lambda: time.sleep(0.01) or step())
    return given


def run(given, function):
    """The result of an asynchronous function of an engine in its thread."""
    serving = AsyncEngine(given)
    try:
        return asyncio.run(asyncio.wait_for(function(serving), 60))
    finally:
        serving.close()
        assert not serving._thread.is_alive()
        for left in list(given.requests):
            given.abort(left)


async def output_of(serving, name, prompt, params=LONG):
    """The output of a request, and the text of its updates."""
    text = ""
    async for update in serving.generate(prompt, params, request_id=name):
        text += update.text
    return update.request.output, text


@slow
def test_many_callers_at_a_time_get_their_own_tokens(given):
    async def serve(serving):
        requests = [
            output_of(serving, str(i), [i + 1, 5, i], SamplingParams(max_tokens=5 + i))
            for i in range(20)
        ]
        return await asyncio.gather(*requests)

    found = run(given, serve)
    assert_greedy(KIND, [output for output, _ in found])
    for number, (output, text) in enumerate(found):
        assert output.request_id == str(number) and output.finished
        assert output.prompt_token_ids == [number + 1, 5, number]
        assert len(output.outputs[0].token_ids) == 5 + number
        assert text == output.outputs[0].text


@slow
def test_all_samples_of_a_request_come(given):
    async def serve(serving):
        params = SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=9)
        indices = []
        async for update in serving.generate([1], params, request_id="n"):
            indices.append(update.sample.answer.output.index)
        return sorted(indices)

    assert run(given, serve) == sorted([0, 1, 2] * 9)


def test_a_caller_that_leaves_frees_its_pages(unhurried):
    async def serve(serving):
        stream = serving.generate([*range(20)], LONG, request_id="leaves")
        await anext(stream)
        await stream.aclose()
        for number in range(20):  # while it is added, and later
            task = asyncio.create_task(output_of(serving, "cancelled", [*range(20)]))
            await asyncio.sleep(0.001 * number)
            task.cancel()
        await output_of(serving, "stays", [3], SamplingParams(max_tokens=5))
        return await serving.call(lambda: (len(unhurried.requests), unhurried.lanes[0].pool.used))

    assert run(unhurried, serve) == (0, 0)


def test_a_request_that_cannot_be_served_is_its_callers_error_alone(unhurried):
    async def serve(serving):
        beside = asyncio.create_task(output_of(serving, "same", [1]))
        await asyncio.sleep(0.05)
        for name, prompt, message in (("a", [], "0 tokens"), ("same", [2], "running already")):
            with pytest.raises(UserError, match=message):
                await output_of(serving, name, prompt)
        return (await beside)[0]

    assert len(run(unhurried, serve).outputs[0].token_ids) == 100


def test_an_error_in_a_step_reaches_every_caller_and_later_ones(given, monkeypatch):
    async def serve(serving):
        step, count = given.step, []

        def fails():
            count.append(1)
            if len(count) == 9:
                raise RuntimeError("out of memory\nand more")
            return step()

        monkeypatch.setattr(given, "step", fails)
        callers = [output_of(serving, str(i), [i]) for i in range(6)]
        found = await asyncio.gather(*callers, return_exceptions=True)
        late = await asyncio.gather(output_of(serving, "late", [1]), return_exceptions=True)
        monkeypatch.undo()
        return found + late

    found = run(given, serve)
    assert len(found) == 7
    for error in found:
        assert type(error) is EngineDied and str(error).endswith("error: out of memory")


def test_close_ends_those_that_wait(unhurried):
    async def serve(serving):
        callers = [asyncio.create_task(output_of(serving, str(i), [i])) for i in range(6)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(serving.close)
        return await asyncio.gather(*callers, return_exceptions=True)

    found = run(unhurried, serve)
    assert all(type(error) is EngineDied and "closed" in str(error) for error in found)


def test_callers_that_meet_a_close_do_not_wait_for_ever(given):
    async def serve(serving):
        closing = asyncio.create_task(asyncio.to_thread(serving.close))
        callers = []
        while not closing.done():
            callers.append(asyncio.create_task(output_of(serving, str(len(callers)), [1])))
            await asyncio.sleep(0)
        serving.close()
        return await asyncio.gather(*callers, return_exceptions=True)

    assert {type(error) for error in run(given, serve)} <= {EngineDied}


def test_an_abort_from_elsewhere_ends_the_stream(unhurried):
    async def serve(serving):
        task = asyncio.create_task(output_of(serving, "x", [1]))
        await asyncio.sleep(0.05)
        await serving.abort("x")
        await serving.abort("unknown")
        return (await task)[0]

    assert run(unhurried, serve).outputs[0].finish_reason == "abort"


def test_a_paused_engine_waits_idly_and_loses_no_token(unhurried):
    async def serve(serving):
        task = asyncio.create_task(output_of(serving, "x", [1, 2]))
        await asyncio.sleep(0.05)
        await serving.pause()
        version, used = unhurried.version, time.thread_time
        before = await serving.call(used)
        await asyncio.sleep(0.3)
        spent = await serving.call(used) - before
        await serving.update_weights(model(KIND).params)
        await serving.resume()
        output, text = await task
        assert spent < 0.1, "the thread of a paused engine works"
        assert set(output.outputs[0].weight_versions) <= {version, version + 1}
        return output, text

    output, text = run(unhurried, serve)
    assert_greedy(KIND, [output])
    assert len(output.outputs[0].token_ids) == 100 and text == output.outputs[0].text


def test_the_engines_thread_alone_runs_commands(given):
    async def serve(serving):
        with pytest.raises(ZeroDivisionError):
            await serving.call(lambda: 1 / 0)
        return await serving.call(threading.get_ident)

    assert run(given, serve) != threading.get_ident()
