"""`python -m mjax.data.preprocess`: raw text to an indexed corpus, in parallel.

Inputs are files, folders, globs or `-` (stdin), read as `documents.py` says: JSON lines are one
document each under `--json-key`, any other file is one document.
"""

import argparse
import json
import os
import sys

from mjax.config.languages.paths import path_text
from mjax.data.base.tokenizer import train_tokenizer
from mjax.data.corpus.tokenize_files import preprocess, read_texts
from mjax.errors import CommandParser, at_least, run_cli


def _preprocess_arguments(argv: list[str]) -> argparse.Namespace:
    train = argv[:1] == ["train-tokenizer"]
    name = "data.preprocess train-tokenizer" if train else "data.preprocess"
    about = (
        "Train a byte-level BPE tokenizer on text."
        if train
        else "Tokenize text into PREFIX.bin and PREFIX.idx; see also `train-tokenizer --help`."
    )
    parser = CommandParser(name, description=about)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        type=path_text,
        required=True,
        help="files, folders, globs or - (.gz, .zst, .bz2, .xz too)",
    )
    add("--json-key", help="key of the text in JSON lines (text), or column of tables (found)")
    if train:
        add("--vocab-size", type=int, required=True)
        add("--output", type=path_text, required=True, help="the tokenizer.json to write")
    else:
        add("--output", type=path_text, required=True, metavar="PREFIX", help="of the two files")
        kinds = "byte, a tokenizer's file or its folder"
        add("--tokenizer", type=path_text, required=True, help=kinds)
        add("--append-eod", action="store_true", help="end every document with the EOD token")
        add("--split-sentences", action="store_true", help="a sequence a sentence, for masked_lm")
        add("--workers", type=at_least(1), default=os.cpu_count(), help="processes (default: all)")
    args = parser.parse_args(argv[1:] if train else argv)
    args.train = train
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; prints one JSON line on success."""
    args = _preprocess_arguments(sys.argv[1:] if argv is None else argv)
    if args.train:
        texts = read_texts(args.input, args.json_key)
        made = train_tokenizer(texts, args.vocab_size, args.output)
        print(json.dumps({"tokenizer": args.output, "vocab_size": made.vocab_size}))
        return 0
    done = preprocess(
        args.input,
        args.output,
        args.tokenizer,
        append_eod=args.append_eod,
        by_sentence=args.split_sentences,
        json_key=args.json_key,
        workers=args.workers,
    )
    result = {"output": args.output, "documents": done.documents, "tokens": done.tokens}
    result["seconds"] = round(done.seconds, 3)
    result["tokens_per_second"] = round(done.tokens / done.seconds)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_cli(main)
