"""Fields that requests for text share: OpenAI's names and vLLM's further ones.

`SamplingParams` checks values; here stand types and names. A field that clients send and that
changes no token is dropped, as is any that is null. Another unknown one is an error with its name.
"""

import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mjax.errors import UserError
from mjax.infer.requests import SamplingParams

HARMLESS = frozenset(
    """user safety_identifier prompt_cache_key prompt_cache_retention service_tier metadata store
    modalities verbosity spaces_between_special_tokens guided_decoding_backend stream_interval
    """.split()
)
# Fields of `SamplingParams` that have the same name in a request.
_SAME = """n temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty
seed min_tokens stop stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens
bad_words logit_bias allowed_token_ids prompt_logprobs priority cache_salt""".split()
_DEFAULTS = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"


class Fields(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value
            for name, value in given.items()
            if name in known or (value is not None and name not in HARMLESS)
        }


class StreamOptions(Fields):
    """include_usage: one last chunk with the usage; continuous_usage_stats: in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Fields):
    """The schema of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """text, any JSON object, or JSON of a schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's form of a text: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class SamplingFields(Fields):
    """How a text is made."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _has_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """What the engine reads; a field that is not given is as the model's files say, else 1.0
        for the temperature. `own`: fields that a route derives. Raises `UserError`.
        """
        said = {name: getattr(defaults, name) for name in _DEFAULTS}
        said = {name: said[name] for name in _DEFAULTS if name in defaults.model_fields_set}
        given = {name: getattr(self, name) for name in _SAME}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"temperature": 1.0} | said | given | own)

    def form(self) -> dict[str, Any] | None:
        """The fields of `Structured` for the form that a text must have; None: any text.

        Raises `UserError` for two forms and for one that cannot be read.
        """
        forms = [
            *_form_of_response(self.response_format),
            *_forms(self.structured_outputs or StructuredOutputs(), "structured_outputs."),
            *_forms(
                StructuredOutputs(
                    json_=self.guided_json,
                    regex=self.guided_regex,
                    grammar=self.guided_grammar,
                    choice=self.guided_choice,
                ),
                "guided_",
            ),
        ]
        if len(forms) > 1:
            raise UserError(
                "structured_outputs: the request asks for two forms; give one of response_format, "
                "structured_outputs and guided_json, guided_regex, guided_grammar, guided_choice"
            )
        return forms[0] if forms else None


def _form_of_response(given: ResponseFormat | None) -> list[dict[str, Any]]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [{"json_schema": {"type": "object"}}]
    if given.type != "json_schema":
        raise UserError("response_format.type: give text, json_object or json_schema")
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise UserError("response_format.json_schema.schema: give the schema")
    return [{"json_schema": given.json_schema.schema_}]


def _forms(given: StructuredOutputs, before: str) -> list[dict[str, Any]]:
    """The forms that are asked for; `before`: how the names of their fields begin."""
    found: list[dict[str, Any]] = []
    if given.json_ is not None:
        found.append({"json_schema": _schema(given.json_, f"{before}json")})
    if given.json_object:
        found.append({"json_schema": {"type": "object"}})
    if given.choice is not None:
        if not given.choice or not all(given.choice):
            raise UserError(f"{before}choice: give one or more texts that are not empty")
        found.append({"regex": "|".join(map(re.escape, given.choice))})
    if given.regex is not None:
        found.append({"regex": given.regex})
    if given.grammar is not None:
        found.append({"grammar": given.grammar})
    return found


def _schema(given: dict[str, Any] | str, name: str) -> dict[str, Any]:
    """A schema that may be given as a text."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{name}: it is no JSON object")
    return found
