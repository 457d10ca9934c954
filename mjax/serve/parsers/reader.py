"""Reads a reply while it comes.

A format is a generator over a `Reader`: it asks for the next word, mark or value, and yields where
the text that has come does not decide yet. Each question is answered by the text alone, so how the
text was cut into pieces does not matter.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

_WORD = re.compile(r"\s*([\w.+-]{1,256}+)(?![\w.+-])(?=.)", re.S)
_WORD_BEGINS = re.compile(r"\s*[\w.+-]{0,256}")
_JSON_MARKS = re.compile(r'\\.|["{}\[\]<]', re.S)
_PYTHON_MARKS = re.compile(r"""\\.|["'(){}\[\],<]""", re.S)


class ToolDelta(NamedTuple):
    """A piece of call number `index`: its name in the first piece, else None; more JSON text."""

    index: int
    name: str | None
    arguments: str


class Delta(NamedTuple):
    """New pieces of a reply."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()


class Reader:
    """Text that has come and is not read yet, and pieces of the reply that are not sent yet.

    text: what has come.
    ended: whether no more will come.
    string_parameters: (function, parameter) of parameters whose type is a string.
    """

    def __init__(self, string_parameters: frozenset[tuple[str, str]] = frozenset()):
        self.text, self.ended = "", False
        self.string_parameters = string_parameters
        self.count = 0  # of calls
        self.has_arguments = False  # of the last call
        self._dropped = ""  # was read and belongs to no piece
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str | None, list[str]]] = {}

    # Pieces of the reply.

    def content(self, text: str) -> None:
        self._dropped = ""
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._dropped = ""
        self._reasoning.append(text)

    def call(self, name: str) -> None:
        """Begin a call."""
        self._dropped, self.has_arguments = "", False
        self._calls[self.count] = name, []
        self.count += 1

    def arguments(self, text: str) -> None:
        """Add to the last call's arguments."""
        if not text:
            return
        self._dropped, self.has_arguments = "", True
        self._calls.setdefault(self.count - 1, (None, []))[1].append(text)

    def fail(self) -> None:
        """Give what was read since the last piece as content: it is no call."""
        self.content(self._dropped)

    def take_delta(self) -> Delta:
        """Return the pieces since the last time."""
        calls = [ToolDelta(i, name, "".join(parts)) for i, (name, parts) in self._calls.items()]
        delta = Delta("".join(self._content), "".join(self._reasoning), tuple(calls))
        self._content, self._reasoning, self._calls = [], [], {}
        return delta

    # Questions to the text.

    def prose(self, *marks: str) -> Steps[str | None]:
        """Content up to a mark of calls, as `upto`; what ended the call before is dropped."""
        self._dropped = ""
        return (yield from self.upto(marks, self.content))

    def upto(
        self, marks: tuple[str, ...], to: Callable[[str], None], trim: bool = True
    ) -> Steps[str | None]:
        """Give text to `to` as it comes and read a mark; returns the mark, or None at the end.

        trim: drop white space before a mark, and at the end of a reply with calls.
        The first letter of a mark does not occur in it again.
        """
        search = re.compile("|".join(map(re.escape, marks)) or r"\Z.").search
        while True:
            found = search(self.text)
            end = found.start() if found else len(self.text)
            is_last = not found and self.ended
            if not found and not is_last:
                end -= max((_begun(mark, self.text) for mark in marks), default=0)
            sure = self.text[:end]
            if trim and (not is_last or self.count):
                sure = sure.rstrip()
            if sure:
                self._take(len(sure))
                to(sure)
            if found:
                self._take(found.end() - len(sure))
                return found[0]
            if not (yield from self._more()):
                return None

    def literal(self, *options: str, space: bool = True) -> Steps[str | None]:
        """Read one of `options` if it comes next (`space`: after white space); returns it."""
        while True:
            text = self.text.lstrip() if space else self.text
            for option in options:
                if text.startswith(option):
                    self._take(len(self.text) - len(text) + len(option))
                    return option
            may_come = any(option.startswith(text) for option in options)
            if not may_come or not (yield from self._more()):
                return None

    def peek(self) -> Steps[str]:
        """Return the next letter that is no white space, "" at the end, and read nothing."""
        while True:
            text = self.text.lstrip()
            if text or not (yield from self._more()):
                return text[:1]

    def skip(self, letters: str) -> Steps[None]:
        """Read as many of `letters` as come next."""
        while True:
            self._take(len(self.text) - len(self.text.lstrip(letters)))
            if self.text or not (yield from self._more()):
                return

    def word(self) -> Steps[str | None]:
        """Read a name or a number: letters, digits and some signs; None if none comes."""
        while not (found := _WORD.match(self.text)):
            if not _WORD_BEGINS.fullmatch(self.text) or not (yield from self._more()):
                return None
        self._take(found.end())
        return found[1]

    def string(self) -> Steps[str | None]:
        """Read a JSON string and return what it means; None if none comes."""
        if (yield from self.peek()) != '"':
            return None
        yield from self.skip(" \t\r\n")
        parts: list[str] = []
        whole = yield from self.nested(parts.append)
        try:
            return encodable(json.loads("".join(parts), strict=False)) if whole else None
        except ValueError:
            return None

    def value(self, to: Callable[[str], None]) -> Steps[None]:
        """Give the text of a JSON value to `to` as it comes.

        null gives nothing. A string that holds JSON, as some models write arguments, gives that.
        """
        first = yield from self.peek()
        if first == '"':
            text = yield from self.string()
            if text is not None:
                to(text if is_object(text) else as_json(text))
        elif first and first in "{[":
            yield from self.skip(" \t\r\n")
            yield from self.nested(to)
        else:
            text = yield from self.word()
            if text is not None and text != "null":
                to(text)

    def nested(self, to: Callable[[str], None], python: bool = False) -> Steps[bool]:
        """Give text to `to` as it comes, up to the end of a value; returns whether that came.

        JSON ends with its bracket or quote; Python before a comma or a bracket of what holds it.
        Both end before '<', with which marks begin, outside of strings.
        """
        special, quotes = (_PYTHON_MARKS, "\"'") if python else (_JSON_MARKS, '"')
        depth, quote, end = 0, "", None
        while True:
            for found in special.finditer(self.text):
                letter = found[0]
                if letter[0] == "\\":
                    continue
                if quote or letter in quotes:
                    is_end = letter == quote
                    quote = "" if is_end else quote or letter
                    end = found.end() if is_end and not depth and not python else None
                elif letter in "([{":
                    depth += 1
                elif letter == "<" or not depth:
                    end = found.start()
                elif letter in ")]}":
                    depth -= 1
                    end = None if depth or python else found.end()
                if end is not None:
                    break
            backslashes = len(self.text) - len(self.text.rstrip("\\"))
            known = len(self.text) - backslashes % 2 if end is None else end
            to(self._take(known))
            if end is not None:
                return True
            if not (yield from self._more()):
                to(self._take(len(self.text)))
                return False

    def _take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        self._dropped += taken
        return taken

    def _more(self) -> Steps[bool]:
        """Wait for more text; returns False at the end."""
        if not self.ended:
            yield
            return True
        return False


def _begun(mark: str, text: str) -> int:
    """The length of the beginning of `mark` that `text` ends with."""
    at = text.rfind(mark[0], max(0, len(text) - len(mark) + 1))
    return len(text) - at if at >= 0 and mark.startswith(text[at:]) else 0


def as_json(value: object) -> str:
    """JSON text that can be sent as UTF-8. Raises ValueError, TypeError for what JSON has not."""
    return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs, which UTF-8 does not have, as JSON's escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
