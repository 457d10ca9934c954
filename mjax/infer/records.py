"""Requests and samples as the engine follows them, and the inputs of a step that the host writes.

Inputs are a record for each row, flat ids of prompts, drafts, and rules of tokens. A sample's
settings are written when it takes a slot, and its table when its pages change, so a step of
decoding copies records and fills in lengths. Invariant: a record says all that its row depends on,
besides the tokens that its pages hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import jax
import numpy as np

from mjax.infer.caches.specs import PoolSizes
from mjax.infer.requests import Answer, RequestOutput, SamplingParams
from mjax.infer.sample import Drawn, Draws, RowRules, Sampling, Scored
from mjax.infer.scheduling.scheduler import TokenSequence


def record_dtype(sizes: PoolSizes) -> np.dtype:
    """A row of a step, 4 bytes a number; its lists have the lengths in brackets.

    length: tokens of the row, the new ones included. count: new tokens.
    slot: its place on the device. samples: 1 if it draws a token, 0 if not.
    adapter: the slot of its adapter where the model has several, else 0.
    shift: what positions have above slots, after images that take fewer than their tokens.
    seed, index: of its noise. Settings of `Sampling`, by name.
    following: tokens after the new ones, where it draws none, [depths]; 0: not known.
    table: its pages in order, [width]; 0 after its own.
    """
    settings = [(f.name, "<i4" if f.name == "top_k" else "<f4") for f in fields(Sampling)]
    numbers = [(n, "<i4") for n in "length count slot samples index adapter shift".split()]
    lists = [("following", "<i4", (sizes.depths,)), ("table", "<i4", (sizes.width,))]
    return np.dtype([*numbers, ("seed", "<u4"), *settings, *lists])


def fields_of_records(records: jax.Array, dtype: np.dtype) -> dict[str, jax.Array]:
    """The fields of records int32 [R, C]: [R] each, and [R, width] of a field of several."""
    found = {}
    for name, (kind, offset) in dtype.fields.items():
        base, shape = kind.subdtype or (kind, ())
        begin = offset // 4
        columns = records[:, begin : begin + (shape[0] if shape else 1)]
        values = jax.lax.bitcast_convert_type(columns, base)
        found[name] = values if shape else values[:, 0]
    return found


class StepTokens(NamedTuple):
    """The tokens of a step that the host knows; without `ids` it is one of decoding.

    ids: int32 [lanes, T], the tokens of prefill.
    labels: int32 [lanes, T], the tokens after them, if their log-probabilities are wanted.
    drafts: int32 [lanes * R, k], guesses of the tokens after each row's last one; -1: none.
    inputs: what the model reads beside a prompt (`Decoder.extend`), [lanes, ..] each, or None.
    """

    ids: np.ndarray | None = None
    labels: np.ndarray | None = None
    drafts: np.ndarray | None = None
    inputs: Mapping | None = None

    @property
    def places(self) -> int:
        """The tokens that are drawn for a row."""
        return 1 if self.drafts is None else 1 + self.drafts.shape[1]


@dataclass(eq=False)
class Request:
    """A prompt and its samples, as the engine follows them.

    given: tokens before those that are made. inputs: what is read beside them (`whole_inputs`).
    """

    output: RequestOutput
    params: SamplingParams
    given: int
    inputs: Mapping | None = None
    samples: list["RequestSample"] = field(default_factory=list)


@dataclass(eq=False)
class RequestSample:
    """One sample of a request.

    seed: of its noise. draws: what its rows need. lane: the scheduler that it belongs to.
    written: the admission for which the record of its slot was filled. table: (pages, null pages
    among them) that the record has. counted: the admission after which its tokens were counted for
    penalties. adapter: the slot of its adapter, 0: none. guesses: of its next tokens, by the
    model's own layers. shift: what its positions have above its slots (`position_shift`).
    """

    request: Request
    answer: Answer
    sequence: TokenSequence
    seed: int
    draws: Draws
    lane: int
    written: int = 0
    table: tuple[int, int] = (0, 0)
    counted: int = 0
    adapter: int = 0
    guesses: list[int] = field(default_factory=list)
    shift: int = 0

    @property
    def may_draft(self) -> bool:
        """Whether its next tokens may be guessed: its form alone may depend on the text so far."""
        enough = len(self.answer.output.token_ids) >= self.answer.params.min_tokens
        has_form = self.answer.matcher is not None  # and then no bad words
        depends = (self.answer.waits and not has_form) or self.draws.penalties
        return self.sequence.sampled and enough and not depends

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still missing."""
        return not self.sequence.reads_prefix

    @property
    def has_ended(self) -> bool:
        return self.answer.output.finish_reason is not None


