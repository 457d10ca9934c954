"""Files of text as documents: what a line, a name, a compression and a byte-order mark mean.

Every reader of text and of JSON lines reads through here. Invariant: the same bytes are the same
documents under any compression, on standard input, and with the line ends of any system.
"""

import bz2
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mjax.data.base.dataset_files import TABLE_ENDINGS, dataset_files
from mjax.data.base.object_store import local_copy
from mjax.data.base.tables import table_texts
from mjax.errors import UserError, or_user_error
from mjax.json_file import parse_json

try:
    import zstandard  # an extra
except ImportError:
    zstandard = None

READ_BYTES = 1 << 20  # compressed bytes read at once
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
FIRST_BYTES = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh91AY&SY", b"\xfd7zXZ\0")
MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # the byte-order mark, as text
BYTE_ORDER_MARK = MARK.encode()
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # its byte-order marks
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
READ_ERRORS += (zstandard.ZstdError,) if zstandard else ()


class Document(NamedTuple):
    """Raw bytes of one document; `where` is FILE or FILE:LINE for messages."""

    where: str
    raw: bytes
    is_json: bool


def expand_paths(inputs: Sequence[str]) -> list[str]:
    """The files that the inputs name, each folder and glob in sorted order; `-` stays.

    Addresses and data sets: `dataset_files.py`.
    """
    files: list[str] = []
    for name in inputs:
        if name == "-" or os.path.isfile(name):
            found = [name]
        elif (of_dataset := dataset_files(name)) is not None:
            found = of_dataset
        elif os.path.isdir(name):
            found = _files_in(Path(name))
        else:
            found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
        if not found:
            raise UserError(f"{name}: no such file, or no file in it; check the input path")
        files += found
    return files


def _files_in(folder: Path) -> list[str]:
    """The files in a folder and those below it, in sorted order, without hidden ones."""
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            found.append(str(path))
    return found


def is_json_lines(path: str | os.PathLike) -> bool:
    """Whether a file holds JSON lines, by its name without the endings of compressions."""
    return _endings(path)[0].endswith(JSON_LINES)


def _endings(path: str | os.PathLike) -> tuple[str, list[str]]:
    """(A name in lower case without the endings of compressions, those, the outermost first)."""
    name, found = os.fspath(path).lower(), []
    while name.endswith(COMPRESSED):
        name, ending = os.path.splitext(name)
        found.append(ending)
    return name, found


def read_documents(
    files: Iterable[str], all_lines: bool = False, text_key: str | None = None
) -> Iterator[Document]:
    """Yield every document of the files, in order; with `all_lines` each file is JSON lines.

    Standard input is JSON lines if it starts with a brace. text_key: the column of tables. Objects
    of stores are copied to a temporary folder, one at a time. Raises `UserError` on an unreadable
    file.
    """
    for path in files:
        with local_copy(path) as copy:
            yield from documents_of_copy(path, copy, all_lines, text_key)


def documents_of_copy(
    path: str, copy: str, all_lines: bool = False, text_key: str | None = None
) -> Iterator[Document]:
    """`read_documents` of the file `copy`, which messages call `path`."""
    if not all_lines and path.lower().endswith(TABLE_ENDINGS):
        rows = table_texts(path, copy, text_key)
        yield from (Document(where, text.encode(), False) for where, text in rows)
    else:
        yield from _documents_of(path, copy, all_lines)


def _documents_of(path: str, copy: str, all_lines: bool) -> Iterator[Document]:
    """Yield the documents of the file `copy`, which messages call `path`."""
    wrong = f"{path}: cannot be read: {{reason}}"
    with or_user_error(wrong, READ_ERRORS), _open(copy) as f:
        chunks: Iterable[bytes] = f
        is_lines = all_lines or is_json_lines(path)
        if path == "-" and not all_lines:
            first = [b""]
            while not _unmarked(first[-1]).strip() and (chunk := f.readline()):
                first.append(chunk)
            chunks = itertools.chain(first, f)
            is_lines = _unmarked(first[-1]).lstrip().startswith(b"{")
        if is_lines:
            yield from _lines(path, chunks)
        else:
            yield Document(path, b"".join(chunks) if path == "-" else f.read(), False)


