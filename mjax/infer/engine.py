"""Continuous batching: requests come and go while the device works.

A step asks each lane's `Scheduler` for a plan, writes it into records, and launches a program of
decoding, of prefill, or both (`programs.py`). It then reads what the step before drew, so the
device never waits for the host. Host arrays are the truth about rows; only their last tokens stay
on the device. Invariant: a request's tokens depend on the request and the weights, not on what
runs beside it, when it came, or how often it was preempted.
"""

import functools
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError, or_user_error
from mjax.infer.cache import require_decoder
from mjax.infer.generate import mesh_of
from mjax.infer.grammar import GrammarMatcher, Grammars
from mjax.infer.programs import CHUNKS, EnginePrograms, PoolSizes, fitting_pages
from mjax.infer.records import (
    Records,
    Request,
    Sample,
    Work,
    flat_ids,
    holding,
    powers_of_two,
    rules_of,
    united,
)
from mjax.infer.requests import Answer, RequestOutput, SamplingParams, resolve
from mjax.infer.sample import Drawn, Draws, RowRules, draws_of
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Chunk, Limits, Plan, Scheduler
from mjax.infer.scheduling.scheduler import Sequence as Tokens
from mjax.infer.weights import require_weights, take_apart
from mjax.models.attention.paged import PAGE
from mjax.models.base.params import Definition

GREEDY, LIMITED = Draws(), Draws(random=True, limited=True)
DTYPES = "bfloat16", "float32", "float16"
_TOP = 20  # likeliest tokens that a program gives if any are asked for


class Update(NamedTuple):
    """A new token of a sample: text is what became certain with it."""

    request: Request
    sample: Sample
    text: str


class Launched(NamedTuple):
    """A program in flight: what it draws, for which samples by place, with which weights."""

    drawn: Drawn
    samples: dict[int, Sample]
    version: int


