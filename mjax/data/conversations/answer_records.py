"""Records of answers that are compared, rated or marked by step, as groups of conversations.

Formats are TRL's (pairs with an explicit or an implicit prompt, single answers with a label, steps)
and NeMo-RL's rankings. A ranking becomes all its pairs of unlike ranks, and a pair two single
answers where those are wanted. Invariant: the answers of a group have one prompt.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from mjax.data.conversations.formats import Conversation, parse_record, without_nulls
from mjax.errors import UserError

PAIRS, STEPS = "pairs", "steps"  # as `objectives/objective.py` names them; others are single
_SHARED = "tools", "chat_template_kwargs", "images", "image", "videos", "audio"


@dataclass(frozen=True)
class AnswerGroup:
    """Answers that belong together: a pair with the chosen one first, or one.

    values: of each answer, 1 for chosen and good ones, else -1; of steps those of each step.
    margin: by how much the first is better, for reward models.
    steps: the texts of the steps of a prompt, and then there is one conversation.
    """

    conversations: list[Conversation]
    values: list[float]
    margin: float = 0.0
    steps: list[str] | None = None


def parse_answers(record: dict, where: str, kind: str) -> list[AnswerGroup]:
    """The groups of a record. Raises `UserError` for a broken one, naming its place."""
    try:
        record = without_nulls(record)
        if kind == STEPS:
            return [_steps(record, where)]
        if kind != PAIRS and "label" in record:
            prompt, answer = _text_or_messages(record.get("prompt"), record.get("completion"))
            value = 1.0 if _is_good(record["label"]) else -1.0
            return [AnswerGroup([_conversation(record, where, prompt, answer)], [value])]
        groups = _pairs(record, where)
        if kind == PAIRS:
            return groups
        return [
            AnswerGroup([conversation], [value])
            for group in groups
            for conversation, value in zip(group.conversations, group.values, strict=True)
        ]
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(f"{where}: {e}; mend the record or leave it out") from None


def _pairs(record: dict, where: str) -> list[AnswerGroup]:
    """The pairs of a record with chosen and rejected, or of one with ranks."""
    if "chosen" in record and "rejected" in record:
        prompt, chosen, rejected = with_prompt(record)
        margin = float(record.get("margin", 0))
        return [_pair(record, where, prompt, (chosen, rejected), margin)]
    if "completions" not in record:
        has = ", ".join(map(repr, sorted(record)[:8])) or "nothing"
        single = " (single answers are for preference.loss_type=kto)" if "label" in record else ""
        raise ValueError(f"no chosen and rejected, nor completions with ranks, but {has}{single}")
    prompt, answers = record.get("prompt", record.get("context")), record["completions"]
    ranks = record.get("ranks") or [answer["rank"] for answer in answers]
    texts = [one["completion"] if isinstance(one, dict) else one for one in answers]
    ranked = sorted(zip(ranks, texts, strict=True), key=lambda entry: entry[0])
    found = []
    for (first, better), (second, worse) in combinations(ranked, 2):
        if first < second:
            found.append(_pair(record, where, prompt, (better, worse), 0.0))
    if not found:
        raise ValueError("all completions have one rank, so none is better")
    return found


def _pair(
    record: dict, where: str, prompt: Any, answers: tuple[Any, Any], margin: float
) -> AnswerGroup:
    said = []
    for answer in answers:
        said.append(_conversation(record, where, *_text_or_messages(prompt, answer)))
    return AnswerGroup(said, [1.0, -1.0], margin)


def with_prompt(record: dict) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a record, whose prompt may be what both answers begin with."""
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal")
    holds_all = isinstance(chosen, list) and chosen and chosen[0].get("role") != "assistant"
    if prompt is not None and not (holds_all and isinstance(prompt, str)):
        return prompt, chosen, rejected
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("chosen and rejected are neither two texts nor two lists")
    unlike = (n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    count = next(unlike, min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and chosen[:count].endswith(" "):
        count -= 1  # a space goes with the word after it
    if not count:
        raise ValueError("there is no prompt, and chosen and rejected begin unlike")
    return chosen[:count], chosen[count:], rejected[count:]


def _text_or_messages(prompt: Any, answer: Any) -> tuple[Any, Any]:
    """A prompt and an answer as two texts, or as two lists of messages."""
    if isinstance(prompt, str) and isinstance(answer, list):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return prompt, answer


def _conversation(record: dict, where: str, prompt: Any, answer: Any) -> Conversation:
    shared = {key: record[key] for key in _SHARED if key in record}
    return parse_record(shared | {"prompt": prompt, "completion": answer}, where)


def _is_good(label: Any) -> bool:
    if label not in (0, 1):
        raise ValueError(f"label is {label!r}; give true or false")
    return bool(label)


def _steps(record: dict, where: str) -> AnswerGroup:
    prompt, steps, labels = (record.get(key) for key in ("prompt", "completions", "labels"))
    if not isinstance(prompt, str) or not steps or not all(isinstance(s, str) for s in steps):
        raise ValueError("steps need a text as prompt, and completions that are texts")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise ValueError("labels does not have one entry for each of completions")
    values = [1.0 if _is_good(label) else -1.0 for label in labels]
    return AnswerGroup([Conversation(where, plain=(prompt, "\n".join(steps)))], values, 0.0, steps)
