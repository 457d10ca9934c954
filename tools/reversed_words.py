"""`python -m tools.reversed_words --out FILE`: words to write backwards, as prompts and answers.

They are those of the environment `reverse_text`. Prompts are those of seed 0 unless --seed says
another, so reinforcement learning should draw from other seeds.
"""

import argparse
from pathlib import Path

from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import run_cli
from mjax.post.environments.environment import make_environment
from tools.json_lines import write_records


def reversed_words(count: int, seed: int, **args: int | str) -> list[dict]:
    """Records with prompt and completion; `args` are those of the environment."""
    tokenizer = load_tokenizer("byte")
    environment = make_environment("reverse_text", tokenizer, [], **args)
    turns = [environment.reset(seed, index) for index in range(count)]
    return [{"prompt": tokenizer.decode(turn.ids), "completion": turn.state} for turn in turns]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=4000, help="records")
    parser.add_argument("--seed", type=int, default=0, help="of the stream of prompts")
    parser.add_argument("--words", type=int, default=4, help="of a text")
    args = parser.parse_args()
    write_records(args.out, reversed_words(args.count, args.seed, words=args.words))
    return 0


if __name__ == "__main__":
    run_cli(main)
