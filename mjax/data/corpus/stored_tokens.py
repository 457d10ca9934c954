"""A corpus in an object store: its index is copied once, its tokens are read by ranges.

Invariant: all ranges are of one version of the object; it is looked at every few seconds.
"""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from mjax.data.base.object_store import (
    fetch,
    read_range,
    require_unchanged,
    store_cache,
    stored_object,
)

REQUESTS_AT_ONCE = 16
LOOK_AGAIN = 10.0  # seconds
NEAR = 1 << 16  # bytes between two pieces that one request reads


class StoredTokens:
    """The `.bin` of a corpus at an address. Raises `UserError` where it is not there."""

    def __init__(self, address: str):
        self.object = stored_object(address)
        self._looked_at = time.monotonic()
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE)

    def read(self, begin: np.ndarray, size: np.ndarray) -> bytes:
        """Bytes [begin, begin + size) of each of many pieces, end to end."""
        if time.monotonic() - self._looked_at > LOOK_AGAIN:
            require_unchanged(self.object)
            self._looked_at = time.monotonic()
        spans, of_piece = _spans_of(begin, size)
        read = partial(read_range, self.object)
        contents = list(self._pool.map(read, *zip(*spans, strict=True)))
        parts = []
        for start, count, span in zip(begin.tolist(), size.tolist(), of_piece, strict=True):
            at = start - spans[span][0]
            parts.append(contents[span][at : at + count])
        return b"".join(parts)


def _spans_of(begin: np.ndarray, size: np.ndarray) -> tuple[list[tuple[int, int]], list[int]]:
    """((first byte, count) of requests, the request of each piece): near pieces share one."""
    firsts, ends = [], []
    of_piece = [0] * len(begin)
    stop = begin + size
    for piece in np.argsort(begin, kind="stable").tolist():
        start, end = int(begin[piece]), int(stop[piece])
        if not ends or start > ends[-1] + NEAR:
            firsts.append(start)
            ends.append(end)
        ends[-1] = max(ends[-1], end)
        of_piece[piece] = len(ends) - 1
    spans = zip(firsts, ends, strict=True)
    return [(first, end - first) for first, end in spans], of_piece


def copied_index(address: str) -> Path:
    """The `.idx` at an address as a file in the cache, named by the version that was copied."""
    found = stored_object(address)
    name = hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()
    path = store_cache() / "indices" / f"{name}.idx"
    return path if path.is_file() else fetch(found, path)
