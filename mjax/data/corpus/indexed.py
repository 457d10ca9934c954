"""Megatron's indexed token files: `PREFIX.bin` holds raw tokens, `PREFIX.idx` the bounds in them.

Layout of `.idx`, little endian: magic, u64 version 1, u8 dtype code, u64 number of sequences, u64
number of document bounds, i32 lengths (tokens), i64 offsets (bytes), i64 document bounds (sequence
numbers; first 0, last the number of sequences), optionally an i8 mode per sequence.

Invariant: a reader that opened has seen the two files agree to the byte, and a writer leaves either
a complete pair or nothing. Source: Megatron-LM `indexed_dataset.py`.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from mjax.config.languages.paths import is_address
from mjax.data.base.object_store import address_of, require_unchanged
from mjax.data.corpus.stored_tokens import StoredTokens, copied_index
from mjax.errors import UserError, or_user_error

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
TOKEN_DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
REBUILD = "rebuild the pair with `python -m mjax.data.preprocess` or copy both files again"


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's choice of token width: uint16 below 65500 ids, else int32."""
    return TOKEN_DTYPES[8] if vocab_size < 65500 else TOKEN_DTYPES[4]


class Watch:
    """Files that must stay as they are now, by their sizes and times of change."""

    def __init__(self, paths: Sequence[Path]):
        self._known = {path: _look(path) for path in paths}

    def check(self) -> None:
        """Raise `UserError` naming the first file that is not what it was."""
        for path, known in self._known.items():
            now = _look(path)
            if now != known:
                raise UserError(
                    f"{path}: changed while it was in use, from {known[0]} bytes to {now[0]}; put "
                    "the file back as it was and start again"
                )

    @contextmanager
    def holds(self) -> Iterator[None]:
        """Check before a read, and again where it fails: a change meanwhile is then the cause."""
        self.check()
        try:
            yield
        except (UserError, OSError, IndexError, ValueError):
            self.check()
            raise


class IndexedDataset:
    """Read-only view of `PREFIX.bin` and `PREFIX.idx`; `[i]` is sequence i, a view of the file.

    `lengths` int32 [n] in tokens, `offsets` int64 [n] in tokens, `document_indices` int64,
    `tokens` the whole of `.bin`, `dtype` its element type. Opening costs one pass over `.idx`.
    A prefix in an object store has no `tokens`: samples are read by ranges (`stored_tokens.py`).
    Raises `UserError` where a file is missing, foreign, truncated or at odds with its partner.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = str(prefix)
        self.stored = None
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        if is_address(prefix):
            self.stored = StoredTokens(address_of(f"{prefix}.bin"))
            self.idx_path = copied_index(address_of(f"{prefix}.idx"))
            self._read_index()
            return
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise UserError(f"{path}: no such file; a data prefix names PREFIX.bin and .idx")
        self._watch = Watch([self.bin_path])
        try:
            self._read_index()
            _ = self.tokens
        except OSError as e:
            raise UserError(f"{e.filename or self.idx_path}: cannot be read: {e.strerror}") from e

    def _read_index(self) -> None:
        raw = _memmap(self.idx_path, np.dtype("u1"))
        if len(raw) < HEADER.size or raw[:9].tobytes() != MAGIC:
            raise UserError(f"{self.idx_path}: not a Megatron index (wrong magic); {REBUILD}")
        _, version, code, n, bounds = HEADER.unpack(raw[: HEADER.size].tobytes())
        if version != 1 or code not in TOKEN_DTYPES:
            what = f"version {version}" if version != 1 else f"dtype code {code}"
            raise UserError(f"{self.idx_path}: unknown {what}; {REBUILD}")
        size = HEADER.size + 12 * n + 8 * bounds
        if len(raw) not in (size, size + n):
            raise UserError(
                f"{self.idx_path}: {len(raw)} bytes, but its header ({n} sequences, {bounds} "
                f"document bounds) needs {size}; {REBUILD}"
            )
        self.dtype = TOKEN_DTYPES[code]
        at = HEADER.size + 4 * n
        self.lengths = raw[HEADER.size : at].view("<i4").copy()  # aligned, hence faster
        pointers = raw[at : at + 8 * n].view("<i8")
        self.document_indices = raw[at + 8 * n : size].view("<i8")
        self._check(pointers)
        self.offsets = pointers // self.dtype.itemsize

    def _check(self, pointers: np.ndarray) -> None:
        """Writers lay sequences end to end; anything else means that the files disagree."""
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        held = int(ends[-1]) if len(ends) else 0
        if len(ends) and (
            self.lengths.min() < 0
            or pointers[0] != 0
            or not np.array_equal(pointers[1:], ends[:-1])
        ):
            raise UserError(f"{self.idx_path}: lengths and offsets disagree; {REBUILD}")
        d = self.document_indices
        if len(d) == 0 or d[0] != 0 or d[-1] != len(self) or (np.diff(d) < 0).any():
            raise UserError(f"{self.idx_path}: document bounds are not a partition; {REBUILD}")
        size = self.stored.object.size if self.stored else self.bin_path.stat().st_size
        if size != held:
            what = "truncated" if size < held else "longer than its index"
            raise UserError(
                f"{self.bin_path}: {what}: {size} bytes where {self.idx_path.name} says {held}; "
                f"{REBUILD}"
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        if self.stored is not None:
            raise UserError(f"{self.prefix}: only samples are read from a store; copy it to a disk")
        return _memmap(self.bin_path, self.dtype)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def require_ids(self, ids: np.ndarray, vocab_size: int) -> None:
        """Raise `UserError` for ids outside the vocabulary; free where the dtype holds none."""
        info = np.iinfo(self.dtype)
        over = info.max >= vocab_size and ids.max(initial=0) >= vocab_size
        if over or (info.min < 0 and ids.min(initial=0) < 0):
            if self.stored is None:
                self._watch.check()
            else:
                require_unchanged(self.stored.object)
            bad = int(ids.max() if over else ids.min())
            raise UserError(
                f"{self.bin_path}: holds token id {bad}, outside the vocabulary of {vocab_size}: "
                "set model.vocab_size to the tokenizer's, or check the data"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        start = int(self.offsets[i])
        return self.tokens[start : start + int(self.lengths[i])]

    def gather(self, begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Tokens [begin, begin + size) of `.bin` for each of many pieces, end to end.

        They are read, not mapped: a file that is cut or fails while a run reads it is a
        `UserError` here, but a signal that kills the process where it is mapped.
        """
        width = self.dtype.itemsize
        if self.stored is not None:
            return np.frombuffer(self.stored.read(begin * width, size * width), self.dtype)
        tokens = np.empty(size.sum(), self.dtype)
        raw, at = memoryview(tokens.view(np.uint8)), 0
        wrong = f"{self.bin_path}: cannot be read: {{reason}}; mend the disk or copy the file"
        with self._watch.holds(), or_user_error(wrong):
            pieces = zip((begin * width).tolist(), (size * width).tolist(), strict=True)
            with open(self.bin_path, "rb", buffering=0) as file:
                for start, count in pieces:
                    if os.preadv(file.fileno(), [raw[at : at + count]], start) != count:
                        raise UserError(f"{self.bin_path}: ends too early; {REBUILD}")
                    at += count
        return tokens


