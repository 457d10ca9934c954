"""Rows in which the documents of a group hold the prompt that they begin with once.

The context is the prompt without its last token. It lies first, then a block for each document,
which begins with a copy of that token, at its position. So each place of a row has one label, and
its logits are those of the document by itself. For a prompt of P tokens and G answers of R, whose
last tokens are labels alone, a group takes P - 1 + G R places, not G (P - 1 + R).

Segments of documents are numbered as in rows that share nothing: from 1 on, in their order.
Contexts come after them, with odd numbers. Invariant: the blocks of a group follow its context at
once, which layers with a state build on.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class PlacedBlock(NamedTuple):
    """A run of places of a row that hold tokens of one document, or of a context.

    group: the number of the group in the row.
    order: that of the document in the group; None: it is the context of all of them.
    first: the number of its first token in the document.
    begin, count: its places in the row.
    segment: its number in the row.
    prefix: the segment of the context whose keys its tokens may read, too; 0: none.
    """

    group: int
    order: int | None
    first: int
    begin: int
    count: int
    segment: int
    prefix: int

    @property
    def places(self) -> slice:
        return slice(self.begin, self.begin + self.count)

    def fill(self, fields: dict[str, np.ndarray]) -> None:
        """Set what a row's int32 fields [S] say about the places of its tokens."""
        fields["segment_ids"][self.places] = self.segment
        fields["positions"][self.places] = self.first + np.arange(self.count)
        if "prefix_ids" in fields:
            fields["prefix_ids"][self.places] = self.prefix


def placed_blocks(
    lengths: Sequence[Sequence[int]], contexts: Sequence[int]
) -> Iterator[PlacedBlock]:
    """Yield the blocks of a row.

    lengths: the tokens of the documents of each group.
    contexts: the tokens of the context of each group, fewer than any of them; 0: it shares none.
    """
    begin, segment = 0, 1
    of_context = (sum(map(len, lengths)) + 1) // 2 * 2 + 1
    for group, (counts, context) in enumerate(zip(lengths, contexts, strict=True)):
        prefix = 0
        if context:
            prefix, of_context = of_context, of_context + 2
            yield PlacedBlock(group, None, 0, begin, context, prefix, 0)
            begin += context
        for order, count in enumerate(counts):
            rest = int(count - context)
            yield PlacedBlock(group, order, context, begin, rest, segment, prefix)
            begin, segment = begin + rest, segment + 1


def context_length(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """The tokens of the context of documents, (ids, which of them are answers) each.

    It ends before the last token that all begin with, and that no answer begins before.
    """
    if len(documents) < 2:
        return 0
    first, *others = (ids for ids, _ in documents)
    prompt = min(int(np.argmax(is_answer)) for _, is_answer in documents)
    for ids in others:
        size = min(len(ids), len(first), prompt)
        unlike = np.flatnonzero(ids[:size] != first[:size])
        prompt = int(unlike[0]) if len(unlike) else size
    return max(prompt - 1, 0)
