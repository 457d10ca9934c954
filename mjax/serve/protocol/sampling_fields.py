"""Fields that requests for text share: OpenAI's names and vLLM's further ones.

`SamplingParams` checks values; here stand types and names. A field that clients send and that
changes no token is dropped, as is any that is null. Another unknown one is an error with its name.
"""

import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from mjax.errors import UserError, or_user_error
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


class JsonObject(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        names = cls.model_fields
        known = {*names, *(field.alias for field in names.values())}
        return {
            name: value
            for name, value in given.items()
            if name in known or (value is not None and name not in HARMLESS)
        }


class StreamOptions(JsonObject):
    """include_usage: one last chunk with the usage; continuous_usage_stats: in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(JsonObject):
    """The schema of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(JsonObject):
    """text, any JSON object, or JSON of a schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(JsonObject):
    """vLLM's form of a text: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


_Same = create_model(
    "_Same",
    __base__=JsonObject,
    **{
        name: (field.rebuild_annotation() | None, None)
        for name, field in SamplingParams.model_fields.items()
        if name in _SAME
    },
)


class SamplingFields(_Same):
    """How a text is made."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_older_names(cls, given: Any) -> Any:
        """The request with guided_json, guided_regex .. as `structured_outputs`."""
        if not isinstance(given, dict) or given.get("structured_outputs") is not None:
            return given
        kept, older = {}, {}
        for name, value in given.items():
            form = name.removeprefix("guided_")
            if form == name or form not in ("json", "regex", "grammar", "choice"):
                kept[name] = value
            elif value is not None:
                older[form] = value
        return kept | ({"structured_outputs": older} if older else {})

    @model_validator(mode="after")
    def _has_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self

    def params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """The fields that the engine reads. `own`: fields that a route derives. Raises `UserError`.

        A field that is not given is as the files of the model say, else 1 for the temperature.
        """
        given = {name: getattr(self, name) for name in _SAME}
        said = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        known = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"temperature": 1.0} | said | known | own)

    def form(self) -> dict[str, Any] | None:
        """The fields of `Structured` for the form that a text must have; None: any text.

        Raises `UserError` for two forms and for one that cannot be read.
        """
        forms = [*_form_of_response(self.response_format), *_forms(self.structured_outputs)]
        if len(forms) > 1:
            raise UserError("structured_outputs: the request asks for two forms; give one")
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


def _forms(given: StructuredOutputs | None) -> list[dict[str, Any]]:
    """The forms that are asked for."""
    if given is None:
        return []
    found = [{"json_schema": {"type": "object"}}] if given.json_object else []
    if given.json_ is not None:
        found.append({"json_schema": _schema(given.json_)})
    if given.choice is not None:
        if not given.choice or not all(given.choice):
            raise UserError("structured_outputs.choice: give one or more texts, none of them empty")
        found.append({"regex": "|".join(map(re.escape, given.choice))})
    named = {"regex": given.regex, "grammar": given.grammar}
    return [*found, *({name: value} for name, value in named.items() if value is not None)]


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    """A schema that may be given as a text."""
    with or_user_error("structured_outputs.json: {reason}", (ValueError, RecursionError)):
        found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise UserError("structured_outputs.json: it is no JSON object")
    return found
