"""`python -m tools.chat_lines RUN --out DIR`: conversations of a simple format from a run's text.

A user shows a line of code; the answer says what the line names: `def load(path):` is answered by
"function load", and a class, a module or a variable likewise. RUN is a run on `data.text`, such as
the quickstart's. DIR gets train.jsonl, held_out.jsonl, the tokenizer of the run and a chat
template. Names of held-out lines are in no training line, so an answer cannot be known by heart.
"""

import argparse
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.companion_files import tokenizer_dir
from mjax.config import load
from mjax.config.languages.paths import as_path
from mjax.data.base.documents import expand_paths
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.corpus.text import stdlib_files
from mjax.errors import UserError, run_cli

NAME = r"([A-Za-z_]\w{2,23})"
KINDS = {
    "function": re.compile(rf"(?:async )?def {NAME}\("),
    "class": re.compile(rf"class {NAME}[(:]"),
    "module": re.compile(rf"(?:import|from) {NAME}\b"),
    "variable": re.compile(rf"{NAME} = "),
}
LONGEST = 60  # characters of a line
HELD_OUT = 20  # one name of so many
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}\n#\n{% endif %}{% endfor %}"
)


def main(argv: list[str] | None = None) -> int:
    """The command line; writes the folder."""
    about = "Make conversations of a simple format from the text of a run."
    parser = argparse.ArgumentParser(prog="python -m tools.chat_lines", description=about)
    parser.add_argument("run", type=as_path, metavar="RUN", help="a run on data.text")
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--count", type=int, default=24_000, help="most conversations to train on")
    args = parser.parse_args(argv)
    folder = tokenizer_dir(args.run)
    if folder is None or not (args.run / "config.yaml").is_file():
        raise UserError(
            f"{args.run}: no run on data.text is here; make the quickstart's: "
            "mjax train --config configs/quickstart.yaml"
        )
    text = load(args.run / "config.yaml").data.text
    if text is None:
        raise UserError(f"{args.run}: the run has no data.text; give one that has")
    files = stdlib_files() if text == "stdlib" else expand_paths([text])
    tokenizer = load_tokenizer(folder)
    end = tokenizer.special_text(tokenizer.eod_id)
    lines = list(dict.fromkeys(line for file in files for line in named_lines(file)))
    lines = [line for line in lines if not end or end not in line[0]]  # else it ends the answer
    order = np.random.default_rng(0).permutation(len(lines))
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for line in (lines[number] for number in order):
        parts["held_out" if _is_held_out(line[1]) else "train"].append(record_of(*line))
    args.out.mkdir(parents=True, exist_ok=True)
    kept = {"train": parts["train"][: args.count], "held_out": parts["held_out"][:1000]}
    for part, records in kept.items():
        (args.out / f"{part}.jsonl").write_text("".join(records), encoding="utf-8")
        print(f"{args.out / part}.jsonl: {len(records):,} conversations")
    shutil.copy(folder / "tokenizer.json", args.out)
    said = {"eos_token": end, "chat_template": TEMPLATE}
    (args.out / "tokenizer_config.json").write_text(json.dumps(said, indent=1))
    return 0


def named_lines(file: str) -> Iterator[tuple[str, str, str]]:
    """Yield (line, name, kind) of the lines of a file that name something."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        line = line.strip()
        for kind, pattern in KINDS.items():
            if len(line) <= LONGEST and line.isascii() and (found := pattern.match(line)):
                yield line, found[1], kind


def record_of(line: str, name: str, kind: str) -> str:
    """A line of a .jsonl file."""
    said = {"user": line, "assistant": f"{kind} {name}"}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    return json.dumps({"messages": messages}) + "\n"


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % HELD_OUT == 0


if __name__ == "__main__":
    run_cli(main)
