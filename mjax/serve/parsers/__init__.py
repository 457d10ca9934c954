"""Parsers of replies while they come: reasoning, tool calls, and the rest of the text."""

from mjax.serve.parsers.reader import Delta, ToolDelta
from mjax.serve.parsers.reasoning import opens_reasoning
from mjax.serve.parsers.reply import ReplyParser, guess_parsers, reply_parser

__all__ = ["Delta", "ReplyParser", "ToolDelta", "guess_parsers", "opens_reasoning", "reply_parser"]
