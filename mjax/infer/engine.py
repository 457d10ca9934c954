"""Continuous batching: requests come and go while the device works.

A step asks each lane's `Scheduler` for a plan, writes it into records, and launches a program of
decoding, of prefill, or both (`programs.py`). It then reads what the step before drew, so the
device never waits for the host. Host arrays are the truth about rows; only their last tokens stay
on the device. Invariant: a request's tokens depend on the request and the weights, not on what
runs beside it, when it came, or how often it was preempted.
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.infer.caches.paged import PAGE
from mjax.infer.checks import (
    check_engine,
    check_request,
    ids_of,
    keeps_states,
    limits_of,
    longest_window,
)
from mjax.infer.grammar import GrammarMatcher, Grammars
from mjax.infer.programs import (
    CHUNKS,
    EnginePrograms,
    PoolSizes,
    StepState,
    StepTokens,
    fitting_pages,
)
from mjax.infer.records import (
    Launched,
    Records,
    Request,
    RequestSample,
    RowWork,
    TokenUpdate,
    WarmPrograms,
    bucket,
    drafts_of,
    flat_ids,
    holding,
    kept_places,
    powers_of_two,
    read_scores,
    rules_of_rows,
    shown_tokens,
    united,
)
from mjax.infer.requests import Answer, RequestOutput, SamplingParams, token_rules
from mjax.infer.sample import Drawn, Draws, RowRules, draws_of
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.repeated_texts import Drafter, RepeatedTexts
from mjax.infer.scheduling.scheduler import Chunk, Limits, Plan, Scheduler
from mjax.infer.scheduling.scheduler import Sequence as Tokens
from mjax.infer.weights import form_of, mesh_of, require_weights, take_apart
from mjax.infer.whole_prompts import PromptItem, require_generator, whole_inputs
from mjax.models.base.params import Definition

GREEDY, LIMITED = Draws(), Draws(random=True, limited=True)
_TOP = 20  # likeliest tokens that a program gives if any are asked for


class Engine:
    """Requests from `add` to their last token, by calls of `step`. Its options:

    eos: tokens that end a text. limits: their length is at most the model's.
    pages: of 64 tokens in each lane's pool; None: as many as fit into memory.
    cache_dtype: "fp8" caches keys and values in e4m3; None: the dtype of the model.
    weight_dtype: "fp8" rounds the weights of layers' matmuls to e4m3.
    fixed_rows: whether decoding always has `limits.rows` rows: one program, compiled sooner.
    batch_invariant: whether the bits of a request do not depend on what runs beside it. All
        steps then have the largest size, and a text begins when all its pages are free.
    donate: frees `params` while they are copied.
    drafts: most tokens of a row that a step guesses and verifies. Rows then wait for the host
        between steps; it pays where few texts repeat themselves much.
    drafter: guesses tokens; None: as texts repeat themselves.
    adapters: names of those that are in slots 1, 2 .. of `params` (interop/adapter_stack.py).
    """

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
        weight_dtype: str | None = None,
        cache_prefixes: bool = True,
        fixed_rows: bool = False,
        batch_invariant: bool = False,
        donate: bool = False,
        drafts: int = 0,
        drafter: Drafter | None = None,
        adapters: Sequence[str] = (),
    ):
        """`params`: nested dict of global arrays, on a mesh or on one device.

        Raises `UserError` for a model that the engine does not serve.
        """
        require_generator(cfg)
        check_engine(cfg, dtype, cache_dtype, drafts)
        self.cfg, self.tokenizer, self.eos = cfg, tokenizer, tuple(eos)
        self.limits = limits = limits_of(cfg, limits, batch_invariant)
        self._definition, self._dtype = definition, jnp.dtype(dtype)
        self._form = form_of(weight_dtype, definition.specs)
        self._params = take_apart(definition.specs, params, self._dtype, donate, self._form)
        self._places = jax.tree.map(lambda p: p.sharding, self._params)
        rows, tokens = powers_of_two(1, limits.rows), powers_of_two(16, limits.chunk)
        decode = rows[-1:] if fixed_rows or batch_invariant else rows
        self._sizes = decode, tokens[-1:] if batch_invariant else tokens
        self._chunks = 1 if limits.prefill_alone else min(CHUNKS, rows[-1])
        width = -(-(limits.length + drafts) // PAGE)
        self._whole_sizes = [*powers_of_two(16, width * PAGE)[:-1], width * PAGE]
        first = 2 if pages is None else pages
        sizes = PoolSizes(first, limits.rows, width, cache_dtype == "fp8", drafts)
        of_model = definition, cfg, mesh_of(params), self._dtype
        self.programs = EnginePrograms(*of_model, sizes, self._form)
        if pages is None:
            self._fill_memory()
        self.lanes = self._empty_lanes(cache_prefixes and not keeps_states(cfg))
        self._records = Records(len(self.lanes), limits, width)
        self._state: StepState | None = None  # taken when the first program is launched
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self._warm = WarmPrograms()
        self._flying: deque[Launched] = deque()
        self._of_tokens: dict[Tokens, RequestSample] = {}
        self.requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self.version, self._paused, self._sleeps = 0, False, False
        self.prefills = 0  # programs of prefill so far
        self._drafts, self._drafter = drafts, drafter or RepeatedTexts()
        self.adapters = {name: slot for slot, name in enumerate(adapters, 1)}
        self.verified = self.accepted = 0  # rows of steps with drafts, and drafts that were right

    def _fill_memory(self) -> None:
        """Give the programs as many pages as fit into memory."""
        largest = (self._sizes[1][-1], self._chunks), (None, self._sizes[0][-1])
        pages = fitting_pages(self.programs, self._params, largest)
        self.programs = self.programs.resized(self.programs.sizes._replace(pages=pages))

    def _empty_lanes(self, cache_prefixes: bool) -> list[Scheduler]:
        """The schedulers of all lanes, with pools of their own."""
        pages, window = self.programs.sizes.pages, longest_window(self.cfg)
        count = range(self.programs.lanes)
        pools = [PagePool(pages, page=PAGE, cache_prefixes=cache_prefixes) for _ in count]
        return [Scheduler(self.limits, pool, window) for pool in pools]

    # ---- requests --------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        items: Mapping[str, PromptItem] | None = None,
        request_id: str | None = None,
        text: str | None = None,
    ) -> Request:
        """Put a request into the queue; its output grows with each `step`.

        items: what stands in the places of its tokens, those of an item in order, by modality.
            "vision": images fp32 [I, H, W, C] or `Tiled`; "audio": log-mel frames [I, F, M].
        text: of the prompt, which an encoder reads if the model has one.
        Raises `UserError` for one that can never run, and `QueueFull` where too much waits.
        """
        number = next(self._numbers)
        if request_id is None:
            free = map(str, itertools.count(number))
            request_id = next(id for id in free if id not in self.requests)
        prompt = ids_of(prompt)
        if self._sleeps:
            raise UserError("the engine sleeps; wake it before it gets requests")
        if self._params is None:
            raise UserError("the engine slept without weights; give them by update_weights")
        if request_id in self.requests:
            raise UserError(f"request {request_id} is running already; give another id")
        check_request(self.cfg, prompt, params, self.limits.length, self.adapters)
        rules = token_rules(params, self.tokenizer, self.cfg.vocab_size, self.eos)
        inputs = whole_inputs(self.cfg, prompt, items or {}, self._whole_sizes)
        begin = [self.cfg.decoder_start_token_id] if self.cfg.architecture.reads_target else prompt
        request = Request(RequestOutput(request_id, text, prompt, []), params, len(begin), inputs)
        if params.prompt_logprobs is not None:
            request.output.prompt_logprobs = [None] * len(prompt)
        most = params.max_tokens or self.limits.length - len(begin)
        salts = {"salt": params.cache_salt, "adapter": params.adapter}
        salt = tuple(pair for pair in salts.items() if pair[1] is not None)
        lane = min(range(len(self.lanes)), key=lambda number: self.lanes[number].load)
        for index in range(params.n):
            answer = Answer(params, rules, self.tokenizer, prompt, index, self._matcher(params))
            tokens = Tokens(number, begin, len(begin) + most, params.priority, salt)
            tokens.waits, tokens.whole = answer.waits, inputs is not None
            tokens.reads_prefix = params.prompt_logprobs is None or index > 0
            seed = (number if params.seed is None else params.seed) % 2**32
            wanted = params.logprobs or params.prompt_logprobs
            top = min(_TOP, self.cfg.vocab_size) if wanted else 0
            draws = draws_of([params.sampling], top)
            sample = RequestSample(request, answer, tokens, seed, draws, lane)
            sample.adapter = self.adapters.get(params.adapter, 0)
            request.samples.append(sample)
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

    def step(self) -> list[TokenUpdate]:
        """Launch the next work of all lanes and return tokens of the work before."""
        if self._paused:
            return self._read(all_but=0)
        found: list[TokenUpdate] = []
        self._guess()
        plans = [self._plan(lane, found) for lane in self.lanes]
        before = len(self._flying)
        decode, prefill = [], []
        for plan in plans:
            # Samples of a plan may have ended since: a later lane may have read all tokens.
            rows = [t for t in plan.decode if t in self._of_tokens]
            chunks = [chunk for chunk in plan.chunks if chunk.sequence in self._of_tokens]
            decode.append([RowWork(self._of_tokens[t], t.computed - 1, 1, True) for t in rows])
            prefill.append(list(map(self._work, chunks)))
        if any(decode):
            rows = holding(self._sizes[0], max(map(len, decode)))
            always = self.limits.computes_once  # the program does not depend on others' drafts
            drafts = drafts_of(decode, rows, self._drafts, always)
            self._launch(decode, rows, StepTokens(drafts=drafts))
        for lane, chunks in enumerate(prefill):
            if chunks and chunks[0].sample.tokens.whole:
                alone = [chunks if number == lane else [] for number in range(len(prefill))]
                self._prefill(alone, 1, self._whole_sizes, self._inputs(chunks[0].sample))
                prefill[lane] = []
        while any(prefill):
            part = [chunks[: self._chunks] for chunks in prefill]
            self._prefill(part, self._chunks, self._sizes[1])
            prefill = [chunks[self._chunks :] for chunks in prefill]
        # Guesses need all tokens before them.
        return found + self._read(all_but=0 if self._drafts else len(self._flying) - before)

    # ---- weights and memory ----------------------------------------------------------------------

    def pause(self) -> list[TokenUpdate]:
        """Launch nothing more; returns the tokens in flight. Requests stay where they are."""
        self._paused = True
        return self._read(all_but=0)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def update_weights(self, params: dict, *, donate: bool = False) -> list[TokenUpdate]:
        """Go on with other weights of the same model and mesh, without a new compile.

        Returns the tokens that were in flight. Prefixes of earlier weights are forgotten; caches of
        running requests stay, and each token's `weight_versions` says which weights made it.
        Raises `UserError` for arrays of another model, and goes on with the weights it has.
        """
        require_weights(self._definition.specs, params)
        found = self._read(all_but=0)
        self._params = None  # memory for one copy is enough
        apart = take_apart(self._definition.specs, params, self._dtype, donate, self._form)
        self._params = jax.device_put(apart, self._places)
        self.version += 1
        for lane in self.lanes:
            lane.pool.forget()
        return found

    def sleep(self, *, weights: bool = False) -> None:
        """Free the caches. Raises `UserError` while requests run.

        weights: lets go of them, too; `update_weights` gives others.
        """
        if self.requests or self._flying:
            raise UserError("the engine has requests; finish or abort them before it sleeps")
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state, self._sleeps = None, True
        if weights:
            self._params = None
        for lane in self.lanes:
            lane.pool.forget()

    def wake(self) -> None:
        """Take requests again after `sleep`."""
        self._sleeps = False

    def warm_up(self, draws: Sequence[Draws] = (GREEDY, LIMITED), all_rules: bool = False) -> int:
        """Compile the programs of all sizes for these kinds of draws; returns their number.

        From then on a step takes the first of these kinds that does all that its rows need.
        `all_rules`: the last one also takes rules of rows, and scores prompts. The compiler tries
        kernels in memory that the caches take with the first request.
        """
        if self._sleeps or self._params is None:
            raise UserError("the engine sleeps or has no weights; wake it, or give it some")
        warm = WarmPrograms(tuple(draws), all_rules)
        if any(kind.penalties for kind in draws):
            self._begin_counts()
            for size in powers_of_two(16, self.limits.length):  # in the slot of no row
                ids = np.full(size, -1, np.int32)
                self._state = self.programs.count(self._state, self.limits.rows, ids, ids > 0)
        sizes = self._sizes, self._chunks, self._drafts, self.cfg.vocab_size
        calls = warm.inputs(self._records, *sizes)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda call: self._program(*call), calls))
        self._warm = warm
        return len(self._compiled)

    # ---- a step ----------------------------------------------------------------------------------

    def _plan(self, lane: Scheduler, found: list[TokenUpdate]) -> Plan:
        """The plan of a lane; `found` gets the tokens that had to be read first."""
        plan = lane.plan()
        if not plan.drain:
            return plan
        found += self._read(all_but=0)
        return lane.plan()

    def _guess(self) -> None:
        """Give drafts to all rows that may have some."""
        if not self._drafts:
            return
        rows = [self._of_tokens[t] for lane in self.lanes for t in lane.running.values()]
        rows = [sample for sample in rows if sample.may_draft]
        proposed = self._drafter.propose(rows, self._drafts)
        for sample, drafts in zip(rows, proposed, strict=True):
            sample.tokens.drafts = drafts[: self._drafts]

    def _work(self, chunk: Chunk) -> RowWork:
        return RowWork(self._of_tokens[chunk.sequence], chunk.first, chunk.count, chunk.samples)

    def _inputs(self, sample: RequestSample) -> Mapping:
        """The inputs of a whole prompt; each lane gets them, of which one has its tokens."""
        lanes = len(self.lanes)
        return jax.tree.map(lambda array: np.repeat(array, lanes, 0), sample.request.inputs)

    def _prefill(
        self,
        work: list[list[RowWork]],
        rows: int,
        sizes: Sequence[int],
        inputs: Mapping | None = None,
    ) -> None:
        """Launch a program of prefill."""
        self.prefills += 1
        ids, labels = flat_ids(work, sizes), None
        if any(entry.sample.scores_prompt for lane in work for entry in lane):
            labels = flat_ids(work, sizes, ahead=1)
        self._launch(work, rows, StepTokens(ids, labels, inputs=inputs))

    def _launch(self, work: list[list[RowWork]], rows: int, given: StepTokens) -> None:
        """Launch a program for the work of all lanes."""
        records = self._records.write(work, rows)
        places: list[RequestSample | None] = [None] * len(records)
        samples: dict[int, RequestSample] = {}
        for number, entries in enumerate(work):
            for place, entry in enumerate(entries, number * rows):
                places[place] = entry.sample
                if entry.samples:
                    samples[place] = entry.sample
        if self._state is None:
            self._state = self.programs.empty()
        rules = rules_of_rows(places, self.cfg.vocab_size)
        draws = united([sample.draws for sample in places if sample is not None])
        size = len(records), self.cfg.vocab_size
        draws, rules = self._warm.choose(draws, rules, given, *size)
        if draws.penalties:
            self._count(filter(None, places))
        program = self._program(given, records, rules, draws)
        self._state, *results = program(self._params, self._state, given, records, rules)
        for array in jax.tree.leaves(results):
            array.copy_to_host_async()
        self._flying.append(Launched(*results, samples, self.version, given.drafts, work))

    def _program(
        self, given: StepTokens, records: np.ndarray, rules: RowRules, draws: Draws
    ) -> jax.stages.Compiled:
        """The compiled program for inputs of these shapes."""
        arrays, tree = jax.tree.flatten((given, records, rules))
        state = self.programs.abstract_state if self._state is None else self._state
        key = *((x.shape, x.dtype) for x in arrays), tree, draws, state.counts is None
        if key not in self._compiled:
            inputs = self._params, state, given, records, rules
            self._compiled[key] = self.programs.step.lower(*inputs, draws=draws).compile()
        return self._compiled[key]

    def _count(self, samples: Iterable[RequestSample]) -> None:
        """Count the tokens of samples with penalties that have taken a slot since."""
        self._begin_counts()
        for sample in samples:
            tokens = sample.tokens
            if not sample.draws.penalties or sample.counted == tokens.admissions:
                continue
            sample.counted = tokens.admissions
            ids = np.full(bucket(len(tokens.tokens)), -1, np.int32)
            ids[: len(tokens.tokens)] = tokens.tokens
            is_output = np.arange(len(ids)) >= sample.request.given
            slot = sample.lane * (self.limits.rows + 1) + tokens.slot
            self._state = self.programs.count(self._state, slot, ids, is_output)

    def _begin_counts(self) -> None:
        if self._state is None:
            self._state = self.programs.empty()
        if self._state.counts is None:
            self._state = self._state._replace(counts=self.programs.empty_counts())

    # ---- results ---------------------------------------------------------------------------------

    def _read(self, all_but: int) -> list[TokenUpdate]:
        """The tokens of programs in flight but the last launched ones; waits for them."""
        found = []
        while len(self._flying) > all_but:
            drawn, scores, samples, version, drafts, work = self._flying.popleft()
            drawn, scores = jax.tree.map(np.asarray, (drawn, scores))
            if scores is not None:
                read_scores(work, scores)
            for place, sample in samples.items():
                kept = kept_places(drawn.token, drafts, place)
                for number in kept:
                    if not sample.has_ended:
                        text = self._push(sample, drawn, number, version, number > kept[0])
                        found.append(TokenUpdate(sample.request, sample, text))
                self.verified += drafts is not None and drafts[place, 0] >= 0
                self.accepted += len(kept) - 1
        return found

    def _push(
        self, sample: RequestSample, drawn: Drawn, place: int, version: int, after_draft: bool
    ) -> str:
        """Add a drawn token to its sample; returns the text that is now certain."""
        tokens, token = sample.tokens, int(drawn.token[place])
        top = shown_tokens(drawn, place, sample.request.params.logprobs or 0)
        logprobs = float(drawn.logprob[place]), float(drawn.processed[place])
        text = sample.answer.push(token, *logprobs, top, version)
        if len(tokens.tokens) + 1 >= tokens.limit:
            text += sample.answer.finish("length")
        if sample.has_ended:  # a step that has the last token in it may be planned, never launched
            self._end(sample)
        else:
            self.lanes[sample.lane].read(tokens, token, after_draft=after_draft)
        return text

    def _end(self, sample: RequestSample) -> None:
        """Give back what a sample has, and end its request with its last one."""
        output = sample.request.output
        output.num_cached_tokens = sample.request.samples[0].tokens.hits
        self.lanes[sample.lane].finish(sample.tokens)
        self._of_tokens.pop(sample.tokens, None)
        if all(other.has_ended for other in sample.request.samples):
            output.finished = True
            self.requests.pop(output.request_id, None)

    # ---- parts -----------------------------------------------------------------------------------

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
