"""`data.text`: raw text, tokenized once into the run's own folder.

Invariant: RUN/data is complete or absent, was made with the settings it names, and its documents
are ordered by a hash of their content: a split by position is then a fair sample, and copies of a
document are neighbors instead of one in the training and one in the held-out part.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mjax.config.schema import DataConfig
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.preprocess import expand, preprocess, read_texts
from mjax.data.tokenizer import load_tokenizer, train_tokenizer
from mjax.errors import UserError, or_user_error
from mjax.json_file import read_json

VERSION = 1  # raise it when the same settings give other files


@dataclass(frozen=True)
class TextCorpus:
    """A prepared corpus; `tokenizer_path` is what `load_tokenizer` takes."""

    prefix: str
    tokenizer_path: str
    vocab_size: int


def prepare_text(data: DataConfig, run_dir: str | os.PathLike) -> TextCorpus:
    """Tokenize `data.text` into `run_dir`/data, or find it done with the same settings; other
    settings rebuild it. Trains the tokenizer for 'train:VOCAB'. Documents end in the EOD token if
    the tokenizer has one, but not those of sentences. Processes of one host wait for the first.
    Raises `UserError`."""
    if not data.text or not data.tokenizer:
        raise UserError("data.text needs data.tokenizer: 'byte', a tokenizer file or 'train:VOCAB'")
    folder = Path(run_dir) / "data"
    train = data.tokenizer.startswith("train:")
    if train and not data.tokenizer.removeprefix("train:").isdecimal():
        raise UserError(f"data.tokenizer {data.tokenizer!r}: write train:VOCAB, as in train:4096")
    spec = str(folder / "tokenizer.json") if train else data.tokenizer
    settings = {"version": VERSION, "text": data.text, "tokenizer": data.tokenizer}
    if data.masked.sentences:
        settings["sentences"] = True
    stamp = folder / "settings.json"
    with or_user_error(f"{run_dir}: cannot be written ({{reason}}): set run.dir"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name("data.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it if the process dies
            if not _was_made_with(stamp, settings):
                _rebuild(data.text, data.tokenizer, settings, folder)
    return TextCorpus(str(folder / "corpus"), spec, load_tokenizer(spec).vocab_size)


def _was_made_with(stamp: Path, settings: dict) -> bool:
    try:
        return stamp.is_file() and read_json(stamp) == settings
    except UserError as e:
        raise UserError(f"{e}, or delete the folder {stamp.parent} to make it again") from None


def _rebuild(text: str, tokenizer: str, settings: dict, folder: Path) -> None:
    """Make everything in a scratch folder, then give it its name."""
    inputs = stdlib_files() if text == "stdlib" else expand([text])
    scratch = folder.with_name("data.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        if tokenizer.startswith("train:"):
            size = int(tokenizer.removeprefix("train:"))
            tokenizer = str(scratch / "tokenizer.json")
            train_tokenizer(read_texts(inputs), size, tokenizer)
        by_sentence = bool(settings.get("sentences"))
        append_eod = load_tokenizer(tokenizer).eod_id is not None and not by_sentence
        how = {"append_eod": append_eod, "by_sentence": by_sentence}
        preprocess(inputs, scratch / "unordered", tokenizer, **how)
        _order_by_content(scratch / "unordered", scratch / "corpus")
        for suffix in (".bin", ".idx"):
            (scratch / f"unordered{suffix}").unlink()
        (scratch / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _order_by_content(source: Path, target: Path) -> None:
    data = IndexedDataset(source)
    documents = [range(*bounds) for bounds in pairwise(data.document_indices.tolist())]

    def key(document: range) -> bytes:
        digest = hashlib.blake2b(digest_size=8)
        for i in document:
            digest.update(data[i].tobytes())
        return digest.digest()

    with IndexedDatasetWriter(target, data.dtype) as writer:
        for document in sorted(documents, key=key):
            for i in document:
                writer.add_item(data[i])
            writer.end_document()


def stdlib_files() -> list[str]:
    """Every UTF-8 .py file of Python's own standard library, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    files = []
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            try:
                path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):  # test files in other encodings
                continue
            files.append(str(path))
    if not files:
        raise UserError(f"data.text stdlib: {root} holds no Python sources; give a folder instead")
    return files
