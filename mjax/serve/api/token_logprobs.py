"""Log-probabilities of tokens in the two forms of OpenAI: of chats, and of older completions."""

from collections.abc import Sequence
from typing import Any

from mjax.serve.api.prompts import PromptMaker
from mjax.serve.base.engines import Piece

LEAST = -9999.0  # what is sent for a token that cannot be: JSON has no infinity
Tops = dict[int, float]


class TokenNames:
    """Names of tokens in replies: their texts, or token_id:ID where `as_ids`."""

    def __init__(self, prompts: PromptMaker, as_ids: bool | None):
        self._prompts, self._as_ids = prompts, as_ids

    def name(self, token: int) -> str:
        """The name of a token."""
        return f"token_id:{token}" if self._as_ids else self._prompts.piece(token)[0]

    def chat(self, piece: Piece, most: int) -> dict[str, Any]:
        """The object `logprobs` of a choice of a chat for the tokens of a piece."""
        tops = piece.top_logprobs or [{}] * len(piece.token_ids)
        content = []
        for token, logprob, top in zip(piece.token_ids, piece.logprobs, tops, strict=True):
            shown = _likeliest(top)[:most]
            entry = self._entry(token, logprob)
            content.append(entry | {"top_logprobs": [self._entry(*pair) for pair in shown]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        known = self._prompts.piece(token)[1]
        return {"token": self.name(token), "logprob": finite(logprob), "bytes": known}

    def legacy(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Tops | None] | None,
        offset: int,
    ) -> tuple[dict[str, Any], int]:
        """The object `logprobs` of a completion, and the offset of the text behind it."""
        names = [self.name(token) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._prompts.piece(token)[0])
        shown = None if tops is None else [top and self._named(top) for top in tops]
        values = [None if logprob is None else finite(logprob) for logprob in logprobs]
        found = {"tokens": names, "token_logprobs": values, "top_logprobs": shown}
        return found | {"text_offset": offsets}, offset

    def _named(self, top: Tops) -> dict[str, float]:
        """Log-probabilities by name; of tokens with one name the likeliest counts."""
        found: dict[str, float] = {}
        for token, logprob in _likeliest(top):
            found.setdefault(self.name(token), finite(logprob))
        return found

    def prompt(self, tops: Sequence[Tops | None]) -> list[dict[str, Any] | None]:
        """The field `prompt_logprobs` of vLLM: by id."""
        return [
            top
            and {
                str(token): {"logprob": finite(value), "decoded_token": self.name(token)}
                for token, value in _likeliest(top)
            }
            for top in tops
        ]


def _likeliest(top: Tops) -> list[tuple[int, float]]:
    return sorted(top.items(), key=lambda pair: -pair[1])


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return max(logprob, LEAST)
