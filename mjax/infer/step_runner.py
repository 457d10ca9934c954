"""The device's half of the engine: weights, caches, compiled programs, and steps in flight.

It launches the work that the engine plans (`engine.py`) and gives back what was drawn, in the order
of launches. A launch does not wait, so the host plans the next step while the device works.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.caches.paged import PAGE, experts_in_pages
from mjax.infer.caches.specs import PoolSizes
from mjax.infer.checks import check_stages
from mjax.infer.programs import CHUNKS, TOP, EnginePrograms, LayerOutputs, StepState
from mjax.infer.records import (
    DrawInputs,
    Launched,
    Records,
    RequestSample,
    RowWork,
    StepTokens,
    WarmPrograms,
    bucket,
    drafts_of,
    flat_ids,
    holding,
    kept_places,
    powers_of_two,
    read_scores,
    record_dtype,
    rules_of_rows,
    steps_of_sizes,
    united,
)
from mjax.infer.sample import Drawn, Draws
from mjax.infer.scheduling.scheduler import Limits
from mjax.infer.stages.layers_in_stages import stages_for
from mjax.infer.weights import (
    fit_twice,
    form_of,
    memory_of,
    mesh_of,
    put_in_stages,
    require_weights,
    take_apart,
)
from mjax.infer.whole_prompts import largest_inputs
from mjax.models.base.params import Definition
from mjax.plan.xla_options import serving_options
from mjax.sharding.mesh import parallel_of

_SPARE_MEMORY = 0.03  # of memory that caches leave free
Work = list[list[RowWork]]  # of each lane


class Result(NamedTuple):
    """The tokens of a sample that a step drew: those at places `kept` of `drawn`.

    columns: token, logprob and processed of all places. version: of the weights. drafts: number of
    guesses that were verified. guesses: of the model's own layers, of the tokens after these.
    """

    sample: RequestSample
    drawn: Drawn
    columns: tuple[list[int], list[float], list[float]]
    kept: range
    version: int
    drafts: int
    guesses: list[int]


class ForwardedStep(NamedTuple):
    """A step whose layers are launched, and whose draws are not yet."""

    work: Work
    rows: int
    tokens: StepTokens
    records: np.ndarray
    outputs: LayerOutputs


class StepRunner:
    """Launches steps in order and reads what they drew; options are those of `Engine`.

    Beside them are `depths` and `snapshots` of `PoolSizes`. Attributes:

    sizes: rows of programs of decoding, and tokens of programs of prefill.
    compiled: programs so far, by the shapes of their inputs.
    flying: programs whose results the host has not read.
    prefills: programs of prefill that were launched.
    """

    def __init__(
        self,
        definition: Definition,
        params: dict,
        cfg: ModelConfig,
        limits: Limits,
        *,
        dtype: str,
        pages: int | None,
        cache_dtype: str | None,
        weight_dtype: str | None,
        fixed_rows: bool,
        batch_invariant: bool,
        donate: bool,
        drafts: int,
        depths: int,
        snapshots: int,
        keeps_experts: bool,
    ):
        self.definition, self._cfg, self._limits = definition, cfg, limits
        self.dtype, self._drafts = jnp.dtype(dtype), drafts
        self._form = form_of(weight_dtype, definition.specs)
        mesh = mesh_of(params)
        self._layout = None if mesh is None else stages_for(cfg, parallel_of(mesh).pp)
        self._mesh = mesh
        if self._layout is not None:
            check_stages(depths)
        self.params: dict | None = self._placed(params, donate)
        self._places = jax.tree.map(lambda p: p.sharding, self.params)
        # A step of two rows is faster than one of one row: XLA then makes each norm one kernel.
        rows = powers_of_two(min(2, limits.rows), limits.rows)
        tokens = powers_of_two(16, limits.chunk)
        decode = rows[-1:] if fixed_rows or batch_invariant else rows
        self.sizes = decode, tokens[-1:] if batch_invariant else tokens
        self._chunks = 1 if limits.prefill_alone else min(CHUNKS, rows[-1])
        width = -(-(limits.length + drafts) // PAGE)
        self.whole_sizes = [*powers_of_two(16, width * PAGE)[:-1], width * PAGE]
        more = cache_dtype == "fp8", drafts, snapshots, depths, keeps_experts
        sizes = PoolSizes(2 if pages is None else pages, limits.rows, width, *more)
        of_model = definition, cfg, mesh, self.dtype, sizes, self._form, self._layout
        self.programs = EnginePrograms(*of_model, batch_invariant)
        if pages is None:
            self._fill_memory()
        self.records = Records(self.programs.lanes, limits.rows, record_dtype(sizes))
        self._state: StepState | None = None  # taken when the first program is launched
        self.compiled: dict[tuple, jax.stages.Compiled] = {}
        self._warm, self._invariant = WarmPrograms(), batch_invariant
        self._has_counts = False  # whether tokens are counted, for penalties
        if batch_invariant:  # no program depends on what others draw
            top = min(TOP, cfg.vocab_size)
            draws = Draws(True, True, True, top, in_blocks=self.programs.invariant)
            self._warm = WarmPrograms((draws,), all_rules=True)
        self.flying: deque[Launched] = deque()
        self.version = self.prefills = 0

    def _fill_memory(self) -> None:
        """Give the programs as many pages as fit into memory."""
        largest = [(self.sizes[1][-1], self._chunks, None), (None, self.sizes[0][-1], None)]
        size = self.whole_sizes[-1]
        inputs = largest_inputs(self._cfg, size)
        if inputs is not None:
            largest.append((size, 1, inputs))
        pages = fitting_pages(self.programs, self.params, largest, self._options)
        self.programs = self.programs.resized(self.programs.sizes._replace(pages=pages))

    # ---- weights and memory ----------------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        """Whether there are any; `free` or a failed `replace_weights` may have left none."""
        return self.params is not None

    def replace_weights(self, params: dict, donate: bool) -> None:
        """Go on with other weights, of which `require_weights` has said that they fit.

        If this fails, as memory runs out, the old ones stay where there was room for both.
        """
        if self.has_weights and not fit_twice(self.params):
            self.params = None
        self.params = jax.device_put(self._placed(params, donate), self._places)
        self.version += 1

    def _placed(self, params: dict, donate: bool) -> dict:
        """Weights in the form of the programs."""
        given = self.definition.specs, params, self.dtype
        if self._layout is None:
            return take_apart(*given, donate, self._form)
        return put_in_stages(*given, self._mesh, self._layout, donate, self._form)

    def exchange_weights(self, apart: dict) -> None:
        """Go on with other parameters in the form that they have here: all, or some of them."""
        held = {} if self.params is None else flatten_dict(self.params)
        self.params = unflatten_dict(held | flatten_dict(apart))
        self.version += 1

    def require_weights(self, params: dict) -> None:
        """Raise `UserError` for arrays of another model."""
        require_weights(self.definition.specs, params, self.dtype)

    def free(self, *, weights: bool) -> None:
        """Free the caches, which the next launch takes again, and the weights if asked."""
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = None
        if weights:
            self.params = None

    def warm_up(self, draws: Sequence[Draws], all_rules: bool) -> int:
        """Compile the programs of all sizes for these kinds of draws; returns their number.

        all_rules: as in `WarmPrograms`; prompts are scored then, too.
        """
        warm = self._warm if self._invariant else WarmPrograms(tuple(draws), all_rules)
        self._has_counts |= any(kind.penalties for kind in warm.kinds)
        if self._state is not None:
            self._take_state()
        steps = steps_of_sizes(self.records, *self.sizes, self._chunks, self._drafts)
        prompts = [step for step in steps if all_rules and step[0].ids is not None]
        scored = [(tokens._replace(labels=tokens.ids), records) for tokens, records in prompts]
        # Steps with equally many rows share the programs that draw.
        alike = {(len(records), tokens.places): (tokens, records) for tokens, records in steps}
        drawn = warm.draws([*alike.values()], self._cfg.vocab_size)
        guessed = warm.draws(steps, self._cfg.vocab_size) if self.programs.sizes.depths else []
        with ThreadPoolExecutor(8) as pool:
            tasks = [pool.submit(self.forward_program, *step) for step in steps + scored]
            for program, wanted in ((self.draw_program, drawn), (self.guess_program, guessed)):
                for inputs in wanted:
                    outputs = self.programs.abstract_outputs(inputs.tokens, inputs.records)
                    tasks.append(pool.submit(program, inputs, outputs))
            for task in tasks:
                task.result()
        self._warm = warm
        if self._has_counts:
            self._take_state()
            no_row = np.int32(self._limits.rows)
            for size in powers_of_two(16, self._limits.length):
                ids = np.full(size, -1, np.int32)
                self._state = self.programs.count(self._state, no_row, ids, ids > 0)
        return len(self.compiled)

    # ---- launches --------------------------------------------------------------------------------

    def decode(self, work: Work) -> ForwardedStep | None:
        """Launch a step of decoding, if there is any work.

        Returns it before its draws if these must know tokens that the host has not read. The caller
        then reads all steps before and launches the draws, by `draw`.
        """
        if not any(work):
            return None
        rows = holding(self.sizes[0], max(map(len, work)))
        always = self._limits.computes_once  # the program does not depend on others' drafts
        drafts = drafts_of(work, rows, self._drafts, always)
        step = self._forward(work, rows, StepTokens(drafts=drafts))
        samples = (entry.sample for lane in work for entry in lane)
        if any(sample.answer.waits and sample.sequence.flying > 1 for sample in samples):
            return step
        self.draw(step)
        return None

    def prefill(self, work: Work) -> None:
        """Launch the chunks of all lanes; a whole prompt has a program to itself."""
        for lane, chunks in enumerate(work):
            if chunks and chunks[0].sample.sequence.whole:
                alone = [chunks if number == lane else [] for number in range(len(work))]
                self._prefill(alone, 1, self.whole_sizes, self._inputs(chunks[0].sample))
                work[lane] = []
        while any(work):
            part = [chunks[: self._chunks] for chunks in work]
            self._prefill(part, self._chunks, self.sizes[1])
            work = [chunks[self._chunks :] for chunks in work]

    def _inputs(self, sample: RequestSample) -> Mapping:
        """The inputs of a whole prompt; each lane gets them, of which one has its tokens."""
        lanes = self.programs.lanes
        return jax.tree.map(lambda array: np.repeat(array, lanes, 0), sample.request.inputs)

    def _prefill(
        self,
        work: Work,
        rows: int,
        sizes: Sequence[int],
        inputs: Mapping | None = None,
    ) -> None:
        """Launch a program of prefill, between copies of states from and to snapshots."""
        self.prefills += 1
        entries = [entry for lane in work for entry in lane]
        self._copy_states([(entry.sample, entry.restored) for entry in entries], False)
        ids, labels = flat_ids(work, sizes), None
        if any(entry.sample.scores_prompt for entry in entries):
            labels = flat_ids(work, sizes, ahead=1)
        self.draw(self._forward(work, rows, StepTokens(ids, labels, inputs=inputs)))
        self._copy_states([(entry.sample, entry.saved) for entry in entries], True)

    def _copy_states(self, pairs: Sequence[tuple[RequestSample, int]], saves: bool) -> None:
        """Copy states of samples to their snapshots, or from them; -1: there is none."""
        rows, more = self.programs.sizes.rows + 1, self.programs.sizes.snapshots
        for sample, snapshot in pairs:
            if snapshot >= 0:
                slots = np.array([rows + snapshot, sample.sequence.slot], np.int32)
                slots += sample.lane * (rows + more)
                source, target = slots[::-1] if saves else slots
                caches = self.programs.copy_states(self._state.caches, source, target)
                self._state = self._state._replace(caches=caches)

    def _forward(self, work: Work, rows: int, tokens: StepTokens) -> ForwardedStep:
        """Launch the layers of a step for the work of all lanes."""
        records = self.records.write(work, rows)
        self._take_state()
        state, programs = self._state, self.programs
        program = self.forward_program(tokens, records)
        caches = programs.of_layers(state.caches)
        caches, outputs = program(self.params, caches, state.last, tokens, records)
        self._state = state._replace(caches=[*caches, *programs.of_depths(state.caches)])
        return ForwardedStep(work, rows, tokens, records, outputs)

    def draw(self, step: ForwardedStep) -> None:
        """Launch the draws of a step, but of samples that have ended since."""
        work, rows, tokens, records, outputs = step
        of_rows: list[RequestSample | None] = [None] * len(records)
        drawing: dict[int, RequestSample] = {}  # by row
        for number, entries in enumerate(work):
            for row, entry in enumerate(entries, number * rows):
                if entry.sample.has_ended:
                    continue
                of_rows[row] = entry.sample
                if entry.samples:
                    drawing[row] = entry.sample
        if not any(of_rows):
            return
        rules = rules_of_rows(of_rows, self._cfg.vocab_size, tokens.drafts)
        draws = united([sample.draws for sample in of_rows if sample is not None])
        sizes = len(records), self._cfg.vocab_size, tokens.places
        draws, rules = self._warm.choose(draws, rules, *sizes)
        self._has_counts |= draws.penalties
        self._take_state()
        if draws.penalties:
            self._count(filter(None, of_rows))
        inputs, caches = DrawInputs(tokens, records, rules, draws), self._state.caches
        program, state = self.draw_program(inputs, outputs), self._state._replace(caches=[])
        state, drawn, places = program(state, outputs.logits, tokens.drafts, records, rules)
        self._state = state._replace(caches=caches)
        guesses = None if outputs.activations is None else self._guess(inputs, outputs, places)
        results = drawn, outputs.scores, guesses
        for array in jax.tree.leaves(results):
            array.copy_to_host_async()
        self.flying.append(Launched(*results, drawing, self.version, tokens.drafts, work))

    def _guess(self, inputs: DrawInputs, outputs: LayerOutputs, places: jax.Array) -> jax.Array:
        """Launch the guesses of the model's own layers after the tokens drawn at `places`."""
        program = self.guess_program(inputs, outputs)
        state, programs = self._state, self.programs
        resident = self.params, programs.of_depths(state.caches), state.last
        given = outputs.activations, places, inputs.records, inputs.rules
        depths, guesses = program(*resident, *given)
        caches = [*programs.of_layers(state.caches), *depths]
        self._state = state._replace(caches=caches)
        return guesses

    def experts_of(self, sample: RequestSample) -> jax.Array | None:
        """The experts that a sample's tokens went to (`experts_in_pages`), if they are kept."""
        sizes, pages = self.programs.sizes, sample.sequence.pages
        if not sizes.keeps_experts or not pages:
            return None
        padded = pages + [0] * (sizes.width - len(pages))
        return experts_in_pages(self._state.caches, padded, sample.lane * sizes.pages)

    # ---- programs --------------------------------------------------------------------------------

    def forward_program(self, tokens: StepTokens, records: np.ndarray) -> jax.stages.Compiled:
        """The program of the layers for inputs of these shapes."""
        state, programs = self._held_or_abstract(), self.programs
        resident = self.params, programs.of_layers(state.caches), state.last
        count = len(records) * tokens.places if tokens.ids is None else tokens.ids.shape[-1]
        return self._compiled(programs.forward, resident, (tokens, records), count)

    def draw_program(self, inputs: DrawInputs, outputs: LayerOutputs) -> jax.stages.Compiled:
        """The program that draws tokens."""
        tokens, records, rules, draws = inputs
        resident = (self._held_or_abstract()._replace(caches=[]),)
        given = outputs.logits, tokens.drafts, records, rules
        return self._compiled(self.programs.draw, resident, given, draws=draws)

    def guess_program(self, inputs: DrawInputs, outputs: LayerOutputs) -> jax.stages.Compiled:
        """The program in which the model's own layers guess what follows."""
        tokens, records, rules, draws = inputs
        state, programs = self._held_or_abstract(), self.programs
        resident = self.params, programs.of_depths(state.caches), state.last
        places = programs.abstract_rows(len(records))
        given = outputs.activations, places, records, rules
        each = None if tokens.ids is not None else tokens.places
        return self._compiled(programs.guess, resident, given, draws=draws, each=each)

    def _options(self, tokens: int) -> dict:
        """The XLA options of layers for so many tokens."""
        device = next(iter(jax.tree.leaves(self._places)[0].device_set))
        facts = self._form is not None, device, self.programs.invariant
        return serving_options(tokens, *facts)

    def _held_or_abstract(self) -> StepState:
        if self._state is not None:
            return self._state
        return self.programs.abstract_state(self._has_counts)

    def _compiled(
        self, function: Callable, resident: tuple, given: tuple, tokens: int = 0, **static: object
    ) -> jax.stages.Compiled:
        """The program of function(*resident, *given), compiled once for each shape of `given`.

        resident: what stays on the device, in shapes that change with the counts alone.
        tokens: those that its layers compute, if it has any.
        """
        arrays, tree = jax.tree.flatten(given)
        shapes = tuple((x.shape, x.dtype) for x in arrays)
        name = function.__name__  # threads may make more than one function of a name
        is_counted = self._has_counts and name == "_draw"
        key = name, shapes, tree, *static.values(), is_counted
        if key not in self.compiled:
            lowered, options = function.lower(*resident, *given, **static), self._options(tokens)
            self.compiled[key] = lowered.compile(compiler_options=options or None)
        return self.compiled[key]

    def _count(self, samples: Iterable[RequestSample]) -> None:
        """Count the tokens of samples with penalties that have taken a slot since."""
        for sample in samples:
            sequence = sample.sequence
            if not sample.draws.penalties or sample.counted == sequence.admissions:
                continue
            sample.counted = sequence.admissions
            ids = np.full(bucket(len(sequence.tokens)), -1, np.int32)
            ids[: len(sequence.tokens)] = sequence.tokens
            is_output = np.arange(len(ids)) >= sample.request.given
            slot = np.int32(sample.lane * (self._limits.rows + 1) + sequence.slot)
            self._state = self.programs.count(self._state, slot, ids, is_output)

    def _take_state(self) -> None:
        """Allocate what the next launch needs."""
        if self._state is None:
            self._state = self.programs.empty()
        if self._has_counts and self._state.counts is None:
            self._state = self._state._replace(counts=self.programs.empty_counts())

    # ---- results ---------------------------------------------------------------------------------

    def results(self, all_but: int) -> Iterator[Result]:
        """Yield the results of programs in flight but the last launched ones; waits for them."""
        while len(self.flying) > all_but:
            *results, samples, version, drafts, work = self.flying.popleft()
            drawn, scores, guesses = jax.tree.map(np.asarray, results)
            if scores is not None:
                read_scores(work, scores)
            columns = tuple(a.tolist() for a in (drawn.token, drawn.logprob, drawn.processed))
            for place, sample in samples.items():
                kept = kept_places(drawn.token, drafts, place)
                count = 0 if drafts is None else int((drafts[place] >= 0).sum())
                found = [] if guesses is None else guesses[place].tolist()
                yield Result(sample, drawn, columns, kept, version, count, found)