class RowWork(NamedTuple):
    """A row of a step: `count` tokens of a sample from `first` on. samples: whether it draws.

    restored, saved: snapshots of its state before and after these tokens; -1: none.
    """

    sample: RequestSample
    first: int
    count: int
    samples: bool
    restored: int = -1
    saved: int = -1


class TokenUpdate(NamedTuple):
    """A new token of a sample: text is what became certain with it."""

    request: Request
    sample: RequestSample
    text: str


class Launched(NamedTuple):
    """A step in flight.

    drawn: its results, for `samples` by place. scores: of the tokens after those of `work`, if any.
    guesses: of the next tokens of each row, int32 [R, k], if the model's layers guess.
    version: of the weights. drafts: of the rows, int32 [R, k], or None.
    """

    drawn: Drawn
    scores: Scored | None
    guesses: np.ndarray | None
    samples: dict[int, RequestSample]
    version: int
    drafts: np.ndarray | None
    work: list[list[RowWork]]


class Records:
    """The records of all slots of all lanes; the slot after all is of rows without work."""

    def __init__(self, lanes: int, rows: int, dtype: np.dtype):
        """`dtype`: as `record_dtype` gives it."""
        self.rows = rows
        self._of_slots = np.zeros((lanes, rows + 1), dtype)
        self._of_slots["slot"] = np.arange(rows + 1)

    def write(self, work: Sequence[Sequence[RowWork]], rows: int) -> np.ndarray:
        """The records of a step for the work of each lane, int32 [lanes * rows, C]."""
        lanes = [self._of_lane(lane, rows) for lane in work]
        return np.concatenate(lanes)

    def empty(self, rows: int) -> np.ndarray:
        """The records of a step without work."""
        return self.write([[]] * self.lanes, rows)

    @property
    def lanes(self) -> int:
        return len(self._of_slots)

    def _of_lane(self, work: Sequence[RowWork], rows: int) -> np.ndarray:
        lane = self._of_slots[work[0].sample.lane if work else 0]
        for entry in work:
            self._update(lane, entry.sample)
        slots = np.full(rows, self.rows)
        slots[: len(work)] = [entry.sample.sequence.slot for entry in work]
        records = lane[slots]
        own = records[: len(work)]
        own["count"] = [entry.count for entry in work]
        own["length"] = [entry.first + entry.count for entry in work]
        own["samples"] = [entry.samples for entry in work]
        depths = own["following"].shape[1]
        for place, entry in enumerate(work):
            if depths and not entry.samples:
                end = entry.first + entry.count
                following = entry.sample.sequence.tokens[end : end + depths]
                own["following"][place, : len(following)] = following
        return records.view(np.int32).reshape(rows, -1)

    def _update(self, lane: np.ndarray, sample: RequestSample) -> None:
        """Write what has changed of a sample's record."""
        sequence = sample.sequence
        if sample.written != sequence.admissions:  # others may have had the slot meanwhile
            sample.written, sample.table = sequence.admissions, (0, 0)
            settings = vars(sample.answer.params.sampling)
            own = {"seed": sample.seed, "index": sample.answer.output.index}
            settings = settings | own | {"adapter": sample.adapter, "shift": sample.shift}
            for name, value in settings.items():
                lane[name][sequence.slot] = value
            lane["table"][sequence.slot] = 0
        table = len(sequence.pages), sequence.passed
        if sample.table != table:
            sample.table = table
            lane["table"][sequence.slot, : len(sequence.pages)] = sequence.pages


def flat_ids(
    work: Sequence[Sequence[RowWork]], sizes: Sequence[int], *, ahead: int = 0
) -> np.ndarray:
    """The tokens of prefill, int32 [lanes, T]; T is the first of `sizes` that holds all.

    `ahead`: take the token so many places after each; 0 where it is not known.
    """
    lanes = []
    for lane in work:
        tokens: list[int] = []
        for sample, first, count, *_ in lane:
            own = sample.sequence.tokens[first + ahead : first + ahead + count]
            tokens += own + [0] * (count - len(own))
        lanes.append(tokens)
    ids = np.zeros((len(lanes), holding(sizes, max(map(len, lanes)))), np.int32)
    for row, tokens in zip(ids, lanes, strict=True):
        row[: len(tokens)] = tokens
    return ids


