"""Requests for texts, with vLLM's names of fields, and what comes back.

`SamplingParams` is checked where it is made: each mistake is one line that names its field.
`token_rules` turns it into ids of a vocabulary. `Answer` follows one sample while it is made: its
text, its end, and the tokens that it may not draw next.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)

from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.infer.sample import Sampling
from mjax.infer.text import TextStream

_MOST = 1024  # entries of a list


def _integer(text: Any) -> Any:
    return int(text) if isinstance(text, str) and text.isdecimal() else text


def _with_names(given: Any) -> Any:
    """A dictionary whose keys are texts, as those of calls have to be."""
    if not isinstance(given, dict):
        return given
    return {
        key if isinstance(key, str) else reprlib.repr(key): value for key, value in given.items()
    }


_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, Field(min_length=1, max_length=10_000)]
_Ids = Annotated[tuple[_Id, ...], Strict(False), Field(max_length=_MOST)]
_Texts = Annotated[
    tuple[_Text, ...],
    Strict(False),
    Field(max_length=64),
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
]
_Key = Annotated[_Id, BeforeValidator(_integer)]  # keys of JSON are texts
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Shown = Annotated[int, Field(ge=0, le=20)]  # tokens of which log-probabilities are shown


class _Checked(BaseModel):
    """A group of fields whose mistakes are `UserError`s of one line."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as e:
            raise UserError(f"{type(self).__name__}: {_explained(e)}") from None


class Structured(_Checked):
    """A form that a text must have: one of a JSON schema, a regular expression, a Lark grammar."""

    json_schema: dict[str, Any] | None = None
    regex: _Text | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=1_000_000)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "Structured":
        if sum(given is not None for given in (self.json_schema, self.regex, self.grammar)) != 1:
            raise UserError("structured: give one of json_schema, regex and grammar")
        return self


class SamplingParams(_Checked):
    """How texts are continued; fields, units and meanings are vLLM's but for the defaults.

    n: samples of each prompt.
    temperature: 0, the default, always takes the likeliest token.
    top_k (0 or -1: all), top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: as
    in `Sampling`.
    seed: fixes the noise of the samples; taken modulo 2^32. None: the engine chooses one.
    max_tokens: new tokens at most; None: up to the length that the engine allows.
    min_tokens: before so many new tokens no end token, stop id or stop string ends a sample.
    stop: strings that end a sample, which its text leaves out unless include_stop_str_in_output.
    stop_token_ids: tokens that end a sample, beside those of the model, which ignore_eos turns off.
    bad_words: texts that no new tokens spell; logit_bias: added to logits, by token.
    allowed_token_ids: the only tokens to draw from.
    logprobs, prompt_logprobs: log-probabilities of so many of the likeliest tokens, 0 to 20.
    skip_special_tokens: whether text leaves special tokens out.
    detokenize: whether there is text at all.
    structured: the form of the text.
    priority: lower ones first. cache_salt: caches are shared only by requests of one salt.
    adapter: the name of a LoRA adapter.
    """

    n: Annotated[int, Field(ge=1, le=1024)] = 1
    temperature: float = 0.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = 16
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop: _Texts = ()
    stop_token_ids: _Ids = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    bad_words: _Texts = ()
    logit_bias: Annotated[dict[_Key, _Bias], Field(max_length=_MOST)] = {}
    allowed_token_ids: Annotated[tuple[_Id, ...], Strict(False), Field(min_length=1)] | None = None
    logprobs: _Shown | None = None
    prompt_logprobs: _Shown | None = None
    structured: Annotated[Structured, BeforeValidator(_with_names)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: _Text | None = None
    adapter: _Text | None = None

    @property
    def sampling(self) -> Sampling:
        """The part that the sampler reads on the device."""
        return Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )

    @model_validator(mode="after")
    def _agrees(self) -> "SamplingParams":
        _ = self.sampling  # checks its own fields
        structured = self.structured is not None
        contradictions = {
            f"n={self.n} with temperature=0 gives equal samples; raise temperature": (
                self.n > 1 and self.temperature == 0
            ),
            f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}": (
                self.max_tokens is not None and self.min_tokens > self.max_tokens
            ),
            "structured with min_tokens: the form says where the text ends": (
                structured and self.min_tokens > 0
            ),
            "structured with ignore_eos: the form says where the text ends": (
                structured and self.ignore_eos
            ),
            "structured with allowed_token_ids may leave no token; give one of them": (
                structured and self.allowed_token_ids is not None
            ),
            "structured with bad_words may leave no token; put these into the form": (
                structured and bool(self.bad_words)
            ),
            "stop with detokenize=False: there is no text to find it in": (
                bool(self.stop) and not self.detokenize
            ),
            "allowed_token_ids with bad_words may leave no token; give one of them": (
                self.allowed_token_ids is not None and bool(self.bad_words)
            ),
        }
        for message, found in contradictions.items():
            if found:
                raise UserError(message)
        return self


