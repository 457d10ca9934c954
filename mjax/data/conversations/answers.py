"""Conversations to token ids, with the tokens of answers that the loss is on.

A template with `{% generation %}` marks answers itself, and the tokens are those of transformers'
`return_assistant_tokens_mask`. Otherwise an answer is what its message adds to the text, from
behind the opened reply to the token that ends it. Invariant: a token with a loss overlaps an
answer. Refused: no such token, a doubled BOS, and templates that rewrite earlier turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mjax.data.base.chat import ChatTemplate
from mjax.data.base.conversations import AnsweredText, answers_by_prefixes, require_beginning
from mjax.data.base.tokenizer import PlacedIds, Tokenizer, encode_behind
from mjax.data.conversations.formats import Conversation
from mjax.errors import UserError


class TokenizedConversation(NamedTuple):
    """ids, int32, and which of them are answers, bool.

    is_ended: whether the last token of an answer, but for white space, is a special one, such as
        `<|im_end|>`.
    """

    ids: np.ndarray
    is_answer: np.ndarray
    is_ended: bool


@dataclass(frozen=True)
class AnswerTokenizer:
    """Tokenizes conversations.

    template: of chats, or why there is none. last_only: the loss is on the last answer of each
    alone.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | UserError
    last_only: bool = False

    @cached_property
    def lack(self) -> UserError | None:
        """Why no messages at all can be tokenized, which is the fault of no record."""
        if isinstance(self.template, UserError):
            return UserError(f"{self.template}; texts of prompt and completion need none")
        if self.tokenizer.encode_with_places is None:
            return UserError(
                "data.tokenizer cannot say where its tokens begin, so messages cannot be trained "
                "on; save it as a tokenizer.json, as transformers does"
            )
        return None

    def render(self, conversation: Conversation) -> AnsweredText:
        """The text up to the last answer, and where answers are; no text of a pair of texts.

        Raises `UserError` for what the template cannot render, or renders in a way that misleads.
        """
        if conversation.plain is not None:
            return AnsweredText("", [])
        if self.lack is not None:
            raise self.lack
        assert isinstance(self.template, ChatTemplate)
        where, messages = conversation.where, conversation.messages
        self._require_no_ends(conversation)
        answers = conversation.answers[-1:] if self.last_only else conversation.answers
        given = {"tools": conversation.tools, **conversation.variables}
        if not self.template.marks_answers:
            text, spans = answers_by_prefixes(where, self.template, messages, answers, **given)
            # White space after the token that ends an answer: a model has stopped before it.
            ends = (begin + len(text[begin:end].rstrip()) for begin, end in spans)
            return AnsweredText(text, [(b, e) for (b, _), e in zip(spans, ends, strict=True)])
        messages = messages[: answers[-1] + 1]
        text, spans = self.template.render_marked(messages, **given)
        said = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(said):
            spans = [span for n, span in zip(said, spans, strict=True) if n in answers]
        elif spans and len(said) > len(answers):
            raise UserError(
                f"{where}: {self.template.origin} marks {len(spans)} parts of {len(said)} "
                "answers, so none can be left out; set data.conversations.answers=all"
            )
        for number in answers[:-1]:
            part = self.template.render(
                messages[: number + 1], add_generation_prompt=False, **given
            )
            if not text.startswith(part):  # Phi-3's puts an end behind the last message alone
                part = part.removesuffix(self.template.tokens.get("eos_token", ""))
            require_beginning(where, self.template, part, text)
        return AnsweredText(text, spans)

    def _require_no_ends(self, conversation: Conversation) -> None:
        """Raise `UserError` for messages with the text of a token that begins or ends a text."""
        for name in ("bos_token", "eos_token"):
            token = self.template.tokens.get(name)
            if token and any(token in message["content"] for message in conversation.messages):
                raise UserError(
                    f"{conversation.where}: a message holds {token}, which would become the "
                    f"{name}; take it out"
                )

    def tokenize(
        self, text: AnsweredText, conversation: Conversation, placed: PlacedIds
    ) -> TokenizedConversation:
        """The tokens of a rendered conversation; `placed`: its text's ids and their characters."""
        tokenizer, is_chat = self.tokenizer, conversation.plain is None
        if is_chat:
            ids, is_answer = placed[0], overlaps(placed[1], text)
        else:
            ids, is_answer = self._pair(*conversation.plain)
        if not is_answer[1:].any():
            origin = f"; {self.template.origin} marks no answer" if is_chat else ""
            raise UserError(f"{conversation.where}: it has no token to train on{origin}")
        bos = self.template.tokens.get("bos_token") if is_chat else None
        starts = {*tokenizer.prefix, tokenizer.id_of(bos) if bos else None}
        if ids[0] == ids[1] and ids[0] in starts:
            raise UserError(
                f"{conversation.where}: its text begins with two BOS tokens; take one out"
            )
        lasts = np.flatnonzero(is_answer & ~np.append(is_answer[1:], False))
        is_ended = any(self._ends(ids[: at + 1]) for at in lasts)
        return TokenizedConversation(np.array(ids, np.int32), is_answer, is_ended)

    def _ends(self, ids: list[int]) -> bool:
        """Whether a special token ends these ids, but for white space."""
        for token in reversed(ids):
            if token == self.tokenizer.eod_id or self.tokenizer.special_text(token):
                return True
            if self.tokenizer.decode([token]).strip():
                return False
        return False

    def _pair(self, prompt: str, completion: str) -> tuple[list[int], np.ndarray]:
        """A prompt and its completion, which the end token follows."""
        before = [*self.tokenizer.prefix, *self.tokenizer.encode(prompt)]
        answer = encode_behind(self.tokenizer, before, completion)
        eod = self.tokenizer.eod_id
        if eod is not None and answer[-1:] != [eod]:
            answer = [*answer, eod]
        ids = [*before, *answer]
        is_answer = np.arange(len(ids)) >= len(before)
        return ids, is_answer


def overlaps(places: Sequence[tuple[int, int]], text: AnsweredText) -> np.ndarray:
    """Which tokens, at [begin, end) of a text's characters, have one of an answer; bool [n]."""
    is_answer = np.zeros(len(text.text), np.int64)
    for begin, end in text.answers:
        is_answer[begin:end] = 1
    before = np.concatenate([[0], np.cumsum(is_answer)])
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    return before[ends] > before[begins]
