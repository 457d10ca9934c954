"""An answer on the screen while it comes: drawn markdown in a terminal, else its text alone.

Markdown blocks that no later text can change are printed for good; the rest is drawn anew. A
terminal gets no control characters of a model.
"""

import re
import time

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from mjax.chat.models import ChatPiece

_INTERVAL = 0.08  # seconds between two drawings
_CONTROLS = {code: None for code in (*range(9), *range(11, 32), *range(127, 160))}
_BEGINS_BLOCK = re.compile(r"[^\s\-*+>|\d]")  # of a line that does not go on with a list or table


class AnswerView:
    """Shows the pieces of one answer; use it as a context manager."""

    def __init__(self, console: Console, is_markdown: bool = True):
        self._console, self._is_drawn = console, is_markdown and console.is_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._begin, self._first, self._drawn = time.perf_counter(), 0.0, 0.0
        self._text = self._reasoning = self._calls = ""  # what is not printed for good
        self._tokens = 0

    def __enter__(self) -> "AnswerView":
        if self._is_drawn:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._print(self._text)
        self._console.out(self._calls, end="\n" if self._calls or not self._is_drawn else "")
        if self._console.is_terminal:
            self._console.print(Text(self._figures(), "dim"))

    def add(self, piece: ChatPiece) -> None:
        """Show what is new."""
        text = piece.text.translate(_CONTROLS) if self._console.is_terminal else piece.text
        self._tokens += piece.tokens
        self._calls += piece.call.translate(_CONTROLS)
        self._first = self._first or time.perf_counter()
        if not self._is_drawn:
            self._console.out(text, end="", highlight=False)
            self._console.file.flush()
            return
        self._reasoning += piece.reasoning.translate(_CONTROLS)
        self._text += text
        done = whole_blocks(self._text)
        if done:
            self._print(self._text[:done])
            self._text = self._text[done:]
        if time.perf_counter() - self._drawn > _INTERVAL:
            self._draw(Markdown(self._text) if self._text else Text(self._reasoning, "dim"))
            self._drawn = time.perf_counter()

    def _draw(self, shown: RenderableType) -> None:
        """Draw the last lines of something, as many as the terminal has."""
        lines = self._console.render_lines(shown, pad=False)[-max(1, self._console.height - 2) :]
        parts = [part for line in lines for part in (*line, Segment.line())]
        self._live.update(Segments(parts), refresh=True)

    def _print(self, text: str) -> None:
        """Print markdown for good, after the reasoning that led to it."""
        if self._reasoning:
            self._console.print(Text(f"{self._reasoning.strip()}\n", "dim"))
            self._reasoning = ""
        if text.strip():
            self._console.print(Markdown(text))
            self._console.print()

    def _figures(self) -> str:
        if not self._first:
            return "no answer"
        lasted = time.perf_counter() - self._first
        found = f"first after {self._first - self._begin:.2f} s"
        if self._tokens > 1:
            found += f" · {self._tokens} tokens · {(self._tokens - 1) / lasted:.1f} tokens/s"
        return found


def whole_blocks(text: str) -> int:
    """The length of the beginning of a markdown text that no later text changes."""
    found = position = 0
    in_code, after_blank = False, False
    for line in text.splitlines(keepends=True):
        if after_blank and not in_code and _BEGINS_BLOCK.match(line):
            found = position
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        after_blank = not line.strip()
        position += len(line)
    return found
