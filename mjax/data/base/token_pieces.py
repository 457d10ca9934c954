"""Tokens one at a time: the text and the bytes of each, which grammars and replies name it by."""

import functools
import re

from mjax.data.base.tokenizer import Tokenizer


class TokenPieces:
    """f(id) -> (the text of a token within a text, its bytes; b"" where these are not known).

    Tokens are decoded after another one, for the first token of a text may lose a space.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._before = tokenizer, tokenizer.encode("a")
        self._start = len(tokenizer.decode(self._before))

    def __call__(self, id: int) -> tuple[str, bytes]:
        tokenizer = self._tokenizer
        if special := tokenizer.special_text(id):
            return special, special.encode()
        text = tokenizer.decode([*self._before, id])[self._start :]
        return text, _token_bytes(text, tokenizer.piece_of(id) if tokenizer.piece_of else None)


def _token_bytes(text: str, piece: str | None) -> bytes:
    """The bytes of a token that decodes to a text; none where they are not known."""
    if "\ufffd" not in text:
        return text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece or ""):
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    is_known = piece is not None and all(letter in letters for letter in piece)
    return bytes(letters[letter] for letter in piece) if is_known else b""


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The bytes that letters stand for in byte-level BPE: GPT-2 moved the unprintable ones up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    places = {chr(256 + number): byte for number, byte in enumerate(moved)}
    return {chr(byte): byte for byte in printable} | places
