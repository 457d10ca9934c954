"""The inputs of a step: a record for each row, flat ids of prompts, rules of tokens.

A sample's settings are written when it takes a slot, and its table when its pages change, so a step
of decoding copies records and fills in lengths. Invariant: a record says all that its row depends
on, besides the tokens that its pages hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mjax.infer.programs import StepTokens
from mjax.infer.requests import Answer, RequestOutput, SamplingParams, filled, row_rules
from mjax.infer.sample import Drawn, Draws, RowRules, Scored
from mjax.infer.scheduling.scheduler import Sequence as Tokens


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
    tokens: Tokens
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
        return self.tokens.sampled and enough and not depends

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still missing."""
        return not self.tokens.reads_prefix

    @property
    def has_rules(self) -> bool:
        """Whether some tokens are favored or forbidden in its rows."""
        rules = self.answer.rules
        favored = rules.bias or rules.bad_words or rules.allowed is not None
        return bool(favored or self.answer.matcher or self.answer.params.min_tokens)

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
    """A program in flight.

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
        slots[: len(work)] = [entry.sample.tokens.slot for entry in work]
        records = lane[slots]
        own = records[: len(work)]
        own["count"] = [entry.count for entry in work]
        own["length"] = [entry.first + entry.count for entry in work]
        own["samples"] = [entry.samples for entry in work]
        for record, entry in zip(own, work, strict=True):
            if not entry.samples:
                following = entry.sample.tokens.tokens[entry.first + entry.count :]
                known = min(len(following), len(record["following"]))
                record["following"][:known] = following[:known]
        return records.view(np.int32).reshape(rows, -1)

    def _update(self, lane: np.ndarray, sample: RequestSample) -> None:
        """Write what has changed of a sample's record."""
        tokens = sample.tokens
        if sample.written != tokens.admissions:  # others may have had the slot meanwhile
            sample.written, sample.table = tokens.admissions, (0, 0)
            settings = vars(sample.answer.params.sampling)
            own = {"seed": sample.seed, "index": sample.answer.output.index}
            settings = settings | own | {"adapter": sample.adapter, "shift": sample.shift}
            for name, value in settings.items():
                lane[name][tokens.slot] = value
            lane["table"][tokens.slot] = 0
        table = len(tokens.pages), tokens.passed
        if sample.table != table:
            sample.table = table
            lane["table"][tokens.slot, : len(tokens.pages)] = tokens.pages


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
            own = sample.tokens.tokens[first + ahead : first + ahead + count]
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
    has_some = any(entry.sample.tokens.drafts for lane in work for entry in lane)
    if not most or not (has_some or always):
        return None
    table = np.full((len(work) * rows, most), -1, np.int32)
    for number, lane in enumerate(work):
        for place, entry in enumerate(lane, number * rows):
            own = entry.sample.tokens.drafts
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
                sample.tokens.reads_prefix = True
            place += count


def rules_of_rows(
    places: Sequence[RequestSample | None], vocabulary: int, drafts: np.ndarray | None
) -> RowRules:
    """The rules of the rows of a step; None: a row without work. drafts: as in `row_rules`."""
    if not any(sample is not None and sample.has_rules for sample in places):
        return RowRules()
    answers = [None if sample is None else sample.answer for sample in places]
    # The token that this step draws is counted among those in flight.
    flying = [0 if sample is None else max(sample.tokens.flying - 1, 0) for sample in places]
    return row_rules(answers, flying, vocabulary, drafts)


ProgramInputs = tuple[StepTokens, np.ndarray, RowRules, Draws]


class WarmPrograms(NamedTuple):
    """The kinds of draws whose programs are compiled before requests come.

    all_rules: those of the last kind take rules of all parts. So a request with a rule compiles
    nothing, unless it has more than 16 biases or bans.
    """

    kinds: tuple[Draws, ...] = ()
    all_rules: bool = False

    def inputs(
        self,
        records: Records,
        sizes: tuple[Sequence[int], Sequence[int]],
        chunks: int,
        drafts: int,
        vocabulary: int,
        *,
        scores: bool,
    ) -> list[ProgramInputs]:
        """Inputs of all programs of these (rows, tokens of prefill).

        scores: whether the last kind has programs that score prompts, beside its others.
        """
        rows, tokens = sizes
        pairs = [(StepTokens(), records.empty(count)) for count in rows]
        if drafts:
            places = [np.zeros((len(own), drafts), np.int32) for _, own in pairs]
            pairs += [
                (StepTokens(drafts=p), own) for p, (_, own) in zip(places, pairs, strict=True)
            ]
        for count in tokens:
            ids = np.zeros((records.lanes, count), np.int32)
            pairs.append((StepTokens(ids), records.empty(chunks)))
        plain = self.kinds[:-1] if self.all_rules else self.kinds
        found = [(*pair, RowRules(), kind) for pair in pairs for kind in plain]
        if not self.all_rules:
            return found
        prompts = [(given, own) for given, own in pairs if scores and given.ids is not None]
        pairs += [(given._replace(labels=given.ids), own) for given, own in prompts]
        last = self.kinds[-1]
        return found + [
            (g, own, filled(RowRules(), len(own), vocabulary, g.places), last) for g, own in pairs
        ]

    def choose(
        self, draws: Draws, rules: RowRules, given: StepTokens, rows: int, vocabulary: int
    ) -> tuple[Draws, RowRules]:
        """The kind and the rules of the program for a step that needs these."""
        is_special = rules.bias_ids is not None or given.labels is not None
        kinds = self.kinds[-1:] if is_special and self.all_rules else self.kinds
        found = next((kind for kind in kinds if kind.covers(draws)), draws)
        if self.all_rules and found == self.kinds[-1]:
            rules = filled(rules, rows, vocabulary, given.places)
        return found, rules


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
