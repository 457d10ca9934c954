"""`python cookbook/images.py write|count`: pictures of digits to learn on, and their test.

`write` makes runs/digits: lines of one to three of scikit-learn's digits as pictures, and the
number that they spell. Held-out lines have digits of which no line for training has one. `count`
lets the model of runs/quickstart_llava read them. docs/models/multimodal.md explains both.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np

FOLDER, RUN = Path("runs/digits"), "runs/quickstart_llava"
SHIFTS = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]  # digits to learn from are moved by a pixel


def write(lines: int = 60_000) -> None:
    """Write the pictures, train.jsonl and valid.jsonl."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for n, pixels in enumerate((data.images * 255 / 16).round().astype("uint8")):
        for k, shift in enumerate(SHIFTS):
            Image.fromarray(np.roll(pixels, shift, (0, 1))).save(FOLDER / f"{n}_{k}.png")
    random.seed(0)
    splits = ("train", range(1437), len(SHIFTS), lines), ("valid", range(1437, 1797), 1, 400)
    for name, numbers, kinds, count in splits:
        with open(FOLDER / f"{name}.jsonl", "w") as out:
            for _ in range(count):
                chosen = random.choices(numbers, k=random.randint(1, 3))
                images = [f"{n}_{random.randrange(kinds)}.png" for n in chosen]
                line = {"images": images, "prompt": "<image>" * len(chosen) + "="}
                line["text"] = "".join(str(data.target[n]) for n in chosen)
                out.write(json.dumps(line) + "\n")


def count() -> None:
    """Print how many held-out lines the model reads to the letter, by the number of pictures."""
    import mjax
    from mjax.config import load
    from mjax.data.base.tokenizer import load_tokenizer
    from mjax.data.multimodal.image_text import read_lines
    from mjax.data.multimodal.readers import ImageReader
    from mjax.infer.requests import SamplingParams
    from mjax.infer.small_engine import completed, small_engine

    cfg, lm = load(f"{RUN}/config.yaml"), mjax.from_pretrained(RUN)
    lines = read_lines(str(FOLDER / "valid.jsonl"), load_tokenizer("byte"), cfg)
    reader = ImageReader(cfg)
    lengths, short = [line.prompt for line in lines], SamplingParams(max_tokens=4)
    engine = small_engine(lm.definition, lm.params, lm.cfg, lengths, 4, dtype="float32", eos=[256])
    for pictures in (1, 2, 3):
        rows = [line for line in lines if len(line.items["vision"]) == pictures]
        seen = [[reader.item(image.read()) for image in row.items["vision"]] for row in rows]
        items = [{"vision": np.stack(each)} for each in seen]
        read = completed(engine, [row.ids[: row.prompt] for row in rows], short, items)
        right = sum(m.token_ids == r.ids[r.prompt :] for m, r in zip(read, rows, strict=True))
        print(pictures, "pictures:", right, "of", len(rows), "numbers are right")


if __name__ == "__main__":
    {"write": write, "count": count}[sys.argv[1]](*map(int, sys.argv[2:]))
