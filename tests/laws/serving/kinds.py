"""Tiny models of every kind of cache, their engines, and the plain forward that both equal."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import MeshConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.infer.engine import Engine
from mjax.infer.records import Request, RequestSample
from mjax.infer.requests import RequestOutput, SamplingParams
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Limits, Scheduler
from mjax.models import Definition, build, split
from mjax.pipeline.storage import sharded_by_stages
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import is_spec
from tests.tiny_mixers import DELTAS, LATENT

PAGE = 16  # tokens of a page in these tests (conftest.py)
PAGES, ROWS, LENGTH, CHUNK = 40, 4, 128, 64
VOCAB = 252
# Logits whose distance is smaller are a tie, which rounding may decide either way.
GAP = 1e-3
SMALL = {
    "vocab_size": VOCAB,
    "vocab_multiple": 4,
    "hidden_size": 32,
    "attention.num_attention_heads": 4,
    "attention.num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": LENGTH,
}
MAMBA = {
    "mamba.mamba_num_heads": 8,
    "mamba.mamba_head_dim": 8,
    "mamba.state_size": 6,
    "mamba.n_groups": 2,
    "mamba.chunk_size": 8,
}
EXPERTS = {"moe.num_experts": 4, "moe.num_experts_per_tok": 2, "moe.moe_intermediate_size": 16}
KINDS = {
    "keys and values": {},
    "windows in turn": {"layer_pattern": "LG", "attention.sliding_window": 20},
    "windows alone": {"layer_pattern": "L", "attention.sliding_window": 20},
    "sinks": {
        "attention.attention_sinks": True,
        "attention.attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 9.0,
        "position_embedding": "learned",
    },
    "latent": LATENT,
    "mamba": {"layer_pattern": "M", **MAMBA},
    "deltanet": DELTAS,
    "hybrid": {"layer_pattern": "[M|G]E", **MAMBA, **EXPERTS},
    "experts": {"layer_pattern": "GE", **EXPERTS},
}
BYTES = {"vocab_size": 260}
# For texts, and for stages of a pipeline.
STAGED = {
    "three layers": {"num_hidden_layers": 3},
    "five windows in turn": KINDS["windows in turn"] | {"num_hidden_layers": 5},
    "hybrid of five": KINDS["hybrid"] | {"layer_pattern": "M[M|G]EME", "num_hidden_layers": 5},
    "latent experts": KINDS["latent"] | EXPERTS | {"layer_pattern": "AEAE", "num_hidden_layers": 4},
}
KINDS_OF = KINDS | {"bytes": BYTES} | STAGED
# Ids as letters, so that text is legible.
LETTERS = Tokenizer(
    VOCAB,
    None,
    lambda texts: [[max(ord(letter) - 0x4E00, 0) for letter in text] for text in texts],
    lambda ids: "".join(chr(0x4E00 + i) for i in ids),
)


class Model(NamedTuple):
    """A model and its plain forward: logits(params, tokens [B, LENGTH])."""

    cfg: ModelConfig
    definition: Definition
    params: dict
    logits: jax.stages.Wrapped


@functools.cache
def model(kind: str) -> Model:
    cfg = ModelConfig(**nested({**SMALL, **KINDS_OF[kind]}))
    definition, params = split(build(cfg, nnx.Rngs(0)))
    return Model(cfg, definition, params, jax.jit(lambda p, t: definition.bind(p)(t)))


def on_mesh(definition: Definition, params: dict, mesh: Mapping[str, int]) -> dict:
    """Parameters on the first fake devices."""
    count = int(np.prod(list(mesh.values())))
    made = make_mesh(MeshConfig(**{"dp": 1, **mesh}), jax.devices()[:count])
    places = jax.tree.map(partial(sharded_by_stages, mesh=made), definition.specs, is_leaf=is_spec)
    return jax.tree.map(jax.device_put, params, places)


def make_engine(
    kind: str, mesh: Mapping[str, int] | None = None, *, all_sizes: bool = False, **options
) -> Engine:
    """A new engine with few pages and rows.

    all_sizes: programs have as few rows and tokens as work needs; else the most, so that few are
    compiled.
    """
    cfg, definition, params, _ = model(kind)
    params = on_mesh(definition, params, mesh) if mesh else params
    limits = options.pop("limits", Limits(rows=ROWS, chunk=CHUNK, length=LENGTH))
    given = {"dtype": "float32", "tokenizer": LETTERS, "pages": PAGES} | options
    made = Engine(definition, params, cfg, limits=limits, **given)
    return made if all_sizes else with_few_programs(made)


def with_few_programs(given: Engine) -> Engine:
    """The engine, whose programs have the most rows and tokens from now on."""
    given.runner.sizes = tuple(sizes[-1:] for sizes in given.runner.sizes)
    return given


@functools.cache
def _kept(kind: str, mesh: tuple, options: tuple) -> Engine:
    return make_engine(kind, dict(mesh), **dict(options))


def engine(kind: str, mesh: Mapping[str, int] = {}, **options) -> Engine:  # noqa: B006 - read only
    """An engine that keeps its programs from test to test and forgets all else."""
    return emptied(_kept(kind, tuple(mesh.items()), tuple(options.items())))


def emptied(given: Engine, chunk: int = CHUNK, pages: int = PAGES) -> Engine:
    """The engine with empty pools, as if it had been made with these limits."""
    for left in list(given.requests):  # by a test that failed
        given.abort(left)
    limits = replace(given.limits, chunk=chunk)
    given.lanes = [
        Scheduler(limits, emptied_pool(lane.pool, pages), lane.window) for lane in given.lanes
    ]
    return given


def emptied_pool(pool: PagePool, pages: int) -> PagePool:
    kept = {"cache_prefixes": pool.cache_prefixes, "snapshots": pool.snapshots}
    return PagePool(pages, page=PAGE, **kept)


@dataclass(frozen=True)
class Ask:
    """A request. arrives: the step before which it does."""

    prompt: Sequence[int]
    params: SamplingParams
    arrives: int = 0


def requested(given: Engine, asks: Iterable[Ask]) -> list[Request]:
    """All requests, served to their ends."""
    waiting = dict(enumerate(asks))
    made: dict[int, Request] = {}
    step = 0
    while waiting or given.has_work:
        for number in [n for n, ask in waiting.items() if ask.arrives <= step]:
            ask = waiting.pop(number)
            made[number] = given.add(ask.prompt, ask.params)
        given.step()
        step += 1
        assert step < 3000, "the engine does not come to an end"
    at_rest(given)
    return [made[n] for n in sorted(made)]


def served(given: Engine, asks: Iterable[Ask]) -> list[RequestOutput]:
    return [request.output for request in requested(given, asks)]


def at_rest(given: Engine) -> None:
    """Nothing is left of requests that have ended."""
    assert not given.has_work and not given.requests and not given._by_sequence
    for lane in given.lanes:
        pool = lane.pool
        assert pool.used == 0 and pool.free + pool.cached == pool.pages - 1
        assert not lane.running and not lane.waiting


def preemptions(requests: Iterable[Request]) -> int:
    samples: list[RequestSample] = [sample for request in requests for sample in request.samples]
    return sum(max(sample.sequence.admissions - 1, 0) for sample in samples)


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def logprobs_of(outputs: Iterable[RequestOutput]) -> list[list[list[float]]]:
    return [[sample.logprobs for sample in output.outputs] for output in outputs]


def scored(kind: str, outputs: Sequence[RequestOutput], params: dict | None = None):
    """For each sample, logits of the plain forward at its tokens, fp32 [tokens, V]."""
    given = model(kind)
    texts = [
        (output.prompt_token_ids, sample.token_ids)
        for output in outputs
        for sample in output.outputs
    ]
    rows = np.zeros((8, LENGTH), np.int32)
    found = []
    for first in range(0, len(texts), len(rows)):
        part = texts[first : first + len(rows)]
        for row, (prompt, made) in zip(rows, part, strict=False):
            row[: len(prompt) + len(made)] = [*prompt, *made]
        logits = np.asarray(given.logits(given.params if params is None else params, rows))
        for row, (prompt, made) in zip(logits, part, strict=False):
            found.append(row[len(prompt) - 1 : len(prompt) - 1 + len(made)])
    return found


def assert_greedy(
    kind: str, outputs: Sequence[RequestOutput], params: dict | None = None, bound: float = 1e-4
) -> None:
    """Each token is the plain forward's likeliest, or within GAP of it, and has its log-prob."""
    samples = [sample for output in outputs for sample in output.outputs]
    for sample, logits in zip(samples, scored(kind, outputs, params), strict=True):
        chosen = logits[np.arange(len(logits)), sample.token_ids]
        np.testing.assert_array_less(logits.max(-1) - chosen, GAP)
        wanted = chosen - np.asarray(jax.nn.logsumexp(jnp.asarray(logits), -1))
        np.testing.assert_allclose(sample.logprobs, wanted, rtol=0, atol=bound)
