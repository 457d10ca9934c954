"""`data.text`: raw text, tokenized once into the run's own folder.

Invariant: RUN/data is complete or absent, was made with the settings it names, and its documents
are ordered by a hash of their content: a split by position is then a fair sample, and copies of a
document are neighbors instead of one in the training and one in the held-out part.
"""

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mjax.config.languages.paths import is_address
from mjax.config.schema.run import DataConfig
from mjax.data.base.documents import expand_paths
from mjax.data.base.object_store import stored_object
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from mjax.data.corpus.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.corpus.tokenize_files import preprocess, read_texts
from mjax.errors import UserError, or_user_error
from mjax.json_file import read_json

log = logging.getLogger(__name__)
TEXT_VERSION = 1  # raise it when the same settings give other files

# Names, sizes, times of content and of entry; of objects in stores the version and 0.
Files = tuple[tuple[str, int, int | str, int], ...]


@dataclass(frozen=True)
class TextCorpus:
    """A prepared corpus; `tokenizer_path` is what `load_tokenizer` takes."""

    prefix: str
    tokenizer_path: str
    vocab_size: int


def tokenizer_of_run(data: DataConfig, run_dir: str | os.PathLike) -> str | None:
    """`data.tokenizer`, or the file that a run has of it: it may have trained one on its text."""
    if data.text and not data.stream:
        return prepare_text(data, run_dir).tokenizer_path
    return data.tokenizer


