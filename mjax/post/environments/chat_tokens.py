"""Texts of an environment as token ids, and ids of an answer as text.

Invariant: sampled tokens are never encoded again. Each text is encoded once, as it is added to a
transcript: with the chat template of a model that has one, as plain text otherwise.
"""

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mjax.data.base.chat import ChatTemplate, load_chat_template
from mjax.data.base.chat_ids import reply_ids
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.json_file import read_json

_ANSWER = "an-answer-of-the-model"  # a text that no template writes


@dataclass(frozen=True)
class ChatTokens:
    """The tokenizer, the ids that end an answer, and the chat template; None: plain text."""

    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    template: ChatTemplate | None = None

    def prompt(self, text: str, **values: object) -> tuple[int, ...]:
        """The ids of a prompt, after which an answer begins, with its {names} filled in."""
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))
        if self.template is None:
            return (*self.tokenizer.prefix, *self.tokenizer.encode(text))
        return tuple(reply_ids(_dialogue(text), self.tokenizer, self.template))

    def reply(self, text: str, answer: Sequence[int]) -> tuple[int, ...]:
        """The ids that follow the ids of an answer, up to where the next one begins.

        A template ends the answer, unless it was drawn with its end token.
        """
        inside = self.tokenizer.inside or self.tokenizer
        if self.template is None:
            return tuple(inside.encode(text))
        said = _dialogue("?", _ANSWER, text)
        _, found, after = self.template.render(said).partition(_ANSWER)
        if not found:
            raise UserError(
                f"{self.template.origin}: the chat template leaves out answers; mend it"
            )
        ids = inside.encode(after)
        is_ended = bool(answer) and answer[-1] in self.end_ids
        return tuple(ids[1:] if is_ended and ids[0] in self.end_ids else ids)

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer up to its end token."""
        end = next((place for place, id in enumerate(ids) if id in self.end_ids), len(ids))
        return self.tokenizer.decode(list(ids[:end]))


def _dialogue(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def template_beside(tokenizer: str | os.PathLike) -> ChatTemplate | None:
    """The chat template in a tokenizer's folder or beside its file; None where there is none."""
    if str(tokenizer) == "byte":
        return None
    folder = Path(tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    said = read_json(folder / "tokenizer_config.json", missing={})
    has_one = said.get("chat_template") or (folder / "chat_template.jinja").is_file()
    return load_chat_template(folder) if has_one else None


def final_answer(text: str) -> str:
    """The text in the last <answer>..</answer>; without one, the last line that is not empty."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    lines = tagged[-1:] or text.strip().splitlines()[-1:]
    return "".join(lines).strip()