def drafts_of(
    work: Sequence[Sequence[RowWork]], rows: int, most: int, always: bool
) -> np.ndarray | None:
    """The drafts of a step of decoding, int32 [lanes * rows, most], -1: none; None: no row has any.

    Rows of a step have equally many places for drafts. `always`: give them places in any case.
    """
    if not most:
        return None
    has_some = any(entry.sample.sequence.drafts for lane in work for entry in lane)
    if not (has_some or always):
        return None
    table = np.full((len(work) * rows, most), -1, np.int32)
    for number, lane in enumerate(work):
        for place, entry in enumerate(lane, number * rows):
            own = entry.sample.sequence.drafts
            table[place, : len(own)] = own
    return table


def kept_places(tokens: np.ndarray, drafts: np.ndarray | None, place: int) -> range:
    """The places among drawn tokens of those that a row keeps: after right drafts, and one more.

    tokens: int32 [R * (1 + k)]. drafts: int32 [R, k], or None if k is 0.
    """
    if drafts is None:
        return range(place, place + 1)
    most = drafts.shape[1]
    first = place * (1 + most)
    is_right = tokens[first : first + most] == drafts[place]
    return range(first, first + 1 + int(np.cumprod(is_right).sum()))


def shown_tokens(found: Drawn | Scored, place: int, count: int) -> dict[int, float]:
    """Log-probabilities of the `count` likeliest tokens at a place, by id."""
    if not count:
        return {}
    ids, values = found.top_ids[place, :count], found.top_logprobs[place, :count]
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def read_scores(work: Sequence[Sequence[RowWork]], scores: Scored) -> None:
    """Add to prompts that want it how likely their tokens are; `scores` [lanes * T] of `work`."""
    size = len(scores.logprob) // len(work)
    for number, lane in enumerate(work):
        place = number * size
        for sample, first, count, *_ in lane:
            output = sample.request.output
            prompt, most = output.prompt_token_ids, sample.request.params.prompt_logprobs
            known = min(count, len(prompt) - first - 1) if sample.scores_prompt else 0
            for i in range(known):
                token = prompt[first + i + 1]
                own = {token: float(scores.logprob[place + i])}
                output.prompt_logprobs[first + i + 1] = shown_tokens(scores, place + i, most) | own
            if first + count >= len(prompt):
                sample.sequence.reads_prefix = True
            place += count


def rules_of_rows(
    places: Sequence[RequestSample | None], vocabulary: int, drafts: np.ndarray | None
) -> RowRules:
    """The rules of the rows of a step; None: a row without work. drafts: as in `row_rules`."""
    if not any(sample is not None and sample.answer.has_rules for sample in places):
        return RowRules()
    answers = [None if sample is None else sample.answer for sample in places]
    # The token that this step draws is counted among those in flight.
    flying = [0 if sample is None else max(sample.sequence.flying - 1, 0) for sample in places]
    return row_rules(answers, flying, vocabulary, drafts)


def row_rules(
    answers: Sequence[Answer | None],
    flying: Sequence[int],
    vocabulary: int,
    drafts: np.ndarray | None = None,
) -> RowRules:
    """The rules of rows for their next tokens, in numpy; None: a row without.

    flying: of each row, tokens that the host has not read. Widths of lists are rounded up, and
    where one row has biases or bans all have both, so that few programs are compiled.
    drafts: int32 [R, k], guesses of tokens (`StepTokens`); masks are then [R * (1 + k), W].
    """
    pairs = list(zip(answers, flying, strict=True))
    biases = [dict(row.rules.bias) if row else {} for row in answers]
    bans = [row.banned(count) if row else [] for row, count in pairs]
    guesses = np.empty((len(answers), 0), np.int32) if drafts is None else drafts
    each = 1 + guesses.shape[1]
    masks, alone = {}, {}
    for number, (row, own) in enumerate(zip(answers, guesses, strict=True)):
        known = own[own >= 0].tolist()
        if row and row.matcher and not known:
            alone[number * each] = row.matcher
            continue
        found = row.allowed(known) if row else []
        masks |= {number * each + place: mask for place, mask in enumerate(found)}
    if alone:
        first, *_ = alone.values()
        masks |= zip(alone, first.masks_of([*alone.values()]), strict=True)
    ids = values = banned = allowed = None
    if any(biases) or any(bans):
        ids = _padded_columns([[*bias] for bias in biases], np.int32, -1)
        values = _padded_columns([[*bias.values()] for bias in biases], np.float32, 0)
        banned = _padded_columns(bans, np.int32, -1)
    if masks:
        allowed = filled(RowRules(), len(answers), vocabulary, each).allowed
        for place, mask in masks.items():
            allowed[place] = mask
    return RowRules(ids, values, allowed, banned)