def prepare_text(
    data: DataConfig, run_dir: str | os.PathLike, trained_with: str | None = None
) -> TextCorpus:
    """Tokenize `data.text` into `run_dir`/data, or find it done with the same settings and text;
    others rebuild it. Trains the tokenizer for 'train:VOCAB'. Documents end in the EOD token if
    the tokenizer has one, but not those of sentences. Processes of one host wait for the first.

    `trained_with`: digest of the tokenizer of the weights that go on, if any. Raises `UserError`,
    also for another tokenizer than that, or than the corpus was made with; nothing then changes.
    """
    if not data.text or not data.tokenizer:
        raise UserError("data.text needs data.tokenizer: 'byte', a tokenizer file or 'train:VOCAB'")
    if data.text == "-":
        raise UserError("data.text '-': standard input can be read only once; give a file")
    folder = Path(run_dir) / "data"
    train = data.tokenizer.startswith("train:")
    if train and not data.tokenizer.removeprefix("train:").isdecimal():
        raise UserError(f"data.tokenizer {data.tokenizer!r}: write train:VOCAB, as in train:4096")
    spec = str(folder / "tokenizer.json") if train else data.tokenizer
    settings = {"version": TEXT_VERSION, "text": data.text, "tokenizer": data.tokenizer}
    if data.masked.sentences:
        settings["sentences"] = True
    if data.text_key is not None:
        settings["text_key"] = data.text_key
    with or_user_error(f"{run_dir}: cannot be written ({{reason}}): set run.dir"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name("data.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it if the process dies
            if not _is_made(folder, settings, spec):
                _rebuild(settings, folder, trained_with)
    tokenizer = load_tokenizer(spec)
    require_tokenizer(data.tokenizer, tokenizer, trained_with)
    return TextCorpus(prepared_prefix(run_dir), spec, tokenizer.vocab_size)


def prepared_prefix(run_dir: str | os.PathLike) -> str:
    """The prefix of the corpus that `prepare_text` has made for a run, whatever its text is now."""
    return str(Path(run_dir) / "data" / "corpus")


def require_tokenizer(name: str, tokenizer: Tokenizer, digest: str | None) -> None:
    """Raise `UserError` if weights were trained with the tokenizer of another digest."""
    if digest not in (None, tokenizer.digest):
        raise UserError(
            f"data.tokenizer {name!r} is another tokenizer than the run's checkpoints were trained "
            "with: put the earlier one back (each checkpoint has a copy), or set another run.dir"
        )


def digests_of_corpus(folder: Path) -> dict[str, str]:
    """Digests of the "tokenizer" and the "text" that a corpus in `folder` was made with."""
    return read_json(folder / "settings.json", missing={}).get("digests", {})


def _is_made(folder: Path, settings: dict, spec: str) -> bool:
    """Whether `folder` was made with the settings, and with the text that is there now.

    Raises `UserError` if the tokenizer of the same name is another one by now.
    """
    stamp = folder / "settings.json"
    try:
        found = read_json(stamp, missing={})
    except UserError as e:
        raise UserError(f"{e}, or delete the folder {folder} to make it again") from None
    digests, state = found.pop("digests", {}), found.pop("files", None)
    if found != settings:
        return False
    if digests.get("tokenizer") not in (None, load_tokenizer(spec).digest):
        raise UserError(
            f"data.tokenizer: {spec} is another tokenizer than {folder} was made with: put the "
            f"earlier one back, set another run.dir, or delete {folder} if nothing is trained yet"
        )
    files = _states_of(settings["text"])
    if "text" not in digests or not files or state == _state(files):
        return True  # no file was written since
    if digests["text"] == _digest_of(files):
        return True
    log.warning(
        "data.text %s: another text than %s was made with; it is made anew",
        settings["text"],
        folder,
    )
    return False


def _text_files(text: str) -> list[str]:
    return stdlib_files() if text == "stdlib" else expand_paths([text])


def _states_of(text: str) -> Files:
    """The files that `data.text` names, with their sizes and times; () where they are gone."""
    try:
        names = _text_files(text)
    except UserError:
        if is_address(text):
            raise
        return ()
    return states_of_files(names)


def states_of_files(names: list[str]) -> Files:
    """Files and objects with their sizes and times. Raises `UserError`."""
    with ThreadPoolExecutor(16) as pool:
        return tuple(pool.map(_state_of_file, names))


def _state_of_file(name: str) -> tuple[str, int, int | str, int]:
    if is_address(name):
        found = stored_object(name)
        return name, found.size, found.version, 0
    with or_user_error(f"data.text: {name}: cannot be read: {{reason}}"):
        state = os.stat(name)
    return name, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _state(files: Files) -> str:
    """Digest of names, sizes and times. While it is the same, no file need be read."""
    return hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=8)  # a run asks several times
def _digest_of(files: Files) -> str:
    """Digest of the contents of files, in any order; of objects in stores that of their state."""
    digests = []
    for name, *state in files:
        if is_address(name):
            digests.append(hashlib.blake2b(repr((name, state)).encode()).digest())
            continue
        with or_user_error(f"data.text {name}: cannot be read: {{reason}}"), open(name, "rb") as f:
            digests.append(hashlib.file_digest(f, hashlib.blake2b).digest())
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=16).hexdigest()


def _rebuild(settings: dict, folder: Path, trained_with: str | None) -> None:
    """Make everything in a scratch folder, then give it its name."""
    inputs, name = _text_files(settings["text"]), settings["tokenizer"]
    key = settings.get("text_key")
    files = _states_of(settings["text"])
    digests = {"text": _digest_of(files)}
    scratch = folder.with_name("data.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        spec = name
        if name.startswith("train:"):
            size = int(name.removeprefix("train:"))
            spec = str(scratch / "tokenizer.json")
            train_tokenizer(read_texts(inputs, key), size, spec)
        tokenizer = load_tokenizer(spec)
        require_tokenizer(name, tokenizer, trained_with)
        by_sentence = bool(settings.get("sentences"))
        append_eod = tokenizer.eod_id is not None and not by_sentence
        how = {"append_eod": append_eod, "by_sentence": by_sentence, "json_key": key}
        preprocess(inputs, scratch / "unordered", spec, **how)
        _order_by_content(scratch / "unordered", scratch / "corpus")
        for suffix in (".bin", ".idx"):
            (scratch / f"unordered{suffix}").unlink()
        digests["tokenizer"] = tokenizer.digest
        stamp = settings | {"digests": digests, "files": _state(files)}
        (scratch / "settings.json").write_text(json.dumps(stamp, indent=1) + "\n")
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


@functools.cache
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
