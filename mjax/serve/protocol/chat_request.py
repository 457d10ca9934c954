"""Requests of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from mjax.serve.protocol.sampling_fields import JsonObject, SamplingFields


class Open(JsonObject):
    """An object that keeps fields with other names, which templates may read."""

    model_config = ConfigDict(extra="allow")


class ImageUrl(Open):
    """The place of an image: a data: URL."""

    url: str


class MessagePart(Open):
    """A part of a message: text, or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class Message(Open):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(Open):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function


class FunctionName(JsonObject):
    """The name of a function."""

    name: str


class NamedTool(JsonObject):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(SamplingFields):
    """A conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice is only for requests with tools")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not among the tools")
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have one name")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message is without add_generation_prompt")
            if self.messages[-1].content is None:
                raise ValueError("continue_final_message: the last message has no content")
        return self