def _explained(error: ValidationError) -> str:
    """The first mistake in one line."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|Tuple|Dictionary) should", "must", message)
    if not first["loc"]:
        return message
    name = ".".join(ascii(part).strip("'")[:40] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{name}: there is no such field"
    return f"{name}={reprlib.repr(first['input'])}: {message}"


@dataclass(frozen=True)
class TokenRules:
    """A request in ids of a vocabulary.

    ends: tokens that end a sample.
    bias: added to logits, by token.
    allowed: uint32 [W] with a bit for each token, or None.
    bad_words: sequences of tokens of which the last one may not follow the others.
    """

    ends: frozenset[int] = frozenset()
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: np.ndarray | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


def token_rules(
    params: SamplingParams, tokenizer: Tokenizer | None, vocabulary: int, eos: Sequence[int] = ()
) -> TokenRules:
    """The ids of a request for a model of `vocabulary` tokens that ends texts with one of `eos`.

    Raises `UserError` for ids that it does not have and for what needs a tokenizer.
    """
    lists = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in lists.items():
        outside = [id for id in ids if id >= vocabulary]
        if outside:
            raise UserError(
                f"SamplingParams: {name}: {outside[0]} is outside the vocabulary of {vocabulary}"
            )
    if tokenizer is None:
        for name in ("stop", "bad_words", "structured"):
            if getattr(params, name):
                raise UserError(f"SamplingParams: {name} needs a tokenizer; give one")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    allowed = None
    if params.allowed_token_ids is not None:
        if params.min_tokens and ends.issuperset(params.allowed_token_ids):
            raise UserError(
                "SamplingParams: allowed_token_ids are all end tokens, which min_tokens forbids"
            )
        allowed = bits_of(params.allowed_token_ids, vocabulary)
    words = [ids for word in params.bad_words for ids in _spellings(word, tokenizer)]
    return TokenRules(frozenset(ends), params.logit_bias, allowed, tuple(words))


def bits_of(ids: Sequence[int], vocabulary: int) -> np.ndarray:
    """Ids as bits, uint32 [W]: bit i of word w is id 32 w + i."""
    flags = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view("<u4")


def _spellings(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of a word at the start of a text and after a space, as vLLM takes them."""
    first = tuple(tokenizer.encode(word))
    inner = tuple(tokenizer.encode(f" {word.lstrip()}"))
    differs = first and inner and inner[0] != first[0] and len(inner) == len(first)
    return [ids for ids in (first, inner if differs else ()) if ids]


@dataclass
class CompletionOutput:
    """One sample of a request, as far as it is made.

    index: its number among the samples of the request.
    text, token_ids: what was made; text leaves out an end token.
    logprobs, processed_logprobs: of each token, the model's own and under the distribution that
    it was drawn from (`Drawn`).
    top_logprobs: for each token the likeliest ones' and its own, by id; None if not asked for.
    weight_versions: the version of the weights that made each token.
    finish_reason: None while it is made; 'stop', 'length', 'abort', or 'error' where structured
    output gave up.
    stop_reason: the stop string or the id of `stop_token_ids` that ended it, or the error.
    experts: int16 [tokens or more, layers with experts, k], those that each token went to, the
    prompt's first, once it has ended; the last token is not computed. None: they are not kept.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] | None = None
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    experts: Any = None


@dataclass
class RequestOutput:
    """A request and its samples.

    prompt_logprobs: for each token of the prompt the likeliest ones' and its own, by id; None for
    the first token, and None at all if not asked for.
    num_cached_tokens: tokens of the prompt whose caches were there before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = 0


