"""Rows of answers that are compared or rated: whole groups in one row, packed by best fit.

A document is a prompt with an answer. The documents of a pair follow each other, the chosen answer
first, so their numbers in a row are 2k - 1 and 2k. With losses of single answers that read a
divergence, the second is the same prompt with the answer of another record. With
`data.shared_prefixes` both hold their prompt once (`data/base/shared_prefix.py`).
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.cache import cached_arrays
from mjax.data.base.shared_prefix import PlacedBlock, context_length, placed_blocks
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.conversations.answer_records import PAIRS, STEPS, AnswerGroup, parse_answers
from mjax.data.conversations.answers import AnswerTokenizer, TokenizedConversation
from mjax.data.conversations.records import attempt, read_records, source_files
from mjax.data.conversations.rows import ConversationDataset, LengthCounts
from mjax.data.conversations.tokenized import (
    answer_tokenizer,
    cache_of,
    key_of_source,
    nothing_to_use,
    tokenize_conversations,
    warn_of_left_out,
    words_to_skip,
)
from mjax.data.corpus.gpt import FieldArrays
from mjax.errors import UserError

log = logging.getLogger(__name__)
MATCHED = "matched"
PlacedDocument = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, is_answer, values
ANSWER_ARRAYS = "ids", "is_answer", "values", "ends", "margins", "names", "left_out"


@dataclass(frozen=True)
class AnswerSource:
    """The answers of a source, as arrays of tokens.

    ids, is_answer, values: of the tokens of all answers, end to end. A value stands at the last
        token of an answer or of a step, and is 0 elsewhere.
    ends: where each answer ends. margins, names: of each group. left_out: a line on each record
    that is broken.
    """

    ids: np.ndarray
    is_answer: np.ndarray
    values: np.ndarray
    ends: np.ndarray
    margins: np.ndarray
    names: list[str]
    left_out: list[str]
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.append(0, self.ends[:-1]))

    def document(self, number: int) -> PlacedDocument:
        """(ids, is_answer, values) of an answer with its prompt."""
        part = slice(self.starts[number], self.ends[number])
        return self.ids[part], self.is_answer[part], self.values[part]


class AnswerDataset(ConversationDataset):
    """`size` rows (None: an epoch) of groups of answers; the fields of conversations and more.

    "answer_values" and "margins" [B, S] stand at the last place of an answer, values of steps at
    the last place of each. With `reads_last` (models of scores) a document has its last token, and
    there are no labels. `stored_scores`, once set, is a field "ref_log_probs": fp32, a number for
    each place of the documents of all groups, in their order.
    """

    def __init__(self, *given: object, kind: str, reads_last: bool, **more: object):
        self.kind = kind
        self.shift = int(not reads_last)
        self.documents = 2 if kind in (PAIRS, MATCHED) else 1
        self.stored_scores: np.ndarray | None = None
        super().__init__(*given, **more)
        if self.shares:
            self.max_documents += max(map(len, self.ranks))
        places = self.places.reshape(-1)
        self.offsets = np.cumsum(places) - places

    def _read(self, cfg: Config, tokenizer: Tokenizer) -> AnswerSource:
        self.shares = cfg.data.shared_prefixes
        return read_answers(self.path, cfg, tokenizer, self.kind)

    def _fitting(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, LengthCounts]:
        """(the groups that are used, their places in a row, what was lost).

        Sets `places`, int [groups, documents], of the documents of each group, and `contexts`, how
        many of them all its documents share.
        """
        room, too_long = self.seq_length, self.settings.too_long
        if self.kind == MATCHED and len(numbers) < 2:
            raise UserError(f"data.conversations: {self.path}: kto needs two answers at least")
        self.partners = dict(zip(numbers.tolist(), np.roll(numbers, -1).tolist(), strict=True))
        lengths = np.zeros((len(numbers), self.documents), np.int64)
        contexts, most = np.zeros((2, len(numbers)), np.int64)
        is_used, trained_after = np.ones(len(numbers), bool), 0
        is_cut = np.zeros(len(numbers), bool)
        for at, number in enumerate(numbers.tolist()):
            parts = self._documents(number)
            lengths[at] = [len(ids) - self.shift for ids, _, _ in parts]
            if self.shares:
                contexts[at] = context_length([part[:2] for part in parts])
            if self._places_in_row(lengths[at], contexts[at]) <= room:
                continue
            most[at] = contexts[at] + max(room - contexts[at], 0) // self.documents
            answers = [part[1][self.shift :] for part in parts]
            is_used[at] = too_long == "cut" and all(one[: most[at]].any() for one in answers)
            is_cut[at] = is_used[at]
            kept = most[at] if is_used[at] else 0
            trained_after += sum(int(one[kept:].sum()) for one in answers)
        places = np.where(is_cut[:, None], np.minimum(lengths, most[:, None]), lengths)
        self.places, self.contexts = places[is_used], contexts[is_used]
        counts = LengthCounts(
            cut=int(is_cut.sum()),
            dropped=int((~is_used).sum()),
            lost=int(lengths.sum() - self.places.sum()),
            lost_trained=trained_after,
        )
        in_rows = self._places_in_row(lengths, contexts)
        self._warn_of_lengths(counts, in_rows, is_used)
        return numbers[is_used], self._places_in_row(self.places, self.contexts), counts

    def _places_in_row(self, lengths: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """The places of groups whose documents [..., documents] have these lengths."""
        return lengths.sum(-1) - (self.documents - 1) * contexts

    def _warn_of_lengths(
        self, counts: LengthCounts, in_rows: np.ndarray, is_used: np.ndarray
    ) -> None:
        """Say which records do not fit a row. Raises `UserError` where none may be cut."""
        if not counts.cut + counts.dropped:
            return
        said = (
            f"{self.path}: {counts.cut + counts.dropped} of {len(in_rows)} records of "
            f"{self.documents} answers are longer than data.seq_length={self.seq_length} (the "
            f"longest: {in_rows.max()})"
        )
        if self.settings.too_long == "refuse" or not is_used.any():
            raise UserError(f"data.conversations: {said}; raise it, or see too_long")
        say = "data.conversations: %s; of %d answers are cut, %d are left out"
        log.warning(say, said, counts.cut, counts.dropped)

    def _documents(self, number: int) -> list[PlacedDocument]:
        """The (ids, is_answer, values) of the documents of a group."""
        document = self.source.document
        if self.kind == PAIRS:
            return [document(2 * number), document(2 * number + 1)]
        own = document(number)
        if self.kind != MATCHED:
            return [own]
        return [own, _mismatched(own, document(self.partners[number]))]

    def batch(self, indices: np.ndarray) -> FieldArrays:
        """Rows `indices`, stacked."""
        shape = len(indices), self.seq_length
        names = ["tokens", "labels", "segment_ids", "positions"]
        names += ["prefix_ids"] if self.shares else []
        fields = {name: np.zeros(shape, np.int32) for name in names}
        names = ["loss_mask", "answer_values", "margins"]
        if self.stored_scores is not None:
            names.append("ref_log_probs")
        fields |= {name: np.zeros(shape, np.float32) for name in names}
        for row, index in enumerate(indices):
            of_row = {name: field[row] for name, field in fields.items()}
            for member, block in self.placed_blocks(index):
                block.fill(of_row)
                here = {name: field[block.places] for name, field in of_row.items()}
                self._fill(here, member, block)
        return fields

    def placed_blocks(self, index: int) -> Iterator[tuple[int, PlacedBlock]]:
        """Yield (group, one of its blocks) of a row, in order."""
        members = self.members(index)
        for block in placed_blocks(self.places[members], self.contexts[members]):
            yield members[block.group], block

    def offset(self, member: int, block: PlacedBlock) -> int:
        """The number of a block's first place among those of all documents."""
        return self.offsets[member * self.documents + (block.order or 0)] + block.first

    def _fill(self, here: FieldArrays, member: int, block: PlacedBlock) -> None:
        """Fill the fields of the places of one block."""
        number, order = self.numbers[member], block.order
        at = slice(block.first, block.first + block.count)
        ids, is_answer, values = self._documents(number)[order or 0]
        here["tokens"][:] = ids[at]
        if self.shift:
            here["labels"][:] = ids[1:][at]
        here["loss_mask"][:] = is_answer[self.shift :][at]
        here["answer_values"][:] = values[self.shift :][at]
        if self.kind != STEPS and order is not None:
            here["answer_values"][-1] = values[-1]  # also where the answer is cut
        if order == 0:
            here["margins"][-1] = self.source.margins[number]
        if self.stored_scores is not None:
            begin = self.offset(member, block)
            here["ref_log_probs"][:] = self.stored_scores[begin : begin + block.count]

    def trained_tokens(self) -> int:
        rows = self.batch(range(len(self.ranks)))
        return int(rows["loss_mask"].sum())

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        found = np.zeros((len(indices), 2), np.int64)
        for row, index in enumerate(indices):
            members = self.members(index)
            twice = (self.documents - 1) * self.contexts[members] ** 2  # what sharing spares
            squares = (self.places[members] ** 2).sum()
            found[row] = self.lengths[members].sum(), squares - twice.sum()
        return found


