"""Requests of /v1/completions."""

from typing import Annotated

from pydantic import Field, model_validator

from mjax.serve.protocol.sampling_fields import SamplingFields


class CompletionRequest(SamplingFields):
    """One or more prompts, texts or ids, to continue.

    echo: the prompt stands before the text, with its log-probabilities if `logprobs` is given.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _is_served(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be n: no samples are dropped here")
        if self.suffix:
            raise ValueError("suffix: it is not served; put it into the prompt")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, also of one."""
        given = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if is_one else given
