"""Reasoning at the start of a reply, between two marks."""

from mjax.serve.parsers.reader import Reader, Steps

REASONING_MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
}


def read_reasoning(reader: Reader, name: str, is_open: bool) -> Steps[None]:
    """Read reasoning up to its end; `is_open`: the prompt has its mark already.

    Line breaks around marks belong to them.
    """
    begin, end = REASONING_MARKS[name]
    if (yield from reader.literal(begin)) or is_open:
        yield from reader.skip("\r\n")
        yield from reader.upto((end,), reader.reasoning)
        yield from reader.skip("\r\n")


def opens_reasoning(prompt: str, name: str | None) -> bool:
    """Whether a prompt ends with the mark after which a reply is reasoning."""
    return name is not None and prompt.rstrip().endswith(REASONING_MARKS[name][0])