def fitting_pages(
    programs: EnginePrograms,
    params: dict,
    largest: Sequence[tuple[int | None, int, dict | None]],
    options_of: Callable[[int], dict],
) -> int:
    """The pages of each lane that memory holds beside weights and the largest programs.

    `largest`: of these programs, as `EnginePrograms.lowered` takes it. `options_of`: those of XLA
    for a number of tokens. On a device that does not say its memory, so many that all rows have a
    quarter of their length, and one has it all.
    """
    sizes, stats = programs.sizes, memory_of(params)
    if not stats:
        return 2 + max(sizes.rows * -(-sizes.width // 4), sizes.width)
    one, two = (programs.resized(sizes._replace(pages=n)).bytes_of_caches() for n in (2, 3))
    if one == two:  # all caches lie in slots
        return 1 + sizes.rows * sizes.width
    free = stats["bytes_limit"] - stats["bytes_in_use"] - one

    def scratch_of(size: tuple) -> int:
        options = options_of(size[0] or size[1])
        made = programs.lowered(params, *size).compile(compiler_options=options or None)
        memory = made.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    with ThreadPoolExecutor(len(largest)) as pool:
        scratch = max(pool.map(scratch_of, largest))
    # As much again is for the compiler's trials and for holes between arrays.
    spare = 2 * scratch + _SPARE_MEMORY * stats["bytes_limit"]
    pages = int((free - spare) // (two - one))
    if pages < sizes.width + 2:
        raise UserError(
            f"{free / 1e9:.1f} GB of memory are left for caches and {scratch / 1e9:.1f} GB are "
            "scratch: no text of full length fits; lower its length, or use more devices"
        )
    return pages
