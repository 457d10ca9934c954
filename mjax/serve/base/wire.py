"""Messages between processes that speak HTTP and processes with an engine.

They are MessagePack over ZeroMQ's sockets in a private folder. Neither weights nor adapters travel,
only their paths. Invariant: an engine writes one `Step` for each step and client, not one for each
token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mjax.errors import UserError
from mjax.infer.async_engine import EngineDied
from mjax.infer.requests import SamplingParams, Structured
from mjax.infer.scheduling.scheduler import QueueFull

# Errors that travel by name; all others are defects.
ERRORS = {"UserError": UserError, "QueueFull": QueueFull, "EngineDied": EngineDied}
Shown = dict[int, float]  # log-probabilities by token


@dataclass(frozen=True)
class ImageFacts:
    """How prompts have images: the tokens of one, its size in pixels, its channels and scale.

    bounds: of the sizes of images that keep their proportions (`Bounds`), each of whose units is a
    token; `side` says nothing then. None: all are squares of `side`.
    """

    tokens: tuple[int, ...]
    side: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bounds: tuple[int, int, int] | None = None

    def run(self, pixels: np.ndarray) -> list[int]:
        """The ids of an image in a prompt."""
        if self.bounds is None:
            return [*self.tokens]
        height, width = pixels.shape[:2]
        return [*self.tokens] * (height * width // self.bounds[0] ** 2)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a served model for its clients.

    - name: what requests call it. folder: with its tokenizer and chat template, or None.
    - max_model_len: tokens of the longest text. vocab_size: of the model.
    - has_images: whether prompts may have pictures. reads_source: whether an encoder reads prompts.
    - is_encoder: it continues no text and has embeddings alone.
    - created: seconds since 1970 when it was loaded. adapters: names that requests may give.
    - defaults: of generation_config.json. ends: tokens that end a text.
    - tokenizer: its file or folder, or None. image: None: messages have none.
    """

    name: str
    folder: Path | None
    max_model_len: int
    vocab_size: int
    has_images: bool = False
    reads_source: bool = False
    is_encoder: bool = False
    created: int = 0
    adapters: tuple[str, ...] = ()
    defaults: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    ends: tuple[int, ...] = ()
    tokenizer: str | None = None
    image: ImageFacts | None = None


class PlainArray(msgspec.Struct, array_like=True):
    """An array of numpy."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> "PlainArray":
        return cls(str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


# ---- from a client -------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of a client, which gets `FactsNow`."""


class Add(msgspec.Struct, tag=True, array_like=True):
    """A request; `params` are the fields of `SamplingParams` that differ from the defaults."""

    id: str
    prompt: list[int]
    params: dict[str, Any]
    text: str | None = None
    images: list[PlainArray] = []


class Leave(msgspec.Struct, tag=True, array_like=True):
    """The client wants no more of its own request, or of one sample of it."""

    id: str
    index: int | None = None


class Abort(msgspec.Struct, tag=True, array_like=True):
    """End a request of any client, who gets what is there."""

    id: str


class Call(msgspec.Struct, tag=True, array_like=True):
    """A command, which gets one `CallResult` with the same number."""

    number: int
    name: str
    given: dict[str, Any] = {}


# ---- from an engine ------------------------------------------------------------------------------


class SamplePart(msgspec.Struct, array_like=True, gc=False):
    """News of one sample of a request.

    cached: tokens of the prompt that were cached. prompt_logprobs: once, in sample 0.
    """

    id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    processed: list[float]
    top: list[Shown] | None
    versions: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    prompt_logprobs: list[Shown | None] | None = None


# Of most samples in most steps: id, index, token, logprob, processed, version.
OneToken = tuple[str, int, int, float, float, int]


class Step(msgspec.Struct, tag=True, array_like=True):
    """The new tokens of one client's samples; `load`: samples that run or wait, of all clients.

    tokens: news of samples that had some before, go on, and got one token without likeliest ones.
    """

    parts: list[SamplePart]
    tokens: list[OneToken]
    load: int


class Refused(msgspec.Struct, tag=True, array_like=True):
    """A request that is not served; `kind` is one of `ERRORS`."""

    id: str
    kind: str
    message: str


class CallResult(msgspec.Struct, tag=True, array_like=True):
    """The result of a command, or its error."""

    number: int
    value: dict[str, Any] = {}
    kind: str = ""
    message: str = ""


class FactsNow(msgspec.Struct, tag=True, array_like=True):
    """The facts of the model, also each time they change."""

    facts: ModelFacts


class Died(msgspec.Struct, tag=True, array_like=True):
    """The engine has ended by an error."""

    message: str


FromClient = Hello | Add | Leave | Abort | Call
FromEngine = Step | Refused | CallResult | FactsNow | Died


def _to_plain(thing: Any) -> Any:
    if isinstance(thing, Path):
        return str(thing)
    if isinstance(thing, SamplingParams):
        return fields_of_params(thing)
    if isinstance(thing, np.ndarray):
        return PlainArray.of(thing)
    raise TypeError(f"{type(thing).__name__} does not travel")


def _from_plain(kind: type, thing: Any) -> Any:
    return params_of_fields(thing) if kind is SamplingParams else kind(thing)


def fields_of_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    return params.model_dump(exclude_defaults=True)


def params_of_fields(given: dict[str, Any]) -> SamplingParams:
    """The inverse of `fields_of_params`. Raises `UserError` for what are no such fields."""
    form = given.get("structured")
    return SamplingParams(**given | ({} if form is None else {"structured": Structured(**form)}))


def error_named(kind: str, message: str) -> Exception:
    """The error that travels as these two texts."""
    return ERRORS.get(kind, RuntimeError)(message)


def kind_of(error: BaseException) -> str:
    """The name by which an error travels: the nearest class that has one."""
    names = [base.__name__ for base in type(error).__mro__]
    return next((name for name in names if name in ERRORS), "UserError")


as_message = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
read_client = msgspec.msgpack.Decoder(FromClient, dec_hook=_from_plain).decode
read_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_from_plain).decode
