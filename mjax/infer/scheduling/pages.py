"""Pages of a paged cache by number: free ones, cached ones, and references to those in use.

A page holds the cache entries of `page` consecutive tokens. Sequences with an equal beginning share
its full pages: a page has the hash of its tokens and of all before them, as in vLLM's prefix cache
(arXiv 2309.06180). Nothing here touches the device: its programs run in order, so a page can be
given to its next owner as soon as the host releases it.

Invariants: `free + cached + used == pages - 1`. Page 0 is the null page: it is never given out, and
padding writes there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from mjax.errors import UserError

NULL_PAGE = 0


def chain(
    tokens: Sequence[int], page: int, salt: tuple = (), known: Sequence[bytes] = ()
) -> list[bytes]:
    """Returns the hash of each full page of a sequence.

    A hash is SHA-256 over the hash of the previous page and the page's tokens, so equal hashes mean
    equal tokens from the beginning on.

    - salt: what else the entries depend on (adapter, tenant, version of the weights), as tagged
      tuples of texts and numbers. It goes into the hash that precedes the first page.
    - known: hashes of the first pages, computed earlier.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else sha256(repr(salt).encode()).digest()
    full = len(tokens) // page * page
    ids = np.asarray(tokens[len(hashes) * page : full], np.int64)
    for block in ids.reshape(-1, page):
        parent = sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """Owner of all pages. A page is free, in use by one or more sequences, or cached.

    A cached page is used by nobody but has a hash, so a later sequence may revive it. Cached pages
    are evicted when free ones run out, those released first before the others.

    - page: tokens of a page.
    - cache_prefixes: False gives no page a hash, so none is shared.
    - snapshots: slots for states after cached pages, in a model whose layers have states: of its
      pages none is shared without the state after them. 0: it has no states.
    - generation: how often the weights have changed.
    """

    def __init__(
        self, pages: int, *, page: int = 64, cache_prefixes: bool = True, snapshots: int = 0
    ):
        if pages < 2:
            raise UserError(f"a cache of {pages} pages has no page for tokens: give it at least 2")
        self.pages, self.page, self.cache_prefixes = pages, page, cache_prefixes
        self.snapshots = snapshots
        self.generation = 0
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._references: dict[int, int] = {}  # sequences that use a page
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, oldest first
        self._hashes: dict[int, bytes] = {}  # of cached pages and of some in use
        self._homes: dict[bytes, int] = {}  # the inverse
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # slots, longest unused first

    @property
    def free(self) -> int:
        """Number of pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of pages that hold a prefix which no sequence uses."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Number of pages of sequences; shared ones count once."""
        return len(self._references)

    @property
    def available(self) -> int:
        """Number of pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._homes

    def take(self, count: int) -> list[int] | None:
        """Returns pages to write to, after evictions if need be; None if not so many are left."""
        if count > self.available:
            return None
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            del self._homes[self._hashes.pop(page)]
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def known(self, hashes: Sequence[bytes]) -> int:
        """Returns the number of pages of the longest known beginning."""
        unknown = (number for number, hash in enumerate(hashes) if hash not in self._homes)
        return next(unknown, len(hashes))

    def last_snapshot(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Returns (pages up to the last one that has a snapshot, its slot); (0, -1): none has."""
        for number in range(len(hashes), 0, -1):
            hash = hashes[number - 1]
            if hash in self._snapshots:
                self._snapshots.move_to_end(hash)
                return number, self._snapshots[hash]
        return 0, -1

    def take_snapshot(self, hash: bytes) -> int:
        """Returns the slot for the state after a page, perhaps that of another snapshot.

        The first to go is one whose page was evicted.
        """
        slot = self._snapshots.pop(hash, len(self._snapshots))
        if slot == self.snapshots:
            useless = (old for old in self._snapshots if old not in self._homes)
            slot = self._snapshots.pop(next(useless, next(iter(self._snapshots))))
        self._snapshots[hash] = slot
        return slot

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Takes references to the pages of the longest known beginning and returns them."""
        found = []
        for hash in hashes:
            page = self._homes.get(hash)
            if page is None:
                break
            found.append(page)
            self._references[page] = self._references.get(page, 0) + 1
            self._idle.pop(page, None)
        return found

    def publish(self, page: int, hash: bytes) -> None:
        """Lets later sequences share a full page in use, whose writer has been launched.

        Nothing changes if another page has this hash: both stay, and the first one is shared.
        """
        if self.cache_prefixes and hash not in self._homes:
            assert page in self._references and page not in self._hashes
            self._hashes[page], self._homes[hash] = hash, page

    def release(self, pages: Sequence[int]) -> None:
        """Gives back references of one sequence to its pages, in order; null pages are skipped.

        The last page is the first to be evicted, as it is of no use without those before it.
        """
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._hashes:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Drops all hashes, after the weights have changed. Pages in use stay in use."""
        self.generation += 1
        self._free += self._idle
        for by_key in (self._idle, self._hashes, self._homes, self._snapshots):
            by_key.clear()