class Engine:
    """Requests from `add` to their last token, by calls of `step`."""

    def __init__(
        self,
        definition: Definition,
        params: dict,
        cfg: ModelConfig,
        *,
        dtype: str = "bfloat16",
        tokenizer: Tokenizer | None = None,
        eos: Sequence[int] = (),
        limits: Limits = Limits(),  # noqa: B008 - frozen
        pages: int | None = None,
        cache_dtype: str | None = None,
        cache_prefixes: bool = True,
        donate: bool = False,
    ):
        """`params`: nested dict of global arrays, on a mesh or on one device.

        eos: tokens that end a text. limits: their length is at most the model's.
        pages: of 64 tokens in each lane's pool; None: as many as fit into memory.
        cache_dtype: "fp8" caches keys and values in e4m3; None: the dtype of the model.
        donate: frees `params` while they are copied.
        Raises `UserError` for a model that the engine does not serve.
        """
        require_decoder(cfg)
        if cache_dtype not in (None, "fp8"):
            raise UserError(f"cache_dtype={cache_dtype}: give fp8, or nothing for the model's own")
        if dtype not in DTYPES:
            raise UserError(f"dtype={dtype}: give one of {', '.join(DTYPES)}")
        self.cfg, self.tokenizer, self.eos = cfg, tokenizer, tuple(eos)
        self.limits = limits = limits_of(cfg, limits)
        self._definition, self._dtype = definition, jnp.dtype(dtype)
        self._params = take_apart(definition.specs, params, self._dtype, donate)
        self._sizes = powers_of_two(1, limits.rows), powers_of_two(16, limits.chunk)
        self._chunks = 1 if limits.prefill_alone else CHUNKS
        width = -(-limits.length // PAGE)
        sizes = PoolSizes(2 if pages is None else pages, limits.rows, width, cache_dtype == "fp8")
        self.programs = EnginePrograms(definition, cfg, mesh_of(params), self._dtype, sizes)
        if pages is None:
            largest = (self._sizes[1][-1], self._chunks), (None, self._sizes[0][-1])
            pages = fitting_pages(self.programs, self._params, largest)
            sizes = sizes._replace(pages=pages)
            self.programs = self.programs.resized(sizes)
        lanes, caches = self.programs.lanes, cache_prefixes and not _is_recurrent(cfg)
        self.lanes = [
            Scheduler(limits, PagePool(sizes.pages, page=PAGE, cache_prefixes=caches), _window(cfg))
            for _ in range(lanes)
        ]
        self._records = Records(lanes, limits, width)
        self._state = self.programs.empty()
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self._warm: tuple[Draws, ...] = ()
        self._flying: deque[Launched] = deque()
        self._of_tokens: dict[Tokens, Sample] = {}
        self.requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self.version, self._paused = 0, False
        self.prefills = 0  # programs of prefill so far

    # ---- requests --------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        request_id: str | None = None,
        text: str | None = None,
    ) -> Request:
        """Put a request into the queue; its output grows with each `step`.

        text: of the prompt.
        Raises `UserError` for one that can never run, and `QueueFull` where too much waits.
        """
        number = next(self._numbers)
        if request_id is None:
            ids = map(str, itertools.count(number))
            request_id = next(id for id in ids if id not in self.requests)
        prompt = _ids_of(prompt)
        self._check(request_id, prompt, params)
        rules = resolve(params, self.tokenizer, self.cfg.vocab_size, self.eos)
        request = Request(RequestOutput(request_id, text, prompt, []), params)
        most = params.max_tokens or self.limits.length - len(prompt)
        salt = () if params.cache_salt is None else (("salt", params.cache_salt),)
        lane = min(range(len(self.lanes)), key=self._load)
        for index in range(params.n):
            answer = Answer(params, rules, self.tokenizer, prompt, index, self._matcher(params))
            tokens = Tokens(number, prompt, len(prompt) + most, params.priority, salt)
            tokens.waits = answer.waits
            seed = (number if params.seed is None else params.seed) % 2**32
            top = min(_TOP, self.cfg.vocab_size) if params.logprobs else 0
            draws = draws_of([params.sampling], top)
            request.samples.append(Sample(request, answer, tokens, seed, draws, lane))
            request.output.outputs.append(answer.output)
        self._enqueue(request, self.lanes[lane])
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """End a request where it is; nothing happens if it has ended."""
        request = self.requests.get(request_id)
        for sample in request.samples if request else ():
            sample.answer.finish("abort")
            self._end(sample)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do; a paused engine has not."""
        return bool(self._flying or (self.requests and not self._paused))

    def step(self) -> list[Update]:
        """Launch the next work of all lanes and return tokens of the work before."""
        if self._paused:
            return self._read(all_but=0)
        found: list[Update] = []
        plans = [self._plan(lane, found) for lane in self.lanes]
        before = len(self._flying)
        decode, prefill = [], []
        for plan in plans:
            # Samples of a plan may have ended since: a later lane may have read all tokens.
            rows = [t for t in plan.decode if t in self._of_tokens]
            chunks = [chunk for chunk in plan.chunks if chunk.sequence in self._of_tokens]
            decode.append([Work(self._of_tokens[t], t.computed - 1, 1, True) for t in rows])
            prefill.append(list(map(self._work, chunks)))
        if any(decode):
            self._launch(decode, holding(self._sizes[0], max(map(len, decode))))
        while any(prefill):
            self.prefills += 1
            self._launch([chunks[: self._chunks] for chunks in prefill], None)
            prefill = [chunks[self._chunks :] for chunks in prefill]
        return found + self._read(all_but=len(self._flying) - before)

    # ---- weights and memory ----------------------------------------------------------------------

    def pause(self) -> list[Update]:
        """Launch nothing more; returns the tokens in flight. Requests stay where they are."""
        self._paused = True
        return self._read(all_but=0)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def update_weights(self, params: dict, *, donate: bool = False) -> list[Update]:
        """Go on with other weights of the same model and mesh, without a new compile.

        Returns the tokens that were in flight. Prefixes of earlier weights are forgotten; caches of
        running requests stay, and each token's `weight_versions` says which weights made it.
        Raises `UserError` for arrays of another model, and goes on with the weights it has.
        """
        require_weights(self._definition.specs, params)
        found = self._read(all_but=0)
        places = jax.tree.map(lambda p: p.sharding, self._params)
        self._params = None  # memory for one copy is enough
        apart = take_apart(self._definition.specs, params, self._dtype, donate)
        self._params = jax.device_put(apart, places)
        self.version += 1
        for lane in self.lanes:
            lane.pool.forget()
        return found

    def sleep(self) -> None:
        """Free the caches. Raises `UserError` while requests run."""
        if self.requests or self._flying:
            raise UserError("the engine has requests; finish or abort them before it sleeps")
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = None
        for lane in self.lanes:
            lane.pool.forget()

    def wake(self) -> None:
        """Take memory for caches again after `sleep`."""
        if self._state is None:
            self._state = self.programs.empty()

    def warm_up(self, draws: Sequence[Draws] = (GREEDY, LIMITED)) -> int:
        """Compile the programs of all sizes for these kinds of draws; returns their number.

        From then on a step takes the first of these kinds that does all that its rows need.
        """
        if self._state is None:
            raise UserError("the engine sleeps; wake it before it warms up")
        if any(kind.penalties for kind in draws):
            self._begin_counts()
        rows, tokens = self._sizes
        inputs = [(None, self._records.empty(n)) for n in rows]
        for count in tokens:
            ids = np.zeros((len(self.lanes), count), np.int32)
            inputs.append((ids, self._records.empty(self._chunks)))
        calls = [(*pair, RowRules(), kind) for pair in inputs for kind in draws]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda call: self._program(*call), calls))
        self._warm = tuple(draws)
        return len(self._compiled)

    # ---- a step ----------------------------------------------------------------------------------

    def _plan(self, lane: Scheduler, found: list[Update]) -> Plan:
        """The plan of a lane; `found` gets the tokens that had to be read first."""
        plan = lane.plan()
        if not plan.drain:
            return plan
        found += self._read(all_but=0)
        return lane.plan()

    def _work(self, chunk: Chunk) -> Work:
        return Work(self._of_tokens[chunk.sequence], chunk.first, chunk.count, chunk.samples)

    def _launch(self, work: list[list[Work]], rows: int | None) -> None:
        """Launch a program for the work of all lanes: of decoding `rows` rows, or of prefill."""
        ids = None if rows else flat_ids(work, self._sizes[1])
        rows = rows or self._chunks
        records = self._records.write(work, rows)
        places: list[Sample | None] = [None] * len(records)
        samples: dict[int, Sample] = {}
        for number, entries in enumerate(work):
            for place, entry in enumerate(entries, number * rows):
                places[place] = entry.sample
                if entry.samples:
                    samples[place] = entry.sample
        rules = rules_of(places, self.cfg.vocab_size)
        draws = united([sample.draws for sample in places if sample is not None])
        draws = next((kind for kind in self._warm if kind.covers(draws)), draws)
        if draws.penalties:
            self._count(filter(None, places))
        program = self._program(ids, records, rules, draws)
        self._state, drawn = program(self._params, self._state, ids, records, rules)
        for array in jax.tree.leaves(drawn):
            array.copy_to_host_async()
        self._flying.append(Launched(drawn, samples, self.version))

    def _program(
        self, ids: np.ndarray | None, records: np.ndarray, rules: RowRules, draws: Draws
    ) -> jax.stages.Compiled:
        """The compiled program for inputs of these shapes."""
        shapes = [None if x is None else x.shape for x in (ids, records, *vars(rules).values())]
        key = *shapes, draws, self._state.counts is None
        if key not in self._compiled:
            inputs = self._params, self._state, ids, records, rules
            self._compiled[key] = self.programs.step.lower(*inputs, draws=draws).compile()
        return self._compiled[key]

    def _count(self, samples: Iterable[Sample]) -> None:
        """Count the tokens of samples with penalties that have taken a slot since."""
        self._begin_counts()
        for sample in samples:
            tokens = sample.tokens
            if not sample.draws.penalties or sample.counted == tokens.admissions:
                continue
            sample.counted = tokens.admissions
            size = holding(powers_of_two(16, self.limits.length), len(tokens.tokens))
            ids = np.full(size, -1, np.int32)
            ids[: len(tokens.tokens)] = tokens.tokens
            is_output = np.arange(size) >= len(sample.request.output.prompt_token_ids)
            slot = np.int32(sample.lane * (self.limits.rows + 1) + tokens.slot)
            self._state = self.programs.count(self._state, slot, ids, is_output)

    def _begin_counts(self) -> None:
        if self._state.counts is None:
            self._state = self._state._replace(counts=self.programs.empty_counts())

    # ---- results ---------------------------------------------------------------------------------

    def _read(self, all_but: int) -> list[Update]:
        """The tokens of programs in flight but the last launched ones; waits for them."""
        found = []
        while len(self._flying) > all_but:
            drawn, samples, version = self._flying.popleft()
            drawn = jax.tree.map(np.asarray, drawn)
            for place, sample in samples.items():
                if not sample.has_ended:
                    text = self._push(sample, drawn, place, version)
                    found.append(Update(sample.request, sample, text))
        return found

    def _push(self, sample: Sample, drawn: Drawn, place: int, version: int) -> str:
        """Add a drawn token to its sample; returns the text that is now certain."""
        tokens, token = sample.tokens, int(drawn.token[place])
        self.lanes[sample.lane].read(tokens, token)
        top, most = None, sample.request.params.logprobs
        if most:
            best = drawn.top_ids[place].tolist(), drawn.top_logprobs[place].tolist()
            top = dict(itertools.islice(zip(*best, strict=True), most))
        logprobs = float(drawn.logprob[place]), float(drawn.processed[place])
        text = sample.answer.push(token, *logprobs, top, version)
        if len(tokens.tokens) >= tokens.limit:
            text += sample.answer.finish("length")
        if sample.has_ended:
            self._end(sample)
        return text

    def _end(self, sample: Sample) -> None:
        """Give back what a sample has, and end its request with its last one."""
        output = sample.request.output
        output.num_cached_tokens = max(output.num_cached_tokens, sample.tokens.hits)
        self.lanes[sample.lane].finish(sample.tokens)
        self._of_tokens.pop(sample.tokens, None)
        if all(other.has_ended for other in sample.request.samples):
            output.finished = True
            self.requests.pop(output.request_id, None)

    # ---- parts -----------------------------------------------------------------------------------

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        """Raise `UserError` for a request that cannot be served."""
        if not isinstance(params, SamplingParams):
            raise UserError(f"params is a {type(params).__name__}; give SamplingParams(..)")
        missing = {"adapter": "leave it out", "prompt_logprobs": "use mjax evaluate"}
        for name, remedy in missing.items():
            if getattr(params, name) is not None:
                raise UserError(f"SamplingParams: {name} is not built in the engine; {remedy}")
        if self._state is None:
            raise UserError("the engine sleeps; wake it before it gets requests")
        if request_id in self.requests:
            raise UserError(f"request {request_id} is running already; give another id")
        if not prompt or min(prompt) < 0 or max(prompt) >= self.cfg.vocab_size:
            raise UserError(
                f"a prompt of {len(prompt)} tokens: give one or more ids in [0, "
                f"{self.cfg.vocab_size}), by the tokenizer that the model was trained with"
            )
        if len(prompt) >= self.limits.length:
            raise UserError(
                f"a prompt of {len(prompt)} tokens leaves no room for a new one within "
                f"{self.limits.length}, the longest text here; shorten it"
            )

    def _matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """Follows one sample through the form that a request gives."""
        if params.structured is None:
            return None
        return self._grammars.matcher(params.structured)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.cfg.vocab_size, self.eos)

    def _enqueue(self, request: Request, lane: Scheduler) -> None:
        """Give all samples to a scheduler, or none where it refuses one."""
        try:
            for sample in request.samples:
                lane.add(sample.tokens)
                self._of_tokens[sample.tokens] = sample
        except UserError:
            for sample in request.samples:
                lane.finish(sample.tokens)
                self._of_tokens.pop(sample.tokens, None)
            raise

    def _load(self, number: int) -> int:
        lane = self.lanes[number]
        return len(lane.running) + len(lane.waiting)


def _ids_of(prompt: Sequence[int]) -> list[int]:
    wrong = f"a prompt is a {type(prompt).__name__}: {{reason}}; give a list of token ids"
    with or_user_error(wrong, TypeError):
        return [operator.index(token) for token in prompt]


def limits_of(cfg: ModelConfig, given: Limits) -> Limits:
    """Limits that a model allows: its length, and one prompt at a time where it has states."""
    length = given.length
    if cfg.position_embedding != "relative":
        length = min(length, cfg.max_position_embeddings)
    alone = given.prefill_alone or _is_recurrent(cfg)
    return replace(given, length=length, prefill_alone=alone)


def _is_recurrent(cfg: ModelConfig) -> bool:
    """Whether a branch keeps a state, which only all tokens before give."""
    return any(BRANCHES[word].role == "recurrent" for word in cfg.branches)


def _window(cfg: ModelConfig) -> int | None:
    """The tokens that a query sees if each attention layer has a window."""
    attention = [BRANCHES[word] for word in cfg.branches if BRANCHES[word].has_heads]
    if attention and all(branch.windowed for branch in attention):
        return cfg.attention.sliding_window
    return None