def _lines(path: str, chunks: Iterable[bytes]) -> Iterator[Document]:
    """The lines that are not blank. Lines of bytes end in LF, CR or both, and nowhere else."""
    lines = itertools.chain.from_iterable(chunk.splitlines() for chunk in chunks if chunk)
    for number, line in enumerate(lines, 1):
        line = _unmarked(line)  # each line: files are joined end to end
        if line.strip():
            yield Document(f"{path}:{number}", line, True)


def _unmarked(raw: bytes) -> bytes:
    return raw.removeprefix(BYTE_ORDER_MARK)


def json_rows(files: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """Yield (FILE:LINE, its object, empty for what is none) of files of JSON lines.

    Raises `UserError` naming the first line that is no JSON or no Unicode.
    """
    for document in read_documents(files, all_lines=True):
        yield document.where, json_row(document)


def json_row(document: Document) -> dict:
    """The object of a line, empty for what is none. Raises `UserError` for no JSON, no Unicode."""
    row = _parsed_document(document)
    if b"\\u" in document.raw:
        require_unicode(document.where, json.dumps(row, ensure_ascii=False))
    return row if isinstance(row, dict) else {}


def read_text(path: str | os.PathLike) -> str:
    """The text of a file, whose line ends stay as they are. Raises `UserError`."""
    name = os.fspath(path)
    with or_user_error(f"{name}: cannot be read: {{reason}}", READ_ERRORS), _open(name) as f:
        return document_text(Document(name, f.read(), False), "")


def document_text(document: Document, json_key: str | None) -> str:
    """The text of a document; `UserError` names file and line where there is none."""
    if not document.is_json:
        return _decoded(document).removeprefix(MARK)
    row = _parsed_document(document)
    key = json_key or "text"
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f"{document.where}: no text under {key!r}: set --json-key, or data.text_key"
        )
    require_unicode(document.where, text)
    return text


def _decoded(document: Document) -> str:
    wrong = f"{document.where}: not UTF-8 text"
    if document.raw.startswith(UTF_16):
        raise UserError(f"{wrong} but UTF-16: convert it, as with iconv -f UTF-16 -t UTF-8")
    try:
        return document.raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{wrong} ({e.reason}): convert or remove") from e


def _parsed_document(document: Document) -> object:
    with or_user_error(f"{document.where}: not a JSON line: {{reason}}", ValueError):
        return parse_json(_decoded(document))


def require_unicode(where: str, text: str) -> None:
    """Raise `UserError` for lone surrogates, which JSON can escape and tokenizers choke on."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{where}: not Unicode text ({e.reason}): mend or remove") from e


def _open(path: str) -> io.BufferedReader:
    """The bytes of a file, decompressed as its name says, and as often as its first bytes do."""
    if path == "-":
        file = open(sys.stdin.fileno(), "rb", closefd=False)
    else:
        file = open(path, "rb")
    for ending in _endings(path)[1]:
        if file.peek(1):  # a file of no bytes is empty under any name
            file = _decompressed(path, file, ending)
    while ending := _compression(file):
        file = _decompressed(path, file, ending)
    return file


def _compression(file: io.BufferedReader) -> str | None:
    """The ending that a file's first bytes call for."""
    first = file.peek(16)
    known = zip(COMPRESSED, FIRST_BYTES, strict=True)
    return next((ending for ending, begin in known if first.startswith(begin)), None)


def _decompressed(path: str, file: io.BufferedReader, ending: str) -> io.BufferedReader:
    if ending == ".zst":
        if zstandard is None:
            raise UserError(f"{path}: needs `pip install zstandard`")
        return io.BufferedReader(_ZstdReader(file))
    opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[ending]
    return io.BufferedReader(opener(file, "rb"))


class _ZstdReader(io.RawIOBase):
    """Frames of a .zst file end to end. The library's own reader takes a cut-off file for a whole
    one; this one raises EOFError."""

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self._frame = None  # the frame being decompressed
        self._input = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:
        while not self._ready:
            self._input = self._input or self._file.read(READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready, self._input = self._frame.decompress(self._input), b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        n = min(len(target), len(self._ready))
        target[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()