def read_answers(path: str, cfg: Config, tokenizer: Tokenizer, kind: str) -> AnswerSource:
    """The answers of a file, a folder or a glob, from the cache if it has them."""
    files, answers = source_files(path), answer_tokenizer(cfg, tokenizer)
    kind = kind if kind in (PAIRS, STEPS) else "single"
    key = key_of_source(path, files, cfg, answers) | {"answers": kind}
    arrays, _ = cached_arrays(
        cache_of(cfg),
        key,
        ANSWER_ARRAYS,
        lambda: _tokenized_answers(path, files, kind, answers, cfg),
    )
    source = AnswerSource(*arrays[:5], *(json.loads(bytes(text)) for text in arrays[5:]))
    warn_of_left_out(path, source.names, source.left_out)
    return source


def _tokenized_answers(
    path: str, files: list[str], kind: str, answers: AnswerTokenizer, cfg: Config
) -> tuple[np.ndarray, ...]:
    """The arrays of a source that `ANSWER_ARRAYS` names. Raises `UserError`."""
    found, margins, names, left_out = [], [], [], []
    for name, row in read_records(files):
        groups = attempt(_groups_of, row, name, kind, answers)
        if isinstance(groups, UserError):
            left_out.append(words_to_skip(groups, cfg.data.conversations, answers))
            continue
        for margin, documents in groups:
            found += documents
            margins.append(margin)
            names.append(name)
    if not found:
        raise nothing_to_use(path, left_out)
    ids, is_answer, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    ends = np.cumsum([len(one[0]) for one in found], dtype=np.int64)
    texts = [np.frombuffer(json.dumps(x).encode(), np.uint8) for x in (names, left_out)]
    return ids, is_answer, values, ends, np.array(margins, np.float32), *texts


