"""A model in this process: its engine, its tokenizer and its chat template."""

import argparse
import itertools
from collections.abc import AsyncIterator
from typing import Any

from mjax.chat.models import ChatPiece
from mjax.data.base.chat import ChatTemplate, load_chat_template
from mjax.errors import UserError
from mjax.infer.async_engine import AsyncEngine, EngineDied
from mjax.infer.llm import LLM
from mjax.infer.requests import SamplingParams
from mjax.serve.parsers.reasoning import opens_reasoning
from mjax.serve.parsers.reply import guess_parsers, reply_parser


class LocalTalker:
    """A run, a checkpoint or a published model that answers here."""

    def __init__(self, args: argparse.Namespace):
        """`args`: those of `mjax chat`. Raises `UserError` for a model that cannot chat."""
        self._llm = LLM(
            args.model,
            tokenizer=args.tokenizer,
            tensor_parallel_size=args.tp,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=1,
        )
        if self._llm.tokenizer is None:
            raise UserError(f"{args.model}: holds no tokenizer; give --tokenizer")
        self._template = None if args.raw else self._chat_template(args.model)
        self._defaults = self._llm.default_params().model_dump(exclude_unset=True)
        self._numbers = itertools.count()

    def _chat_template(self, name: str) -> ChatTemplate:
        try:
            return load_chat_template(self._llm.folder or "")
        except UserError as e:
            raise UserError(f"{name}: {e}; --raw continues plain text without a template") from None

    async def open(self) -> None:
        self._serving = AsyncEngine(self._llm.engine)

    async def close(self) -> None:
        self._serving.close()

    def check(self, settings: dict[str, Any]) -> None:
        self._params(settings)

    def _params(self, settings: dict[str, Any], has_marks: bool = False) -> SamplingParams:
        own = {"max_tokens": None, "skip_special_tokens": not has_marks}
        return SamplingParams(**{**self._defaults, **own, **settings})

    async def stream(
        self, messages: list[dict], settings: dict[str, Any]
    ) -> AsyncIterator[ChatPiece]:
        llm, name = self._llm, f"answer {next(self._numbers)}"
        if self._template is None:
            text, reasoning = "".join(message["content"] for message in messages), None
            ids = llm.encode(text)
        else:
            text = self._template.render(messages)
            ids, (_, reasoning) = llm.tokenizer.encode(text), guess_parsers(self._template.source)
        opened = opens_reasoning(text, reasoning)
        parser = reply_parser(None, reasoning, has_tools=False, in_reasoning=opened)
        params = self._params(settings, has_marks=reasoning is not None)
        try:
            async for update in self._serving.generate(ids, params, request_id=name):
                new = parser.push(update.text)
                yield ChatPiece(new.content, new.reasoning, tokens=1)
        except EngineDied as e:
            raise UserError(f"{e}; start anew") from None
        rest = parser.close()
        yield ChatPiece(rest.content, rest.reasoning)
