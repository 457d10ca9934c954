"""`python -m tools.preference_pairs --out DIR`: pairs of answers with a planted preference.

A prompt asks for words that begin with a letter. Both answers are made-up words, and the one with
more vowels is chosen. So what a model has learned is known, and can be measured on new pairs.
"""

import argparse
from pathlib import Path

import numpy as np

from mjax.errors import run_cli
from tools.json_lines import write_records

VOWELS, OTHERS = "aeiou", "bdfgklmnprstvz"
FEWEST = 2  # vowels by which a chosen answer has more


def pairs(count: int, seed: int) -> list[dict]:
    """Records with prompt, chosen and rejected; those of two seeds hardly share an answer."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        letter = str(rng.choice(list(OTHERS)))
        answers = [_words(rng, letter) for _ in range(2)]
        few, many = sorted(answers, key=vowels)
        if vowels(many) - vowels(few) >= FEWEST:
            found.append({"prompt": f"words in {letter}:", "chosen": many, "rejected": few})
    return found


def vowels(text: str) -> int:
    return sum(letter in VOWELS for letter in text)


def _words(rng: np.random.Generator, letter: str) -> str:
    """Two made-up words of four or five letters."""
    share, words = rng.uniform(0.1, 0.9), []
    for length in rng.integers(3, 5, 2):
        letters = [
            str(rng.choice(list(VOWELS if rng.random() < share else OTHERS))) for _ in range(length)
        ]
        words.append(letter + "".join(letters))
    return " " + " ".join(words)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--train", type=int, default=4000, help="pairs to train on")
    parser.add_argument("--held-out", type=int, default=500, help="pairs to measure on")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, count, seed in ("train", args.train, 1), ("held_out", args.held_out, 2):
        write_records(args.out / f"{name}.jsonl", pairs(count, seed))
    return 0


if __name__ == "__main__":
    run_cli(main)
