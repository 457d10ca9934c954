"""A source of conversations as arrays of tokens, made once and kept on disk.

Invariant: a record is in the arrays or among those that are left out, which are counted and named.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from mjax.config.schema.run import Config, ConversationDataConfig
from mjax.data.base.cache import cached_arrays
from mjax.data.base.chat import load_chat_template
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.conversations.answers import AnswerTokenizer, TokenizedConversation
from mjax.data.conversations.formats import Conversation, parse_record
from mjax.data.conversations.records import attempt, read_records, source_files
from mjax.errors import UserError, or_user_error

log = logging.getLogger(__name__)
ARRAYS = "ids", "is_answer", "ends", "names", "left_out"
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
    answers = answer_tokenizer(cfg, tokenizer)
    key = key_of_source(path, files, cfg, answers) | {"answers": settings.answers}
    arrays, _ = cached_arrays(
        cache_of(cfg), key, ARRAYS, lambda: _made(path, files, settings, answers)
    )
    texts = [json.loads(bytes(text)) for text in arrays[3:]]
    source = TokenizedSource(*arrays[:3], *texts)
    warn_of_left_out(path, source.names, source.left_out)
    return source


def answer_tokenizer(cfg: Config, tokenizer: Tokenizer) -> AnswerTokenizer:
    """The tokenizer of answers of a run, with the chat template beside `data.tokenizer`."""
    template = attempt(load_chat_template, cfg.data.tokenizer)
    return AnswerTokenizer(tokenizer, template, cfg.data.conversations.answers == "last")


def cache_of(cfg: Config) -> Path:
    """The folder of the tokens of records."""
    return Path(cfg.data.cache_dir or Path(cfg.run.dir) / "conversations")


def key_of_source(path: str, files: list[str], cfg: Config, answers: AnswerTokenizer) -> dict:
    """The facts that determine the tokens of a source, as JSON data."""
    with or_user_error(f"data.conversations: {path}: cannot be read: {{reason}}"):
        states = [(os.path.abspath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    return {
        "files": states,
        "tokenizer": answers.tokenizer.digest,
        "template": repr(answers.template),
        "broken": cfg.data.conversations.broken,
    }


def warn_of_left_out(path: str, names: list[str], left_out: list[str]) -> None:
    """Log how many records are left out, and the first of them."""
    if count := len(left_out):
        some = ", ".join(left_out[:NAMED]) + (", .." if count > NAMED else "")
        say = "data.conversations: %s: %d of %d records are left out: %s"
        log.warning(say, path, count, count + len(names), some)


def _made(
    path: str, files: list[str], settings: ConversationDataConfig, answers: AnswerTokenizer
) -> tuple[np.ndarray, ...]:
    """The arrays of a source that `ARRAYS` names. Raises `UserError`."""
    used, left_out = {}, []
    for name, found in _tokenized_records(files, answers):
        if not isinstance(found, UserError):
            used[name] = found
        else:
            left_out.append(words_to_skip(found, settings, answers))
    if not used:
        raise nothing_to_use(path, left_out)
    if not any(found.is_ended for found in used.values()):
        raise UserError(
            f"data.conversations: {path}: no answer ends in a special token, so the model would "
            "never learn to stop; take a chat template that ends each answer with one"
        )
    ids, is_answer, _ = zip(*used.values(), strict=True)
    ends = np.cumsum([len(one) for one in ids], dtype=np.int64)
    texts = [np.frombuffer(json.dumps(x).encode(), np.uint8) for x in ([*used], left_out)]
    return np.concatenate(ids), np.concatenate(is_answer), ends, *texts


def nothing_to_use(path: str, left_out: list[str]) -> UserError:
    """The error of a source of which no record is left."""
    if not left_out:
        return UserError(f"data.conversations: {path}: holds no record; give a file that has some")
    said = f"none of {len(left_out)} records can be used: {left_out[0]}"
    return UserError(f"data.conversations: {path}: {said}")


def words_to_skip(
    found: UserError, settings: ConversationDataConfig, answers: AnswerTokenizer
) -> str:
    """Words on a record that is left out. Raises `UserError` where none may be."""
    if found is answers.lack:
        raise found
    if settings.broken == "refuse":
        raise UserError(f"{found} (data.conversations.broken=skip leaves such records out)")
    return str(found)


def _tokenized_records(
    files: list[str], answers: AnswerTokenizer
) -> Iterator[tuple[str, TokenizedConversation | UserError]]:
    """Yield the place of each record, and its tokens or why it has none."""
    records = read_records(files)
    while chunk := list(islice(records, AT_ONCE)):
        parsed = [attempt(parse_record, row, name) for name, row in chunk]
        tokenized = tokenize_conversations(parsed, answers)
        yield from zip([name for name, _ in chunk], tokenized, strict=True)


def tokenize_conversations(
    parsed: list[Conversation | UserError], answers: AnswerTokenizer
) -> Iterator[TokenizedConversation | UserError]:
    """Yield the tokens of each conversation, or why it has none."""
    texts = [attempt(answers.render, conversation) for conversation in parsed]
    whole = ["" if isinstance(text, UserError) else text.text for text in texts]
    encode = answers.tokenizer.encode_with_places
    placed = encode(whole) if encode else [None] * len(whole)
    for given in zip(texts, parsed, placed, strict=True):
        yield attempt(answers.tokenize, *given)
