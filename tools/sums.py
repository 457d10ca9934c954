"""`python -m tools.sums --out DIR`: sums of two numbers, as prompts and answers.

They are those of the environment `arithmetic`: "12+34=" and "46". A model that is trained on few of
them knows the form of an answer and some of the sums.
"""

import argparse
from pathlib import Path

import numpy as np

from mjax.errors import run_cli
from mjax.post.environments.puzzles import draw_numbers
from tools.json_lines import write_records


def sums(count: int, digits: int, seed: int) -> list[dict]:
    """Records with prompt and completion."""
    rng = np.random.default_rng(seed)
    pairs = [draw_numbers(rng, digits, 2) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in pairs]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--count", type=int, default=20_000, help="sums to train on")
    parser.add_argument("--digits", type=int, default=2, help="of each number")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_records(args.out / "train.jsonl", sums(args.count, args.digits, seed=1))
    return 0


if __name__ == "__main__":
    run_cli(main)
