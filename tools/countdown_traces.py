"""`python -m tools.countdown_traces --out FILE`: solved problems of countdown, to fine-tune on.

A record has the prompt of the environment `countdown` and as its completion the steps of a
solution, then the expression. With --chat both are messages. `mjax sft` reads either. Prompts are
those of seed 0 unless --seed says another, so reinforcement learning should draw from other seeds.
--question is that of `reinforce.environment_args`, if a run sets it.
"""

import argparse
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import run_cli
from mjax.post.environments.countdown import COUNTDOWN_QUESTION
from mjax.post.environments.environment import make_environment
from tools.json_lines import write_records


def solve_countdown(numbers: Sequence[int], target: int) -> tuple[list[str], str] | None:
    """(steps such as "12-7=5", an expression of all numbers) that reach a target; None: none do."""
    return _solved([(Fraction(number), str(number)) for number in numbers], target)


def _solved(terms: list[tuple[Fraction, str]], target: int) -> tuple[list[str], str] | None:
    if len(terms) == 1:
        value, text = terms[0]
        expression = text.removeprefix("(").removesuffix(")")
        return ([], expression) if value == target else None
    for i, (a, left) in enumerate(terms):
        for j, (b, right) in enumerate(terms):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign, value in _combined(a, b) if i != j else ():
                found = _solved([*rest, (value, f"({left}{sign}{right})")], target)
                if found is not None:
                    return [f"{a}{sign}{b}={value}", *found[0]], found[1]
    return None


def _combined(a: Fraction, b: Fraction) -> list[tuple[str, Fraction]]:
    """Results of a and b that are positive and whole, by their signs."""
    found = [("+", a + b), ("*", a * b)] if a >= b else []  # the order does not matter
    found += [("-", a - b)] if a > b else []
    found += [("/", a / b)] if (a / b).denominator == 1 else []
    return found


def traces(count: int, seed: int, **args: int | str) -> list[dict]:
    """Records with prompt and completion; `args` are those of the environment."""
    tokenizer = load_tokenizer("byte")
    environment, found = make_environment("countdown", tokenizer, [], **args), []
    for index in range(count):
        turn = environment.reset(seed, index)
        steps, expression = solve_countdown(turn.state["numbers"], turn.state["target"])
        completion = f"{' '.join(steps)}\n<answer>{expression}</answer>"
        found.append({"prompt": tokenizer.decode(turn.ids), "completion": completion})
    return found


def as_chat(record: dict) -> dict:
    """A record as a user's message and its answer, for models with a chat template."""
    texts = {"user": record["prompt"], "assistant": record["completion"]}
    return {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=4000, help="records")
    parser.add_argument("--seed", type=int, default=0, help="of the stream of prompts")
    parser.add_argument("--numbers", type=int, default=3, help="numbers of a problem")
    parser.add_argument("--largest", type=int, default=99, help="the largest of them")
    parser.add_argument("--question", default=COUNTDOWN_QUESTION, help="text of a prompt")
    parser.add_argument("--chat", action="store_true", help="write messages")
    args = parser.parse_args()
    given = {"numbers": args.numbers, "largest": args.largest, "question": args.question}
    records = traces(args.count, args.seed, **given)
    write_records(args.out, map(as_chat, records) if args.chat else records)
    return 0


if __name__ == "__main__":
    run_cli(main)