class IndexedDatasetWriter:
    """Writes a pair that Megatron reads too. Use as a context manager.

    Both files get temporary names until `close`; an exception inside the `with` removes them, so
    that a prefix never names half a corpus.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type | str = np.int32):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        codes = [c for c, d in TOKEN_DTYPES.items() if d == self.dtype]
        if not codes:
            raise UserError(f"{prefix}: dtype {self.dtype} is not one of Megatron's token dtypes")
        if not Path(prefix).name:
            raise UserError(
                f"{str(prefix)!r} names no files to write; give a prefix, as data/corpus"
            )
        self._code = codes[0]
        self._lengths: list[np.ndarray] = []
        self._bounds: list[np.ndarray] = [np.zeros(1, np.int64)]
        self._sequences = 0
        self._temporary = {s: f"{prefix}{s}.{os.getpid()}.tmp" for s in (".bin", ".idx")}
        with or_user_error(f"{prefix}.bin: cannot be written: {{reason}}"):
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._temporary[".bin"], "wb")

    def add_item(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one sequence to the document in progress."""
        data = self._cast(tokens)
        self._append(data, np.array([len(data)], np.int32))

    def end_document(self) -> None:
        """Close the document in progress."""
        self._bounds.append(np.array([self._sequences], np.int64))

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document of one sequence."""
        self.add_item(tokens)
        self.end_document()

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray | None = None
    ) -> None:
        """Append many documents: the tokens of their sequences end to end, and the lengths.

        `counts` are the sequences of each document; None: one.
        """
        if counts is None:
            counts = np.ones(len(lengths), np.int64)
        assert len(tokens) == lengths.sum(), (len(tokens), lengths.sum())
        assert len(lengths) == counts.sum(), (len(lengths), counts.sum())
        ends = self._sequences + np.cumsum(counts, dtype=np.int64)
        self._append(self._cast(tokens), lengths.astype(np.int32))
        self._bounds.append(ends)

    def close(self) -> None:
        """Write the index and give both files their names."""
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        bounds = np.concatenate(self._bounds)
        try:
            self._publish((lengths, pointers, bounds))
        except OSError as e:
            self._discard()
            raise UserError(f"{self.prefix}: cannot be written: {e.strerror or e}") from e

    def _publish(self, arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        self._bin.close()
        lengths, _, bounds = arrays
        with open(self._temporary[".idx"], "wb") as f:
            f.write(HEADER.pack(MAGIC, 1, self._code, len(lengths), len(bounds)))
            for array in arrays:
                f.write(array.tobytes())
        # A crash between the renames must not pair an old index with new tokens.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self._temporary[suffix], self.prefix + suffix)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _discard(self) -> None:
        self._bin.close()
        for path in self._temporary.values():
            Path(path).unlink(missing_ok=True)

    def _append(self, data: np.ndarray, lengths: np.ndarray) -> None:
        with or_user_error(f"{self.prefix}.bin: cannot be written: {{reason}}"):
            data.tofile(self._bin)
        self._lengths.append(lengths)
        self._sequences += len(lengths)

    def _cast(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """To the file's dtype; an id that does not fit is an error, never a wrap-around."""
        data = np.asarray(tokens)
        if data.dtype == self.dtype or data.size == 0:
            return data.astype(self.dtype)
        if self.dtype.kind in "iu":
            info = np.iinfo(self.dtype)
            if data.dtype.kind not in "iu" or data.min() < info.min or data.max() > info.max:
                raise UserError(
                    f"{self.prefix}: token ids {data.min()}..{data.max()} do not fit {self.dtype}"
                )
        return data.astype(self.dtype)


def _look(path: Path) -> tuple[int, int]:
    with or_user_error(f"{path}: cannot be read: {{reason}}; put the file back"):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _memmap(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as a plain read-only array (numpy cannot map an empty file)."""
    if path.stat().st_size < dtype.itemsize:
        return np.zeros(0, dtype)
    count = path.stat().st_size // dtype.itemsize
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
