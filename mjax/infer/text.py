"""Text of a row as its tokens come: whole characters only, cut before the first stop string.

Invariant: the pieces that `push` and `close` return add up to the text of all tokens, up to the
stop string; nothing that may still become part of one is let out. A token's text depends on the one
before it (SentencePiece drops the first space), so a few earlier tokens are decoded along with it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress

_BEFORE = 5  # tokens of the prompt that are decoded along
_UNFINISHED = "\ufffd"  # how decoders show bytes that are no whole character (yet)


class TextStream:
    """Decoder of one row. `stopped` becomes true when a stop string is complete.

    `stopped_by` is that string, the first in the text. `include_stop` leaves it in the text. Stop
    strings are also found in the texts of special tokens, `special(id)`, which `decode` and what is
    returned leave out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stop: Sequence[str],
        special: Callable[[int], str] = lambda token: "",
        include_stop: bool = False,
        decode_one: Callable[[int], str] | None = None,
    ):
        """`decode_one`: the text of one token, where it need not be decoded each time."""
        self._decode_one = decode_one or (lambda token: decode([token]))
        self._decode, self._stop, self._special = decode, tuple(stop), special
        self._ids = list(prompt[-_BEFORE:])  # decoded up to `_done`; context from `_from` on
        self._from, self._done = 0, len(self._ids)
        self._held = ""  # decoded, but perhaps the start of a stop string
        self._shown: list[bool] = []  # which characters of it are no special token's
        self._include_stop = include_stop
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, token: int, may_stop: bool = True) -> str:
        """Add a token; returns the text that is now certain and was not before.

        With `may_stop` false, stop strings that it completes are text as others.
        """
        self._ids.append(token)
        new = self._pending()
        special = self._special(token) if self._stop else ""
        if new.endswith(_UNFINISHED) and not special:
            return ""
        self._from, self._done = self._done, len(self._ids)
        return self._release(new, special, may_stop)

    def close(self) -> str:
        """The rest, when no token follows."""
        if self.stopped:
            return ""
        text = self._release(self._pending())
        text += "".join(compress(self._held, self._shown))
        self._held, self._shown = "", []
        self._from = self._done = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._ids[self._from : self._done]
        before = self._decode_one(known[0]) if len(known) == 1 else self._decode(known)
        return self._decode(self._ids[self._from :])[len(before) :]

    def _release(self, new: str, special: str = "", may_stop: bool = True) -> str:
        if not self._stop:
            return new
        text = self._held + new + special
        shown = self._shown + [True] * len(new) + [False] * len(special)
        found = [stop for stop in self._stop if stop in text] if may_stop else []
        if found:
            self.stopped_by = min(found, key=text.find)
            end = text.find(self.stopped_by) + len(self.stopped_by) * self._include_stop
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = "" if found else text[end:]
        self._shown = [] if found else shown[end:]
        return "".join(compress(text[:end], shown))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


def windows(targets: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first scored, end) of every window over `targets` tokens to predict."""
    done = 0
    while done < targets:
        end = min(targets, done + (stride if done else length))
        yield max(0, end - length), done, end
        done = end
