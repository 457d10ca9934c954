"""Continuous batching: requests come and go while the device works.

A step asks each lane's `Scheduler` for a plan and has its work launched (`step_runner.py`), as a
program of decoding, of prefill, or both. It then reads what the step before drew, so the device
never waits for the host. Host arrays are the truth about rows; only their last tokens stay
on the device. Invariant: a request's tokens depend on the request and the weights, not on what
runs beside it, when it came, or how often it was preempted.
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.infer.caches.paged import PAGE
from mjax.infer.checks import (
    DRAFTERS,
    check_drafts,
    check_engine,
    check_request,
    ids_of,
    keeps_states,
    limits_of,
    longest_window,
    snapshots_of,
)
from mjax.infer.drafting.repeated_texts import Drafter
from mjax.infer.grammar import GrammarMatcher, Grammars
from mjax.infer.programs import TOP
from mjax.infer.records import Request, RequestSample, RowWork, TokenUpdate, shown_tokens
from mjax.infer.requests import Answer, RequestOutput, SamplingParams, token_rules
from mjax.infer.sample import Draws, draws_of
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Chunk, Limits, Plan, Scheduler, TokenSequence
from mjax.infer.step_runner import Result, StepRunner
from mjax.infer.whole_prompts import PromptItem, position_shift, require_generator, whole_inputs
from mjax.models.base.params import Definition

GREEDY, RANDOM, LIMITED = Draws(), Draws(random=True), Draws(random=True, limited=True)


class Engine:
    """Requests from `add` to their last token, by calls of `step`. Its options:

    eos: tokens that end a text. limits: their length is at most the model's.
    pages: of 64 tokens in each lane's pool; None: as many as fit into memory.
    cache_dtype: "fp8" caches keys and values in e4m3; None: the dtype of the model.
    weight_dtype: "fp8" rounds the weights of layers' matmuls to e4m3.
    fixed_rows: whether decoding always has `limits.rows` rows: one program, compiled sooner.
    batch_invariant: whether the bits of a request do not depend on what runs beside it. All
        steps then have the largest size and compute all kinds of draws and rules, and a text
        begins when all its pages are free. Dense models compute layers in blocks of tokens, as
        their trainer can. Other programs serve prompts with log-probabilities and rows with more
        than 16 biases or forbidden tokens, also for what runs beside these.
    donate: frees `params` while they are copied.
    drafts: most tokens of a row that a step guesses and verifies. Rows then wait for the host
        between steps; it pays where few texts repeat themselves much.
    drafter: guesses tokens; "ngram": as texts repeat themselves, "mtp": the model's own layers.
    adapters: names of those that are in slots 1, 2 .. of `params` (interop/adapter_stack.py).
    keeps_experts: whether outputs say which experts their tokens went to.
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
        drafter: Drafter | str = "ngram",
        adapters: Sequence[str] = (),
        keeps_experts: bool = False,
    ):
        """`params`: nested dict of global arrays, on a mesh or on one device.

        Raises `UserError` for a model that the engine does not serve.
        """
        require_generator(cfg)
        check_engine(cfg, dtype, cache_dtype)
        check_drafts(cfg, drafts, drafter)
        self.cfg, self.tokenizer, self.eos = cfg, tokenizer, tuple(eos)
        self.limits = limits = limits_of(cfg, limits, batch_invariant)
        self.runner = StepRunner(
            definition,
            params,
            cfg,
            limits,
            dtype=dtype,
            pages=pages,
            cache_dtype=cache_dtype,
            weight_dtype=weight_dtype,
            fixed_rows=fixed_rows,
            batch_invariant=batch_invariant,
            donate=donate,
            drafts=drafts,
            depths=min(cfg.num_nextn_predict_layers, drafts) if drafter == "mtp" else 0,
            snapshots=snapshots_of(cfg, limits) if cache_prefixes else 0,
            keeps_experts=keeps_experts,
        )
        self.programs = self.runner.programs
        self.lanes = self._empty_lanes(cache_prefixes)
        self._by_sequence: dict[TokenSequence, RequestSample] = {}
        self.requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._paused = self._sleeps = False
        self._drafts = drafts
        self._drafter: Any = DRAFTERS[drafter]() if isinstance(drafter, str) else drafter
        self.adapters = {name: slot for slot, name in enumerate(adapters, 1)}
        # Rows of steps with drafts, these drafts, and those that were right.
        self.verified = self.guessed = self.accepted = 0

    def _empty_lanes(self, cache_prefixes: bool) -> list[Scheduler]:
        """The schedulers of all lanes, with pools of their own."""
        sizes = self.programs.sizes
        window = longest_window(self.cfg)
        cache_prefixes &= sizes.snapshots > 0 or not keeps_states(self.cfg)
        options: dict[str, Any] = {"cache_prefixes": cache_prefixes, "snapshots": sizes.snapshots}
        count = range(self.programs.lanes)
        pools = [PagePool(sizes.pages, page=PAGE, **options) for _ in count]
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
            "vision": images fp32 [I, H, W, C], `Tiled` or `PackedImages`; "audio": log-mel frames
            [I, F, M].
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
        if not self.runner.has_weights:
            raise UserError(
                "the engine slept without weights, or an update of them failed; give them by "
                "update_weights"
            )
        if request_id in self.requests:
            raise UserError(f"request {request_id} is running already; give another id")
        check_request(self.cfg, prompt, params, self.limits.length, self.adapters)
        rules = token_rules(params, self.tokenizer, self.cfg.vocab_size, self.eos)
        inputs = whole_inputs(self.cfg, prompt, items or {}, self.runner.whole_sizes)
        target = self.cfg.architecture.reads_target
        begin: list = [self.cfg.decoder_start_token_id] if target else prompt
        request = Request(RequestOutput(request_id, text, prompt, []), params, len(begin), inputs)
        if params.prompt_logprobs is not None:
            request.output.prompt_logprobs = [None] * len(prompt)
        lane = min(range(len(self.lanes)), key=lambda number: self.lanes[number].load)
        for index in range(params.n):
            answer = Answer(params, rules, self.tokenizer, prompt, index, self._matcher(params))
            request.samples.append(self._sample(request, answer, begin, number, lane))
            request.output.outputs.append(answer.output)
        self._enqueue(request, self.lanes[lane])
        self.requests[request_id] = request
        return request

    def _sample(
        self, request: Request, answer: Answer, begin: list[int], number: int, lane: int
    ) -> RequestSample:
        """One sample of request `number`, whose text begins with these tokens, in a lane."""
        params, inputs = request.params, request.inputs
        most = params.max_tokens or self.limits.length - len(begin)
        salts = {"salt": params.cache_salt, "adapter": params.adapter}
        salt = tuple(pair for pair in salts.items() if pair[1] is not None)
        sequence = TokenSequence(number, begin, len(begin) + most, params.priority, salt)
        sequence.waits, sequence.whole = self._drafts > 0, inputs is not None
        sequence.reads_prefix = params.prompt_logprobs is None or answer.output.index > 0
        seed = (number if params.seed is None else params.seed) % 2**32
        wanted = params.logprobs or params.prompt_logprobs
        top = min(TOP, self.cfg.vocab_size) if wanted else 0
        draws = draws_of([params.sampling], top)
        adapter, shift = self.adapters.get(params.adapter or "", 0), position_shift(inputs)
        return RequestSample(
            request, answer, sequence, seed, draws, lane, adapter=adapter, shift=shift
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request where it is, or one of its samples; nothing happens to what has ended."""
        request = self.requests.get(request_id)
        for number, sample in enumerate(request.samples if request else ()):
            if index in (None, number) and not sample.has_ended:
                sample.answer.finish("abort")
                self._end(sample)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do; an engine that is paused or has no weights has not."""
        may_launch = self.runner.has_weights and not self._paused
        return bool(self.runner.flying or (self.requests and may_launch))

    def step(self) -> list[TokenUpdate]:
        """Launch the next work of all lanes and return tokens of the work before."""
        if self._paused or not self.runner.has_weights:
            return self._read(all_but=0)
        found: list[TokenUpdate] = []
        self._guess()
        plans = [self._plan(lane, found) for lane in self.lanes]
        before = len(self.runner.flying)
        decode, prefill = [], []
        for plan in plans:
            # Samples of a plan may have ended since: a later lane may have read all tokens.
            rows = [t for t in plan.decode if t in self._by_sequence]
            chunks = [chunk for chunk in plan.chunks if chunk.sequence in self._by_sequence]
            decode.append([RowWork(self._by_sequence[t], t.computed - 1, 1, True) for t in rows])
            prefill.append(list(map(self._work, chunks)))
        waiting = self.runner.decode(decode)
        self.runner.prefill(prefill)
        # Guesses need all tokens before them.
        found += self._read(all_but=0 if self._drafts else len(self.runner.flying) - before)
        if waiting is not None:  # while its layers run, masks follow from what was read
            self.runner.draw(waiting)
        return found

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
        Raises `UserError` for arrays of another model, and goes on with the weights it has. So it
        does where memory runs out, if there is room for both; else requests wait for a call that
        succeeds.
        """
        self.runner.require_weights(params)
        found = self._read(all_but=0)
        self.runner.replace_weights(params, donate)
        for lane in self.lanes:
            lane.pool.forget()
        return found

    def exchange_weights(self, apart: dict) -> list[TokenUpdate]:
        """`update_weights` with parameters of `weights.py: converted_apart`, all or some of them.

        The caller vouches for them. They stay the engine's, whatever happens to what they were
        made of.
        """
        found = self._read(all_but=0)
        self.runner.exchange_weights(apart)
        for lane in self.lanes:
            lane.pool.forget()
        return found

    def sleep(self, *, weights: bool = False) -> None:
        """Free the caches. Raises `UserError` while requests run.

        weights: lets go of them, too; `update_weights` gives others.
        """
        if self.requests or self.runner.flying:
            raise UserError("the engine has requests; finish or abort them before it sleeps")
        self.runner.free(weights=weights)
        self._sleeps = True
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
        if self._sleeps or not self.runner.has_weights:
            raise UserError("the engine sleeps or has no weights; wake it, or give it some")
        if all_rules:
            with contextlib.suppress(UserError):  # without llguidance or end tokens there are none
                _ = self._grammars
        return self.runner.warm_up(draws, all_rules)

    @property
    def version(self) -> int:
        """How often the weights have changed."""
        return self.runner.version

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
        rows = [self._by_sequence[t] for lane in self.lanes for t in lane.running.values()]
        rows = [sample for sample in rows if sample.may_draft]
        proposed = self._drafter.propose(rows, self._drafts)
        for sample, drafts in zip(rows, proposed, strict=True):
            most, matcher = self._drafts, sample.answer.matcher
            if matcher is not None:
                most = matcher.allowed_drafts(drafts[:most])
            sample.sequence.drafts = drafts[:most]

    def _work(self, chunk: Chunk) -> RowWork:
        return RowWork(self._by_sequence[chunk[0]], *chunk[1:])

    # ---- results ---------------------------------------------------------------------------------

    def _read(self, all_but: int) -> list[TokenUpdate]:
        """The tokens of programs in flight but the last launched ones; waits for them."""
        found = []
        for result in self.runner.results(all_but):
            sample = result.sample
            for place in result.kept:
                if not sample.has_ended:
                    text = self._push(result, place)
                    found.append(TokenUpdate(sample.request, sample, text))
            sample.guesses = result.guesses
            if result.drafts:
                self.verified += 1
                self.guessed += result.drafts
                self.accepted += len(result.kept) - 1
        return found

    def _push(self, result: Result, place: int) -> str:
        """Add a drawn token to its sample; returns the text that is now certain."""
        sample = result.sample
        sequence, (drawn, own, processed) = sample.sequence, result.columns
        token, count = drawn[place], sample.request.params.logprobs
        top = shown_tokens(result.drawn, place, count) if count else None
        logprobs = own[place], processed[place]
        text = sample.answer.push(token, *logprobs, top, result.version)
        if len(sequence.tokens) + 1 >= sequence.limit:
            text += sample.answer.finish("length")
        if sample.has_ended:  # a step that has the last token in it may be planned, never launched
            self._end(sample)
        else:
            after_draft = place > result.kept[0]
            self.lanes[sample.lane].read(sequence, token, after_draft=after_draft)
        return text

    def _end(self, sample: RequestSample) -> None:
        """Give back what a sample has, and end its request with its last one."""
        output = sample.request.output
        output.num_cached_tokens = sample.request.samples[0].sequence.hits
        sample.answer.output.experts = self.runner.experts_of(sample)
        self.lanes[sample.lane].finish(sample.sequence)
        self._by_sequence.pop(sample.sequence, None)
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
        tokenizer: Any = self.tokenizer  # a request without one was refused
        return Grammars(tokenizer, self.cfg.vocab_size, self.eos)

    def _enqueue(self, request: Request, lane: Scheduler) -> None:
        """Give all samples to a scheduler, or none where it refuses one."""
        try:
            for sample in request.samples:
                lane.add(sample.sequence)
                self._by_sequence[sample.sequence] = sample
        except UserError:
            for sample in request.samples:
                lane.finish(sample.sequence)
                self._by_sequence.pop(sample.sequence, None)
            raise
