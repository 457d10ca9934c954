"""Conversations to token ids, with the tokens of answers that the loss is on.

A template with `{% generation %}` marks answers itself, and the tokens are those of transformers'
`return_assistant_tokens_mask`. Otherwise an answer is what its message adds to the text, from
behind the opened reply to the token that ends it. Invariant: a token with a loss overlaps an
answer. Refused: no such token, a doubled BOS, and templates that rewrite earlier turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mjax.config.schema.run import DataConfig
from mjax.data.base.chat import ChatTemplate, load_chat_template, read_chat_template
from mjax.data.base.conversations import AnsweredText, answers_by_prefixes
from mjax.data.base.tokenizer import PlacedIds, Tokenizer, encode_behind
from mjax.data.conversations.formats import Conversation
from mjax.errors import UserError


class TokenizedConversation(NamedTuple):
    """ids, and which of them are answers.

    answers: their number. ended: those whose last token is a special one, such as `<|im_end|>`.
    """

    ids: list[int]
    is_answer: np.ndarray
    answers: int
    ended: int


def template_of(data: DataConfig) -> ChatTemplate:
    """The chat template of a run's conversations. Raises `UserError` for none."""
    folder = Path(data.tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    if data.conversations.chat_template is not None:
        return read_chat_template(data.conversations.chat_template, folder)
    if data.tokenizer == "byte":
        raise UserError(
            "data.tokenizer byte has no chat template; set data.conversations.chat_template"
        )
    return load_chat_template(folder)


@dataclass(frozen=True)
class AnswerTokenizer:
    """Tokenizes conversations; `last_only`: the loss is on the last answer of each alone."""

    tokenizer: Tokenizer
    make_template: Callable[[], ChatTemplate]
    last_only: bool = False
    _ends: dict[int, bool] = field(default_factory=dict)

    @cached_property
    def template(self) -> ChatTemplate:
        return self.make_template()

    def tokenize(
        self, conversations: Sequence[Conversation | UserError]
    ) -> list[TokenizedConversation | UserError]:
        """Each conversation as ids, or why it cannot be trained on; errors stay as they are."""
        texts = [self._or_error(self._text, one) for one in conversations]
        whole = [text.text for text in texts if isinstance(text, AnsweredText)]
        encode = self.tokenizer.encode_with_places
        placed = iter(encode(whole) if encode else [None] * len(whole))
        found = []
        for conversation, text in zip(conversations, texts, strict=True):
            ids = next(placed) if isinstance(text, AnsweredText) else None
            found.append(self._or_error(self._tokenized, text, conversation, ids))
        return found

    @staticmethod
    def _or_error(function: Callable, given: object, *rest: object) -> object:
        """The result of a function, or the `UserError` that it was given or raised."""
        if isinstance(given, UserError):
            return given
        try:
            return function(given, *rest)
        except UserError as e:
            return e

    def _text(self, conversation: Conversation) -> AnsweredText | None:
        """The text with its answers; None of a prompt with its completion."""
        if conversation.plain is not None:
            return None
        self._require_no_ends(conversation)
        answers = conversation.answers[-1:] if self.last_only else conversation.answers
        if self.template.marks_answers:
            return self._marked_text(conversation, answers)
        where, messages = conversation.where, conversation.messages
        given = {"tools": conversation.tools, **conversation.variables}
        return answers_by_prefixes(where, self.template, messages, answers, **given)

    def _marked_text(self, conversation: Conversation, answers: list[int]) -> AnsweredText:
        """The text up to the last answer, and the chosen ones of those that the template marks."""
        template, where = self.template, conversation.where
        messages = conversation.messages[: answers[-1] + 1]
        given = {"tools": conversation.tools, **conversation.variables}
        text, spans = template.render_marked(messages, **given)
        said = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(said):
            spans = [span for n, span in zip(said, spans, strict=True) if n in answers]
        elif spans and len(said) > len(answers):
            raise UserError(
                f"{where}: {template.origin} marks {len(spans)} parts of {len(said)} answers, so "
                "none can be left out; set data.conversations.answers=all"
            )
        for number in answers[:-1]:
            part = messages[: number + 1]
            if not text.startswith(template.render(part, add_generation_prompt=False, **given)):
                raise UserError(
                    f"{where}: {template.origin} rewrites earlier turns; give one turn, or train "
                    "on the last answer alone"
                )
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

    def _tokenized(
        self, text: AnsweredText | None, conversation: Conversation, placed: PlacedIds | None
    ) -> TokenizedConversation:
        where = conversation.where
        if text is None:
            ids, is_answer = self._pair(conversation)
        elif placed is None:
            ids, is_answer = self._in_parts(text)
        else:
            ids, is_answer = placed[0], overlaps(placed[1], text)
        if text is not None and not self.template.marks_answers:
            self._leave_out_space(ids, is_answer)
        if not is_answer[1:].any():
            origin = "" if text is None else f"; {self.template.origin} marks no answer"
            raise UserError(f"{where}: it has no token to train on{origin}")
        self._require_one_start(where, ids, text is not None)
        lasts = np.flatnonzero(is_answer & ~np.append(is_answer[1:], False))
        ended = sum(self._is_end(ids[at]) for at in lasts)
        return TokenizedConversation(ids, is_answer, len(lasts), ended)

    def _pair(self, conversation: Conversation) -> tuple[list[int], np.ndarray]:
        """A prompt and its completion, which the end token follows."""
        prompt, completion = conversation.plain
        before = [*self.tokenizer.prefix, *self.tokenizer.encode(prompt)]
        answer = encode_behind(self.tokenizer, before, completion)
        eod = self.tokenizer.eod_id
        if eod is not None and answer[-1:] != [eod]:
            answer = [*answer, eod]
        return [*before, *answer], np.arange(len(before) + len(answer)) >= len(before)

    def _in_parts(self, text: AnsweredText) -> tuple[list[int], np.ndarray]:
        """Tokens of the parts between the bounds of answers, each encoded by itself."""
        bounds = [0, *(bound for span in text.answers for bound in span), len(text.text)]
        ids, is_answer = [], []
        for part, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            more = encode_behind(self.tokenizer, ids, text.text[begin:end]) if end > begin else []
            ids += more
            is_answer += [part % 2 == 1] * len(more)
        return ids, np.array(is_answer, bool)

    def _leave_out_space(self, ids: Sequence[int], is_answer: np.ndarray) -> None:
        """Take the loss from white space behind the token that ends an answer."""
        for last in np.flatnonzero(is_answer & ~np.append(is_answer[1:], False)):
            at = last
            while at > 0 and is_answer[at - 1] and self._is_space(ids[at]):
                at -= 1
            if self._is_end(ids[at]):
                is_answer[at + 1 : last + 1] = False

    def _require_one_start(self, where: str, ids: Sequence[int], is_chat: bool) -> None:
        starts = set(self.tokenizer.prefix)
        bos = self.template.tokens.get("bos_token") if is_chat else None
        if bos:
            starts.add(self.tokenizer.id_of(bos))
        if len(ids) > 1 and ids[0] == ids[1] and ids[0] in starts:
            raise UserError(f"{where}: its text begins with two BOS tokens; take one out")

    def _is_end(self, id: int) -> bool:
        if id not in self._ends:
            is_special = bool(self.tokenizer.special_text(id))
            self._ends[id] = is_special or id == self.tokenizer.eod_id
        return self._ends[id]

    def _is_space(self, id: int) -> bool:
        return not self._is_end(id) and self.tokenizer.decode([id]).isspace()


def overlaps(places: Sequence[tuple[int, int]], text: AnsweredText) -> np.ndarray:
    """Which tokens, at [begin, end) of a text's characters, have one of an answer; bool [n]."""
    is_answer = np.zeros(len(text.text), np.int64)
    for begin, end in text.answers:
        is_answer[begin:end] = 1
    before = np.concatenate([[0], np.cumsum(is_answer)])
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    return before[ends] > before[begins]
