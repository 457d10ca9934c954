"""Requests of the other routes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mjax.serve.protocol.chat_request import Message, Tool
from mjax.serve.protocol.sampling_fields import JsonObject, StreamOptions


class EmbeddingRequest(JsonObject):
    """Texts or ids to embed; pooling and normalize replace the server's own."""

    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class TokenizeRequest(JsonObject):
    """A text or a conversation to turn into ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(JsonObject):
    """Ids to turn into a text."""

    model: str | None = None
    tokens: list[int]


class GenerateRequest(JsonObject):
    """Ids to continue, for callers that keep to ids; sampling_params has the engine's names."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class AdapterRequest(JsonObject):
    """An adapter to load or unload; vLLM's names are lora_name and lora_path."""

    name: Annotated[str, Field(min_length=1, max_length=256, alias="lora_name")]
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None, alias="lora_path"
    )
    lora_int_id: int | None = None
    load_inplace: bool | None = None


class WeightsRequest(JsonObject):
    """The place of new weights; null: of those that are served."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


class AbortRequest(JsonObject):
    """Ids of replies to end, or all that this process of HTTP serves."""

    request_ids: list[str] = []
    abort_all: bool = False
