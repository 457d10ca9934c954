"""Law: prompts go where their beginning is, unless that replica is far above the least load."""

import asyncio
import contextlib

import numpy as np

from mjax.data.base.tokenizer import load_tokenizer
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.serve.base import wire
from mjax.serve.base.engines import Engines
from mjax.serve.base.routing import BLOCK_TOKENS, PrefixRouter
from mjax.serve.engine_server import in_thread
from tests.laws.serving.kinds import make_engine
from tests.marks import slow

WORDS = np.random.default_rng(0)
PREFIXES = [WORDS.integers(0, 1000, 6 * BLOCK_TOKENS).tolist() for _ in range(12)]


def conversations(seed: int):
    """Prompts that begin with one of a few texts, in an order that is drawn."""
    rng = np.random.default_rng(seed)
    for _ in range(400):
        own = rng.integers(0, 1000, rng.integers(1, 2 * BLOCK_TOKENS)).tolist()
        yield [*PREFIXES[rng.integers(len(PREFIXES))], *own]


def simulated(replicas: int, most: int) -> tuple[list[int], float, int]:
    """Choices, the share of tokens that were cached, the largest gap of loads; `most` run."""
    router = PrefixRouter(replicas)
    loads, running = [0] * replicas, []
    cached = [set() for _ in range(replicas)]  # as fake replicas remember them
    choices, hits, total, gap = [], 0, 0, 0
    for prompt in conversations(1):
        chosen = router.choose(prompt, loads)
        choices.append(chosen)
        blocks = [
            tuple(prompt[: end + BLOCK_TOKENS])
            for end in range(0, len(prompt) - BLOCK_TOKENS, BLOCK_TOKENS)
        ]
        hits += sum(block in cached[chosen] for block in blocks)
        total += len(blocks)
        cached[chosen].update(blocks)
        loads[chosen] += 1
        running.append(chosen)
        if len(running) > most:
            loads[running.pop(0)] -= 1
        gap = max(gap, max(loads) - min(loads))
    return choices, hits / total, gap


def test_prefixes_are_found_and_loads_stay_near_each_other():
    choices, share, gap = simulated(4, 40)
    assert simulated(4, 40)[0] == choices, "the choice depends on nothing else"
    assert share > 0.75 and set(choices) == {0, 1, 2, 3}
    assert gap <= 1 + 8 + 0.5 * 10


def test_a_replica_far_above_the_least_loses_its_prefix():
    router = PrefixRouter(3)
    first = router.choose(PREFIXES[0], [0, 0, 0])
    others = [n for n in range(3) if n != first]
    busy = [8 if n == first else 0 for n in range(3)]
    assert router.choose(PREFIXES[0], busy) == first
    busy[first] = 9
    moved = router.choose(PREFIXES[0], busy)
    assert moved in others
    assert router.choose(PREFIXES[0], busy) == moved, "the new place is remembered"
    longer = [*PREFIXES[0], *PREFIXES[1]]
    router.choose(longer, [0 if n == first else 1 for n in range(3)])
    assert router.choose(longer, [5 if n == first else 0 for n in range(3)]) in (first, moved)


def test_without_a_prefix_the_least_load_counts_and_equal_ones_take_turns():
    router = PrefixRouter(3)
    assert [router.choose([n], [0, 0, 0]) for n in range(6)] == [0, 1, 2, 0, 1, 2]
    assert router.choose([9], [3, 1, 2]) == 1
    infinite = float("inf")
    assert router.choose(PREFIXES[2], [infinite, 5, infinite]) == 1
    salted = [router.choose(PREFIXES[3], [0, 0, 0], (salt,)) for salt in "abc"]
    assert sorted(salted) == [0, 1, 2], "other adapters share no prefix"


@slow
def test_two_engines_behind_one_door():
    tokenizer = load_tokenizer("byte")
    limits = Limits(rows=2, chunk=64, length=128)
    made = [make_engine("bytes", limits=limits, tokenizer=tokenizer) for _ in range(2)]
    facts = wire.ModelFacts("tiny", None, 128, 260)
    prompts = [[kind, *range(70)] for kind in (1, 2, 1, 2, 1, 2)]

    async def serve(addresses):
        async with Engines(addresses, tokenizer) as engines:
            await engines.ready()
            cached = []
            for number, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=2)
                stream = engines.generate(prompt, params, request_id=str(number))
                cached.append([piece.cached_tokens async for piece in stream][-1])
            return cached, await engines.stats()

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(in_thread(engine, facts)) for engine in made]
        cached, stats = asyncio.run(serve([server.address for server in servers]))
    assert cached == [0, 0, 64, 64, 64, 64]
    assert [each["prompt_tokens"] for each in stats] == [3 * 71, 3 * 71]
