"""Structured output by llguidance: which tokens may come next so that a text keeps its form.

Forms are JSON schemas, regular expressions and Lark grammars. Invariant: a mask allows only tokens
of the tokenizer whose bytes are known, so neither padded ids nor special tokens, but for end tokens
where the text may end.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mjax.data.base.token_pieces import TokenPieces
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
        size = min(tokenizer.vocab_size, vocabulary)
        self._library, self._words = llguidance, -(-vocabulary // 32)
        known, self._known_words = _Vocabulary(tokenizer, size, ends), -(-size // 32)
        self._tokens = llguidance.LLTokenizer(known, eos_token=[*ends])
        self._threads = llguidance.LLExecutor()

    def matcher(self, form: Structured) -> "GrammarMatcher":
        """Follow one sample through a form. Raises `UserError` for a form that cannot be read."""
        found = self._library.LLMatcher(self._tokens, self._text(form), log_level=0)
        if not found.is_error():
            found.compute_bitmask()  # which finds out where no text has the form
        if found.is_error():
            raise UserError(f"SamplingParams: structured: {_said_by(found)}")
        return GrammarMatcher(found, self)

    def masks(self, matchers: Sequence) -> np.ndarray:
        """The masks of matchers of llguidance, by several threads, bits uint32 [N, W]."""
        count, known = len(matchers), self._known_words
        found = np.zeros((count, known), np.uint32)
        pairs = [(matcher, place) for place, matcher in enumerate(matchers)]
        target, row_bytes = found.ctypes.data, found.strides[0]
        self._threads.unsafe_compute_mask_ptr(pairs, target, row_bytes, count)
        bits = np.zeros((count, self._words), np.uint32)
        bits[:, :known] = found
        return bits

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

    def __init__(self, inner, grammars: Grammars):
        self._inner, self._grammars = inner, grammars

    @property
    def error(self) -> str:
        return _said_by(self._inner) if self._inner.is_error() else ""

    @property
    def is_complete(self) -> bool:
        """Whether the text has its form and nothing but an end token may follow."""
        return self._inner.is_stopped()

    def mask(self) -> np.ndarray:
        """Tokens that may come next, bits uint32 [W]."""
        return self.masks_of([self])[0]

    def masks(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """`mask` now and after each of these tokens, which may come next one after the other."""
        found = [self.mask()]
        ahead = GrammarMatcher(self._inner.deep_copy(), self._grammars) if drafts else self
        for token in drafts:
            ahead.advance(token)
            found.append(ahead.mask())
        return found

    def masks_of(self, matchers: Sequence[Any]) -> np.ndarray:
        """The masks of these, by several threads, bits uint32 [N, W]."""
        return self._grammars.masks([matcher._inner for matcher in matchers])

    def allowed_drafts(self, drafts: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        return 0 if self._inner.is_stopped() else self._inner.validate_tokens([*drafts])

    def advance(self, token: int) -> None:
        """Add a token that `mask` allows; nothing is added after an error or the end."""
        if not self._inner.is_stopped():
            self._inner.consume_token(token)


def _said_by(matcher) -> str:
    """The error of a matcher of llguidance in one line."""
    return " ".join(matcher.get_error().split())[:300]


class _Vocabulary:
    """The bytes of tokens, as llguidance reads them.

    A token of unknown bytes has none, so that it is never allowed.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]):
        self._encode = tokenizer.encode
        self.eos_token_id = ends[0]
        special = [bool(tokenizer.special_text(id)) for id in range(size)]
        self.special_token_ids = [id for id in range(size) if special[id] or id in ends]
        pieces = TokenPieces(tokenizer)
        self.tokens = [pieces(id)[1] for id in range(size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())