def filled(rules: RowRules, rows: int, vocabulary: int, each: int = 1) -> RowRules:
    """The same rules with all parts, those that were None without an effect.

    each: tokens that are drawn for a row, as after drafts.
    """
    ids, values, allowed, banned = rules.bias_ids, rules.bias_values, rules.allowed, rules.banned
    if ids is None:
        ids = banned = np.full((rows, 16), -1, np.int32)
        values = np.zeros((rows, 16), np.float32)
    if allowed is None:
        words = -(-vocabulary // 32)
        allowed = np.full((rows * each, words), 2**32 - 1, np.uint32)
    return RowRules(ids, values, allowed, banned)


def _padded_columns(rows: Sequence[Sequence], dtype: type, filling: int) -> np.ndarray:
    """Rows of unequal length as an array, filled up to a width of 16, 64, 256 .. columns."""
    width, longest = 16, max(map(len, rows))
    while width < longest:
        width *= 4
    table = np.full((len(rows), width), filling, dtype)
    for row, entries in zip(table, rows, strict=True):
        row[: len(entries)] = entries
    return table


StepInputs = tuple[StepTokens, np.ndarray]  # tokens of a step, and its records int32 [R, C]


class DrawInputs(NamedTuple):
    """The inputs of a step's draws besides logits: its tokens, records int32 [R, C], rules, and
    the kind of its draws."""

    tokens: StepTokens
    records: np.ndarray
    rules: RowRules
    draws: Draws


class WarmPrograms(NamedTuple):
    """The kinds of draws whose programs are compiled before requests come.

    all_rules: those of the last kind take rules of all parts, and the others masks of allowed
    tokens. So a request with a rule compiles nothing, unless it has more than 16 biases or bans.
    """

    kinds: tuple[Draws, ...] = ()
    all_rules: bool = False

    def draws(self, steps: Sequence[StepInputs], vocabulary: int) -> list[DrawInputs]:
        """Inputs of the programs that draw after these steps, which have tokens and records."""
        found = []
        for step in steps:
            plain = self.kinds[:-1] if self.all_rules else self.kinds
            found += [DrawInputs(*step, RowRules(), kind) for kind in plain]
            if self.all_rules:
                tokens, records = step
                every = filled(RowRules(), len(records), vocabulary, tokens.places)
                masks = RowRules(allowed=every.allowed)
                found += [DrawInputs(*step, masks, kind) for kind in plain]
                found.append(DrawInputs(*step, every, self.kinds[-1]))
        return found

    def choose(
        self, draws: Draws, rules: RowRules, rows: int, vocabulary: int, each: int
    ) -> tuple[Draws, RowRules]:
        """The kind and the rules of the program for a step that needs these.

        each: tokens that are drawn for a row.
        """
        has_lists = rules.bias_ids is not None
        kinds = self.kinds[-1:] if has_lists and self.all_rules else self.kinds
        found = next((kind for kind in kinds if kind.covers(draws)), draws)
        if self.all_rules and found == self.kinds[-1]:
            rules = filled(rules, rows, vocabulary, each)
        return found, rules


def steps_of_sizes(
    records: Records, rows: Sequence[int], tokens: Sequence[int], chunks: int, drafts: int
) -> list[StepInputs]:
    """Steps without work: of decoding for each of `rows`, of prefill for each of `tokens`.

    chunks: rows of prefill. drafts: guesses of a row; such steps come beside those without.
    """
    steps = [(StepTokens(), records.empty(count)) for count in rows]
    if drafts:
        places = [np.zeros((len(own), drafts), np.int32) for _, own in steps]
        pairs = zip(places, steps, strict=True)
        steps += [(StepTokens(drafts=each), own) for each, (_, own) in pairs]
    for count in tokens:
        ids = np.zeros((records.lanes, count), np.int32)
        steps.append((StepTokens(ids), records.empty(chunks)))
    return steps


def united(kinds: Sequence[Draws]) -> Draws:
    """The draws that some row of a step needs."""
    return Draws(
        random=any(kind.random for kind in kinds),
        limited=any(kind.limited for kind in kinds),
        penalties=any(kind.penalties for kind in kinds),
        top=max(kind.top for kind in kinds),
    )


def powers_of_two(first: int, most: int) -> list[int]:
    """The powers of two from `first`, one of them, to the first that is `most` or more."""
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes


def bucket(n: int) -> int:
    """The power of two, at least 16, that holds `n`."""
    return powers_of_two(16, n)[-1]


def holding(sizes: Sequence[int], count: int) -> int:
    """The first of rising sizes that holds `count`."""
    return next(size for size in sizes if size >= count)