def _groups_of(row: dict, name: str, kind: str, answers: AnswerTokenizer) -> list:
    """(margin, documents) of each group of a record. Raises `UserError`."""
    found = []
    for group in parse_answers(row, name, kind):
        if group.steps is not None:
            documents = [_document_of_steps(group, answers.tokenizer)]
        else:
            documents = []
            tokenized = tokenize_conversations(group.conversations, answers)
            for value, one in zip(group.values, tokenized, strict=True):
                if isinstance(one, UserError):
                    raise one
                documents.append(_document(one, value))
        found.append((group.margin, documents))
    return found


def _mismatched(own: PlacedDocument, other: PlacedDocument) -> PlacedDocument:
    """The prompt of one document with the answer of another, which has no value."""
    before, behind = own[1].argmax(), other[1].argmax()
    ids = np.append(own[0][:before], other[0][behind:])
    is_answer = np.append(own[1][:before], other[1][behind:])
    return ids, is_answer, np.zeros(len(ids), np.float32)


def _document(one: TokenizedConversation, value: float) -> PlacedDocument:
    values = np.zeros(len(one.ids), np.float32)
    values[-1] = value
    return one.ids, one.is_answer, values


def _document_of_steps(group: AnswerGroup, tokenizer: Tokenizer) -> PlacedDocument:
    """A prompt and steps, each with a line feed, whose last token has the step's value."""
    (conversation,) = group.conversations
    ids = [*tokenizer.prefix, *tokenizer.encode(conversation.plain[0])]
    before, ends = len(ids), []
    for step in group.steps:
        ids += tokenizer.encode(f"{step}\n")
        ends.append(len(ids) - 1)
    values = np.zeros(len(ids), np.float32)
    values[ends] = group.values
    return np.array(ids, np.int32), np.arange(len(ids)) >= before, values
