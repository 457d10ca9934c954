"""`data.stream`: rows of a text that is tokenized while it is trained on.

The text is read in windows of about 4 MiB: the files in an order drawn for each epoch, each from
its start to its end, the documents of a window shuffled. Their tokens, each document's EOD last,
are one endless stream, and row k is its tokens [k*S, (k+1)*S], so that a document goes on in the
next row, window and file. Invariant: row k is a pure function of (files, tokenizer, split, S, seed,
k). A position, which a checkpoint records, only says from which window on to read. Documents are
held out by a hash of their text, so copies are on one side.
"""

import hashlib
import itertools
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from mjax.config.languages.paths import is_address
from mjax.config.schema.run import DataConfig
from mjax.data.base.documents import document_text, documents_of_copy, expand_paths
from mjax.data.base.object_store import fetch, stored_object
from mjax.data.base.tokenizer import encode_documents, load_tokenizer
from mjax.data.corpus.gpt import SPLITS, FieldArrays
from mjax.data.corpus.text import states_of_files
from mjax.errors import UserError

WINDOW_BYTES = 1 << 22  # of text; a part of the order, as all is that follows from it
ROWS_HELD = 1024  # rows that were read lately, for threads that ask out of order
ROWS_APART = 256  # between the positions that are remembered
POSITIONS_HELD = 4096

Prepared = TypeVar("Prepared")


class Position(NamedTuple):
    """The place where a row begins: a token of a window of a file, in the order of an epoch."""

    epoch: int = 0
    file: int = 0
    window: int = 0
    token: int = 0


class Window(NamedTuple):
    """Tokens int32, and whether each begins a document, from `position` on."""

    position: Position
    tokens: np.ndarray
    begins: np.ndarray


class Copy:
    """A file that is there until `remove`, or until nothing refers to this."""

    def __init__(self, path: Path):
        self.path = str(path)
        self.remove = weakref.finalize(self, path.unlink, missing_ok=True)


