"""The replica that a request goes to: where its beginning is cached, unless that one is overloaded.

A router remembers which blocks of 64 tokens it has sent where; nothing is asked of replicas.
Invariant: the choice depends on earlier choices and the loads given, on nothing else.
"""

from collections import OrderedDict
from collections.abc import Sequence

from mjax.infer.scheduling.pages import chain

BLOCK_TOKENS = 64
_MOST_BLOCKS = 100_000  # blocks remembered of a replica
_SLACK, _FACTOR = 8, 1.5  # samples, and times the least load, that a cached prefix is worth


class PrefixRouter:
    """Chooses among `replicas` numbered replicas."""

    def __init__(self, replicas: int):
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]
        self._next = 0

    def choose(self, prompt: Sequence[int], loads: Sequence[float], salt: tuple = ()) -> int:
        """The replica for a prompt; `loads`: samples that each runs, infinite: it is gone.

        salt: what else a cached prefix depends on.
        """
        if len(loads) == 1:
            return 0
        hashes = chain(prompt, BLOCK_TOKENS, salt)
        least = min(loads)
        found = [self._matched(number, hashes) for number in range(len(loads))]
        allowed = [load <= _FACTOR * least + _SLACK for load in loads]
        best = max(range(len(loads)), key=lambda n: (found[n] if allowed[n] else -1, -loads[n]))
        if not found[best] or not allowed[best]:
            count = len(loads)  # equal ones in turn
            best = min(range(count), key=lambda n: (loads[n], (n - self._next) % count))
            self._next = (best + 1) % count
        self._remember(best, hashes)
        return best

    def _matched(self, replica: int, hashes: Sequence[bytes]) -> int:
        """The number of first blocks that a replica has."""
        known = self._known[replica]
        return next((n for n, hash in enumerate(hashes) if hash not in known), len(hashes))

    def _remember(self, replica: int, hashes: Sequence[bytes]) -> None:
        known = self._known[replica]
        for hash in reversed(hashes):  # the first block is the last to be forgotten
            known[hash] = None
            known.move_to_end(hash)
        while len(known) > _MOST_BLOCKS:
            known.popitem(last=False)
