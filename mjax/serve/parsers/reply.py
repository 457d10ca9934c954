"""From the text of a reply to its content, its reasoning and its tool calls, piece by piece."""

from mjax.errors import UserError
from mjax.serve.parsers import tools as formats
from mjax.serve.parsers.reader import Delta, Reader, Steps
from mjax.serve.parsers.reasoning import REASONING_MARKS, read_reasoning

_FORMATS = {
    "hermes": formats.hermes,
    "qwen3_coder": formats.qwen3_coder,
    "llama3_json": formats.llama3_json,
    "mistral": formats.mistral,
    "deepseek_v3": formats.deepseek,
    "deepseek_v31": formats.deepseek,
    "pythonic": formats.pythonic,
    "json": formats.json_calls,
}
TOOL_PARSERS = tuple(_FORMATS)
REASONING_PARSERS = tuple(REASONING_MARKS)
# Signs of a format in the source of a template, the first one that fits; None: of no parser here.
_TOOL_SIGNS = (
    ("<arg_key>", None),
    ("<seed:tool_call>", None),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ('"parameters": ', "llama3_json"),
    ("<function_calls>", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
)


class ReplyParser:
    """Parses one reply. The sum of its deltas does not depend on how the text was cut.

    needs_special_tokens: whether the text must have special tokens, which may be marks.
    """

    def __init__(self, reader: Reader, steps: Steps[None], needs_special_tokens: bool):
        self.needs_special_tokens = needs_special_tokens
        self._reader, self._steps = reader, steps

    def push(self, text: str) -> Delta:
        """Add text and return what is certain now."""
        self._reader.text += text
        next(self._steps, None)
        return self._reader.take_delta()

    def close(self) -> Delta:
        """End the reply and return the rest."""
        self._reader.ended = True
        next(self._steps, None)
        return self._reader.take_delta()


def reply_parser(
    tools: str | None,
    reasoning: str | None,
    *,
    has_tools: bool,
    in_reasoning: bool,
    definitions: object = None,
) -> ReplyParser:
    """Return the parser of one reply.

    tools, reasoning: names of `TOOL_PARSERS` and `REASONING_PARSERS`; None: that is content.
    has_tools: whether the request has tools that may be called.
    in_reasoning: whether the prompt opened the reasoning (`opens_reasoning`).
    definitions: the request's `tools`, whose schemas say which parameters are strings.
    """
    for name, known in ((tools, TOOL_PARSERS), (reasoning, REASONING_PARSERS)):
        if name is not None and name not in known:
            raise UserError(f"there is no parser {name!r}; there are {', '.join(known)}")
    read_calls = _FORMATS[tools] if tools is not None and has_tools else None
    reader = Reader(frozenset(formats.string_parameters(definitions)))

    def steps() -> Steps[None]:
        if reasoning is not None:
            yield from read_reasoning(reader, reasoning, in_reasoning)
        if read_calls is None:
            yield from reader.upto((), reader.content, trim=False)
        else:
            yield from read_calls(reader)

    return ReplyParser(reader, steps(), reasoning is not None or read_calls is not None)


def guess_parsers(chat_template: str) -> tuple[str | None, str | None]:
    """(tools, reasoning): names of the parsers for what a template writes; None: for nothing."""
    found = (name for sign, name in _TOOL_SIGNS if sign in chat_template)
    tools = next(found, None)
    if "<｜tool▁sep｜>" in chat_template:
        tools = "deepseek_v3" if "```json" in chat_template else "deepseek_v31"
    reasoning = next(
        (name for name, (_, end) in REASONING_MARKS.items() if end in chat_template), None
    )
    is_deepseek = reasoning == "qwen3" and "<｜" in chat_template
    return tools, "deepseek_r1" if is_deepseek else reasoning