class StreamedText:
    """Rows of the text of a split, as many as are asked for; the interface of `Dataset`.

    Rows that are asked for in order are read once. Going back reads again from the last position
    that is known. Objects are copied to a temporary folder (TMPDIR), two at most, but for a moment
    after going back. rows_held: rows that are kept, for evaluations that ask for the same ones.
    """

    padded = False

    def __init__(self, data: DataConfig, split: str, seed: int, rows_held: int = ROWS_HELD):
        self.rows_held = rows_held
        self.text, self.key, self.seed = data.text, data.text_key, seed
        self.files = expand_paths([data.text])
        states = repr(states_of_files(self.files))
        self.digest = hashlib.blake2b(states.encode(), digest_size=16).hexdigest()
        self.tokenizer = load_tokenizer(data.tokenizer)
        self._folder = tempfile.TemporaryDirectory(prefix="mjax-stream-")
        self._numbers = itertools.count()  # of the copies in it
        self.seq_length, self.document_mask = data.seq_length, data.document_mask
        self.resets, self.masks_eod = data.reset_position_ids, data.eod_mask_loss
        self.eod = self.tokenizer.eod_id if data.eod_token_id is None else data.eod_token_id
        ends = np.cumsum(data.split) / np.sum(data.split)
        number = SPLITS.index(split)
        self.share = (0.0 if number == 0 else ends[number - 1]), ends[number]
        self.max_documents = 1 if not data.document_mask else data.seq_length
        self._lock = threading.Lock()
        self._positions: OrderedDict[int, Position] = OrderedDict({0: Position()})
        self._rows: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._next, self._iterator = 0, None

    def __len__(self) -> int:
        return np.iinfo(np.int64).max

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The stream and the numbers of rows in it."""
        return [f"{self.text} (row {i} of the stream)" for i in indices]

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Rows `indices`: the fields of `GPTDataset.batch`, each [B, S]."""
        with self._lock:
            rows = [self._row(int(i)) for i in indices]
        text = np.stack([tokens for tokens, _ in rows])
        begins = np.stack([begins for _, begins in rows])[:, :-1]
        begins[:, 0] = True
        tokens, column = text[:, :-1], np.arange(self.seq_length, dtype=np.int32)
        starts = np.maximum.accumulate(np.where(begins, column, 0), axis=1).astype(np.int32)
        segments = np.cumsum(begins, axis=1, dtype=np.int32)
        loss_mask = np.ones(tokens.shape, np.float32)
        if self.masks_eod:
            loss_mask[tokens == self.eod] = 0.0
        return {
            "tokens": tokens,
            "labels": text[:, 1:],
            "loss_mask": loss_mask,
            "segment_ids": segments if self.document_mask else np.ones_like(segments),
            "positions": column - starts if self.resets else np.tile(column, (len(rows), 1)),
        }

    def record_of(self, row: int) -> dict:
        """Returns what a checkpoint keeps, the last known position at or before a row, as JSON."""
        with self._lock:
            known = max(number for number in self._positions if number <= row)
            return {"row": known, "position": list(self._positions[known]), "files": self.digest}

    def go_on(self, record: dict) -> None:
        """Know the position in a record. Raises `UserError` where it is of other files."""
        if record["files"] != self.digest:
            raise UserError(
                f"data.text {self.text}: its files are not those that the run has read so far; put "
                "them back (name a commit of the hub by @COMMIT), or set another run.dir"
            )
        with self._lock:
            self._positions[record["row"]] = Position(*record["position"])

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, whether each begins a document) of a row, each [S + 1]."""
        if number in self._rows:
            return self._rows[number]
        known = max(row for row in self._positions if row <= number)
        if self._iterator is None or number < self._next or known > self._next:
            self._close()
            self._next, self._iterator = known, self._read(self._positions[known])
        while self._next <= number:
            try:
                position, tokens, begins = next(self._iterator)
            except BaseException:
                self._iterator = None  # what raised has ended
                raise
            if self._next % ROWS_APART == 0:
                _keep_newest(self._positions, self._next, position, POSITIONS_HELD)
                self._positions[0] = Position()
            _keep_newest(self._rows, self._next, (tokens, begins), self.rows_held)
            self._next += 1
        return self._rows[number]

    def _close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()

    def _read(self, start: Position) -> Iterator[Window]:
        """Yield the rows from a position on, each with S + 1 tokens and its position."""
        windows, held = _one_ahead(self._windows(start)), []
        s = self.seq_length
        while True:
            while sum(len(window.tokens) for window in held) <= s:
                held.append(next(windows))  # the one after it is tokenized meanwhile
            tokens = np.concatenate([window.tokens[: s + 1] for window in held])[: s + 1]
            begins = np.concatenate([window.begins[: s + 1] for window in held])[: s + 1]
            yield Window(held[0].position, tokens, begins)
            held = _without_first(held, s)

    def _windows(self, start: Position) -> Iterator[Window]:
        """Yield the windows from a position on, epoch after epoch, without those that are empty."""
        found, end = False, self.tokenizer.eod_id
        for position, texts in self._texts(start):
            ids, lengths, _ = encode_documents(self.tokenizer, [[text] for text in texts], end)
            begins = np.zeros(len(ids), bool)
            begins[np.cumsum(lengths) - lengths] = True
            found |= len(ids) > 0
            if position.epoch > start.epoch + 1 and not found:
                raise UserError(f"data.text {self.text}: no text in the split of data.split")
            window = Window(position, ids, begins)
            token = start.token if position == start._replace(token=0) else 0
            yield from _without_first([window], token)

    def _texts(self, start: Position) -> Iterator[tuple[Position, list[str]]]:
        """Yield windows of documents with their positions, in the order that an epoch draws."""
        for epoch in itertools.count(start.epoch):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.files))
            names = [self.files[i] for i in order]
            first = start.file if epoch == start.epoch else 0
            for file, copy in enumerate(_one_ahead(map(self._copy, names[first:])), first):
                is_first = (epoch, file) == (start.epoch, start.file)
                skipped = start.window if is_first else 0
                try:
                    for window, texts in enumerate(self._documents(names[file], copy)):
                        if window < skipped:
                            continue
                        rng = np.random.default_rng([self.seed, epoch, file, window])
                        order = rng.permutation(len(texts))
                        yield Position(epoch, file, window), [texts[i] for i in order]
                finally:
                    if copy:
                        copy.remove()

    def _documents(self, name: str, copy: Copy | None) -> Iterator[list[str]]:
        """Yield the texts of a file in windows. A window's bytes count all splits."""
        texts, size = [], 0
        for document in documents_of_copy(name, copy.path if copy else name, text_key=self.key):
            text = document_text(document, self.key)
            size += len(document.raw)
            if self._is_of_split(text):
                texts.append(text)
            if size >= WINDOW_BYTES:
                yield texts
                texts, size = [], 0
        yield texts

    def _is_of_split(self, text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        low, high = self.share
        return low <= int.from_bytes(digest) / 2**64 < high

    def _copy(self, name: str) -> Copy | None:
        """The object at an address as a file on disk; None for a file."""
        if not is_address(name):
            return None
        path = Path(self._folder.name) / f"{next(self._numbers)}-{Path(name).name}"
        return Copy(fetch(stored_object(name), path))


def _one_ahead(items: Iterator[Prepared]) -> Iterator[Prepared]:
    """Yield the items, each prepared by a thread while the one before it is used.

    The end does not wait for the thread: the garbage collector may end a generator anywhere, also
    where `threading` holds its lock, which Python 3.12 would then take twice and hang.
    """
    pool, end = ThreadPoolExecutor(1), object()
    try:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _keep_newest(entries: OrderedDict, key: int, value: object, most: int) -> None:
    """Add an entry as the newest of at most so many."""
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > most:
        entries.popitem(last=False)


def _without_first(windows: list[Window], count: int) -> list[Window]:
    """The windows without their first `count` tokens; none is empty."""
    left = []
    for position, tokens, begins in windows:
        taken = min(count, len(tokens))
        count -= taken
        if taken < len(tokens):
            moved = position._replace(token=position.token + taken)
            left.append(Window(moved, tokens[taken:], begins[taken:]))
    return left
