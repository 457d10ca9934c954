"""How often a model gives the wanted answer of a conversation, to the letter.

The last answer of each conversation is wanted. The model reads what stands before it, through the
chat template, and takes the likeliest token each time until an end token. Space around an answer
does not count.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mjax.data.base.chat import ChatTemplate, load_chat_template
from mjax.data.base.chat_ids import answer_ends, reply_ids
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.conversations.formats import Conversation, parse_record
from mjax.data.conversations.records import attempt, read_records, source_files
from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.infer.requests import SamplingParams
from mjax.infer.small_engine import completed, small_engine
from mjax.interop.pretrained import Pretrained


class Question(NamedTuple):
    """The ids that an answer follows, and the text of the wanted one."""

    ids: list[int]
    answer: str


def chat_template_of(place: str | Path | None) -> ChatTemplate | UserError:
    """The chat template in a tokenizer's folder or beside its file, or why there is none."""
    if place is None or place == "byte":
        return UserError("the model has no chat template; give --tokenizer a folder that has one")
    return attempt(load_chat_template, place)


def read_questions(
    path: str, limit: int | None, tokenizer: Tokenizer, template: ChatTemplate | UserError
) -> list[Question]:
    """The first `limit` conversations of a source as questions.

    `template`: or why there is none. Raises `UserError` for a record that is broken.
    """
    found = []
    for place, row in read_records(source_files(path)):
        if len(found) == limit:
            break
        conversation = attempt(parse_record, row, place)
        if isinstance(conversation, UserError):
            raise conversation
        found.append(_question(conversation, tokenizer, template))
    if not found:
        raise UserError(f"{path}: no conversation to answer; give a file that has some")
    return found


def _question(
    conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate | UserError
) -> Question:
    if conversation.plain is not None:
        prompt, answer = conversation.plain
        return Question([*tokenizer.prefix, *tokenizer.encode(prompt)], answer.strip())
    if isinstance(template, UserError):
        raise template
    last = conversation.answers[-1]
    answer = conversation.messages[last]
    if answer.get("tool_calls"):
        raise UserError(f"{conversation.where}: its last answer is a call, which has no one text")
    given = {"tools": conversation.tools, **conversation.variables}
    ids = reply_ids(conversation.messages[:last], tokenizer, template, **given)
    return Question(ids, answer["content"].strip())


def answered(engine: Engine, questions: Sequence[Question], most: int) -> list[str]:
    """The model's answer to each question, of at most `most` tokens.

    An answer that does not end by then is what was made of it.
    """
    prompts = [question.ids for question in questions]
    return [
        made.text.strip() for made in completed(engine, prompts, SamplingParams(max_tokens=most))
    ]


def print_exact_matches(
    model: Pretrained, dtype: str, tokenizer: Tokenizer, args: argparse.Namespace
) -> None:
    """`mjax evaluate answers`: print some answers, then a line of JSON with the exact matches."""
    if args.batch_size < 1 or args.max_new_tokens < 1:
        sizes = f"--batch-size {args.batch_size} --max-new-tokens {args.max_new_tokens}"
        raise UserError(f"{sizes}: give numbers from 1")
    template = chat_template_of(args.tokenizer or model.tokenizer_dir)
    questions = read_questions(args.file, args.limit, tokenizer, template)
    usable = None if isinstance(template, UserError) else template
    engine = small_engine(
        model.definition,
        model.params,
        model.cfg,
        [len(question.ids) for question in questions],
        args.max_new_tokens,
        rows=args.batch_size,
        dtype=dtype,
        tokenizer=tokenizer,
        eos=answer_ends(tokenizer, usable),
    )
    found = answered(engine, questions, args.max_new_tokens)
    pairs = [(question.answer, text) for question, text in zip(questions, found, strict=True)]
    for wanted, text in pairs[: args.show]:
        print(f"wanted {wanted!r}, answered {text!r}")
    exact = sum(wanted == text for wanted, text in pairs)
    print(json.dumps({"answers": len(pairs), "exact": exact, "exact_match": exact / len(pairs)}))
