"""A source of conversations as arrays of tokens, made once and kept on disk.

Invariant: a record is in the arrays or among those that are left out, which are counted and named.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.cache import cached_arrays
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.conversations.answers import AnswerTokenizer, TokenizedConversation, template_of
from mjax.data.conversations.formats import parse_record
from mjax.data.conversations.records import Record, read_records, source_files
from mjax.errors import UserError

log = logging.getLogger(__name__)
ARRAYS = "ids", "is_answer", "ends", "names", "left_out"
CONVERSATIONS_VERSION = 1  # raise it when the same records give other arrays
AT_ONCE = 512  # records tokenized in one call
NAMED = 3  # broken records in a message


@dataclass(frozen=True)
class TokenizedSource:
    """The conversations of a source.

    ids: int32, all conversations end to end. is_answer: bool, the tokens that the loss is on.
    ends: int64, where each conversation ends. names: FILE:LINE of each.
    left_out: a line on each record that is broken.
    """

    ids: np.ndarray
    is_answer: np.ndarray
    ends: np.ndarray
    names: list[str]
    left_out: list[str]

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each conversation."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, is_answer) of a conversation."""
        begin = self.ends[number - 1] if number else 0
        part = slice(begin, self.ends[number])
        return self.ids[part], self.is_answer[part]


def tokenize_source(path: str, cfg: Config, tokenizer: Tokenizer) -> TokenizedSource:
    """The conversations of a file, a folder or a glob, from the cache if it has them.

    Raises `UserError` for a broken record or, where those are skipped, if nothing is left.
    """
    settings, files = cfg.data.conversations, source_files(path)
    key = {
        "conversations": CONVERSATIONS_VERSION,
        "files": [[os.path.abspath(file), *_state(file)] for file in files],
        "tokenizer": tokenizer.digest,
        "template": _template_text(cfg),
        "answers": settings.answers,
        "broken": settings.broken,
    }
    folder = cfg.data.cache_dir or Path(cfg.run.dir) / "conversations"
    arrays, _ = cached_arrays(folder, key, ARRAYS, lambda: _made(path, files, cfg, tokenizer))
    *tokens, names, left_out = arrays
    source = TokenizedSource(*tokens, *(json.loads(bytes(text)) for text in (names, left_out)))
    if count := len(source.left_out):
        some = ", ".join(source.left_out[:NAMED]) + (", .." if count > NAMED else "")
        total = count + len(source.names)
        say = "data.conversations: %s: %d of %d records are left out: %s"
        log.warning(say, path, count, total, some)
    return source


def _state(file: str) -> tuple[int, int]:
    stat = os.stat(file)
    return stat.st_size, stat.st_mtime_ns


def _template_text(cfg: Config) -> str | None:
    """The template's source and its special tokens; None where there is none."""
    try:
        template = template_of(cfg.data)
    except UserError:  # pairs of texts need none
        return None
    return json.dumps([template.source, dict(template.tokens)])


@dataclass
class _Gathered:
    """Arrays of conversations as they are read.

    answers: their number; ended: those that end in a special token.
    """

    ids: list[np.ndarray] = field(default_factory=list)
    is_answer: list[np.ndarray] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    answers: int = 0
    ended: int = 0

    def add(self, name: str, found: TokenizedConversation) -> None:
        self.names.append(name)
        self.ids.append(np.array(found.ids, np.int32))
        self.is_answer.append(found.is_answer)
        self.answers += found.answers
        self.ended += found.ended

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Those that `ARRAYS` names."""
        ends = np.cumsum([len(ids) for ids in self.ids], dtype=np.int64)
        texts = [json.dumps(lines).encode() for lines in (self.names, self.left_out)]
        as_bytes = [np.frombuffer(text, np.uint8) for text in texts]
        return np.concatenate(self.ids), np.concatenate(self.is_answer), ends, *as_bytes


def _made(path: str, files: list[str], cfg: Config, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
    """The arrays of a source. Raises `UserError`."""
    settings = cfg.data.conversations
    answers = AnswerTokenizer(tokenizer, lambda: template_of(cfg.data), settings.answers == "last")
    gathered = _Gathered()
    for name, found in _tokenized_records(files, answers):
        if not isinstance(found, UserError):
            gathered.add(name, found)
        elif settings.broken == "refuse":
            raise UserError(f"{found} (data.conversations.broken=skip leaves such records out)")
        else:
            gathered.left_out.append(str(found))
    if not gathered.names:
        first = f": {gathered.left_out[0]}" if gathered.left_out else ""
        count = len(gathered.left_out)
        raise UserError(f"data.conversations: {path}: none of {count} records can be used{first}")
    if not gathered.ended:
        raise UserError(
            f"data.conversations: {path}: no answer ends in a special token, so the model would "
            "never learn to stop; take a chat template that ends answers inside their "
            "{% generation %} block or before the next turn, or a tokenizer that has an end token"
        )
    return gathered.arrays()


def _tokenized_records(
    files: list[str], answers: AnswerTokenizer
) -> Iterator[tuple[str, TokenizedConversation | UserError]]:
    """Yield the place of each record, and its tokens or why it has none."""
    records = read_records(files)
    while chunk := list(islice(records, AT_ONCE)):
        parsed = [_parsed_or_error(record) for record in chunk]
        names = [name for name, _ in chunk]
        yield from zip(names, answers.tokenize(parsed), strict=True)


def _parsed_or_error(record: Record) -> object:
    """The `Conversation` of a record, or the `UserError` that says why it has none."""
    name, row = record
    if isinstance(row, UserError):
        return row
    try:
        return parse_record(name, row)
    except UserError as e:
        return e