class Matcher(Protocol):
    """Follows one sample through its form (`grammar.py`); `error` says why it gave up."""

    @property
    def error(self) -> str: ...

    @property
    def is_complete(self) -> bool:
        """Whether the text has its form and no token may follow."""

    def masks(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """Tokens that may come next and after each of these, bits uint32 [W]."""

    def masks_of(self, matchers: Sequence["Matcher"]) -> np.ndarray:
        """Tokens that may come next in each of these, by several threads, bits uint32 [N, W]."""

    def allowed_drafts(self, drafts: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""

    def advance(self, token: int) -> None:
        """Add a token that the first of `masks` allowed."""


class Answer:
    """One sample while it is made; `output` is what is known of it."""

    def __init__(
        self,
        params: SamplingParams,
        rules: TokenRules,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        index: int = 0,
        matcher: Matcher | None = None,
    ):
        """`prompt`: the tokens before. Without a tokenizer the text stays empty.

        `matcher`: of the form `params.structured`. Attributes:

        waits: whether the host must have read all its tokens before the next one is drawn.
        has_rules: whether some tokens are favored or forbidden.
        """
        self.params, self.rules, self.matcher = params, rules, matcher
        top: list | None = None if params.logprobs is None else []
        self.output = CompletionOutput(index, top_logprobs=top)
        self._text = text_stream(params, tokenizer, prompt)
        # What each step asks of each row is computed once.
        self.waits = matcher is not None or any(len(word) > 1 for word in rules.bad_words)
        given = rules.bias, rules.bad_words, rules.allowed is not None, matcher, params.min_tokens
        self.has_rules = any(given)

    def push(
        self,
        token: int,
        logprob: float = 0.0,
        processed: float = 0.0,
        top: Mapping[int, float] | None = None,
        version: int = 0,
    ) -> str:
        """Add a token, unless the sample has ended; returns the text that is now certain.

        `top`: log-probabilities of the likeliest tokens, the likeliest first; those that the
        request does not ask for are left out.
        """
        out, params = self.output, self.params
        if out.finish_reason is not None:
            return ""
        out.token_ids.append(token)
        out.logprobs.append(logprob)
        out.processed_logprobs.append(processed)
        out.weight_versions.append(version)
        if out.top_logprobs is not None:
            shown = islice((top or {}).items(), params.logprobs)
            out.top_logprobs.append({**dict(shown), token: logprob})
        made = len(out.token_ids)
        may_stop = made >= max(params.min_tokens, 1)
        is_end = may_stop and token in self.rules.ends
        if self.matcher is not None:
            self.matcher.advance(token)
        text, stream = "", self._text
        if stream is not None and (not is_end or params.include_stop_str_in_output):
            text = stream.push(token, may_stop)
        if self.matcher is not None and self.matcher.error:
            out.finish_reason, out.stop_reason = "error", self.matcher.error
        elif is_end:
            out.stop_reason = token if token in params.stop_token_ids else None
            out.finish_reason = "stop"
        elif stream is not None and stream.stopped:
            out.finish_reason = "stop"
        elif self.matcher is not None and self.matcher.is_complete:
            out.finish_reason = "stop"
        elif made == params.max_tokens:
            out.finish_reason = "length"
        return self._grown(text)

    def finish(self, reason: str) -> str:
        """End the sample where it is, unless it has ended; returns the rest of its text."""
        if self.output.finish_reason is not None:
            return ""
        self.output.finish_reason = reason
        return self._grown("")

    def banned(self, flying: int = 0) -> list[int]:
        """Tokens that it may not draw next, after `flying` tokens that the host has not read."""
        made = self.output.token_ids
        found = [*self.rules.ends] if len(made) + flying < self.params.min_tokens else []
        for *before, last in self.rules.bad_words:
            if not before or (len(made) >= len(before) and made[-len(before) :] == before):
                found.append(last)
        return found

    def allowed(self, drafts: Sequence[int] = ()) -> list[np.ndarray]:
        """The tokens that it may draw next and after each of these, bits uint32 [W]; []: all.

        drafts: tokens that may come next, one after the other.
        """
        if self.matcher is not None:
            return self.matcher.masks(drafts)
        return [] if self.rules.allowed is None else [self.rules.allowed] * (1 + len(drafts))

    def _grown(self, text: str) -> str:
        """Add text to the output, with the rest if it has ended."""
        out = self.output
        if self._text is None:
            return ""
        if out.finish_reason is not None:
            text += self._text.close()
        if self._text.stopped and out.stop_reason is None:
            out.finish_reason, out.stop_reason = "stop", self._text.stopped_by
        out.text += text
        return text


def text_stream(
    params: SamplingParams, tokenizer: Tokenizer | None, prompt: Sequence[int]
) -> TextStream | None:
    """The stream of a sample's text after `prompt`, as a request wants it; None: it has no text."""
    if tokenizer is None or not params.detokenize:
        return None
    options: dict[str, Any] = {"include_stop": params.include_stop_str_in_output}
    if params.skip_special_tokens:
        options |= {"special": tokenizer.special_text, "decode_one": tokenizer.decode_one}
        return TextStream(tokenizer.decode, prompt, params.stop, **options)
    return TextStream(tokenizer.decode_whole or tokenizer.decode, prompt, params.stop, **options)
