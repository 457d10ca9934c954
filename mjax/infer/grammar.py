"""Structured output by llguidance: which tokens may come next so that a text keeps its form.

Forms are JSON schemas, regular expressions and Lark grammars. Invariant: a mask allows only tokens
of the tokenizer whose bytes are known, so neither padded ids nor special tokens, but for end tokens
where the text may end.
"""

import functools
import json
import re
from collections.abc import Sequence

import numpy as np

from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError, or_user_error
from mjax.infer.requests import Structured

_MOST_LETTERS = 1_000_000  # characters of a schema
# JSON as Python writes it. With free white space a model may write that alone, up to the limit.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles forms for one tokenizer and a model of `vocabulary` tokens.

    Making it takes about a second for 100,000 tokens. `matcher` lets other threads run meanwhile.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]):
        """`ends`: the tokens that end a text. Raises `UserError` without llguidance or ends."""
        with or_user_error("structured: needs `pip install 'mjax[grammar]'`", ImportError):
            import llguidance
        if not ends:
            raise UserError("structured: the model has no end token, with which a form ends")
        self._library, self._words = llguidance, -(-vocabulary // 32)
        known = _Vocabulary(tokenizer, min(tokenizer.vocab_size, vocabulary), ends)
        self._tokens = llguidance.LLTokenizer(known, eos_token=[*ends])

    def matcher(self, form: Structured) -> "GrammarMatcher":
        """Follow one sample through a form. Raises `UserError` for a form that cannot be read."""
        found = self._library.LLMatcher(self._tokens, self._text(form), log_level=0)
        if not found.is_error():
            found.compute_bitmask()  # which finds out where no text has the form
        if found.is_error():
            raise UserError(f"SamplingParams: structured: {_said_by(found)}")
        return GrammarMatcher(found, self._words)

    def _text(self, form: Structured) -> str:
        kind = self._library.LLMatcher
        if form.regex is not None:
            return kind.grammar_from_regex(form.regex)
        if form.grammar is not None:
            return kind.grammar_from_lark(form.grammar)
        wrong = "SamplingParams: structured: json_schema: {reason}"
        with or_user_error(wrong, (ValueError, TypeError, RecursionError)):
            schema = json.dumps(form.json_schema, allow_nan=False)
            if len(schema) > _MOST_LETTERS:
                raise UserError(
                    f"SamplingParams: structured: json_schema: over {_MOST_LETTERS} letters"
                )
            return kind.grammar_from_json_schema(schema, overrides=_JSON)


class GrammarMatcher:
    """One sample on its way through a form.

    `error` is empty, or why the library gave up, such as a limit on its work. Masks then allow end
    tokens alone.
    """

    def __init__(self, inner, words: int):
        self._inner, self._words = inner, words

    @property
    def error(self) -> str:
        return _said_by(self._inner) if self._inner.is_error() else ""

    @property
    def is_complete(self) -> bool:
        """Whether the text has its form and nothing but an end token may follow."""
        return self._inner.is_stopped()

    def mask(self) -> np.ndarray:
        """Tokens that may come next, bits uint32 [W]."""
        found = np.frombuffer(self._inner.compute_bitmask(), "<u4")
        bits = np.zeros(self._words, np.uint32)
        bits[: len(found)] = found[: len(bits)]
        return bits

    def advance(self, token: int) -> None:
        """Add a token that `mask` allows; nothing is added after an error or the end."""
        if not self._inner.is_stopped():
            self._inner.consume_token(token)

    def rollback(self, count: int) -> None:
        """Take the last tokens back, as after drafts that were not accepted."""
        self._inner.rollback(count)

    def copy(self) -> "GrammarMatcher":
        """A matcher in the same state, for another sample of the request."""
        return GrammarMatcher(self._inner.deep_copy(), self._words)


def _said_by(matcher) -> str:
    """The error of a matcher of llguidance in one line."""
    return " ".join(matcher.get_error().split())[:300]


class _Vocabulary:
    """The bytes of tokens, as llguidance reads them.

    A token of unknown bytes has none, so that it is never allowed. Tokens are decoded after another
    one, for the first token of a text may lose a space.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]):
        self._encode = tokenizer.encode
        self.eos_token_id = ends[0]
        special = {id: tokenizer.special_text(id) for id in range(size)}
        self.special_token_ids = [id for id, text in special.items() if text or id in ends]
        before = tokenizer.encode("a")
        start = len(tokenizer.decode(before))
        self.tokens = []
        for id in range(size):
            text = tokenizer.decode([*before, id])[start:]
            piece = tokenizer.piece_of(id) if tokenizer.piece_of else None
            self.tokens.append(special[id].encode() or token_bytes(text, piece))

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def token_bytes(text: str, piece: str | None) -> bytes:
    """The bytes of a token that decodes to a text; none where they are not known."""
    if "\ufffd" not in text:
        return text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece or ""):
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    is_known = piece is not None and all(letter in letters for letter in piece)
    return bytes(letters[letter] for letter in piece) if is_known else b""


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The bytes that letters stand for in byte-level BPE: GPT-2 moved the unprintable ones up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    places = {chr(256 + number): byte for number, byte in enumerate(moved)}
    return {chr(byte): byte for byte in printable} | places
