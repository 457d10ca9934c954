"""Index of the sentences of each masked sample, in Megatron-LM's exact order.

A sample is a run of whole sentences of one document that reaches a target length: the longest, or
for a part of the samples a random shorter one. Samples follow each other through the documents,
epoch after epoch, and are then shuffled. Invariant: the index is a pure function of (lengths,
documents, sizes, number of samples, seed), the same array as that of Megatron's `build_mapping`
(`helpers.cpp`), which draws targets from std::mt19937 and swaps samples by std::mt19937_64.

The end of a sample depends on its own draw, and which draw that is on all samples before it. So a
loop searches once a sample. From the second epoch on, a table that is computed for all sentences at
once has the ends of samples of the longest target, and only shorter ones are searched for.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

LONG_SENTENCE = 512  # tokens; documents of several sentences with a longer one are left out
_DRAWS = 1 << 16  # made at a time


class Walk(NamedTuple):
    """The documents in use: of each the first sentence and the one behind its last.

    tokens: int64 [sentences + 1], those before each sentence of the corpus.
    target: of the longest samples, in tokens. least: sentences of a sample.
    """

    first: np.ndarray
    last: np.ndarray
    tokens: np.ndarray
    target: int
    least: int


def build_sample_index(
    bounds: np.ndarray,
    lengths: np.ndarray,
    num_samples: int | None,
    max_length: int,
    short_probability: float,
    seed: int,
    min_sentences: int,
) -> np.ndarray:
    """[n, 3]: for each sample its first sentence, the one behind its last, its target length.

    `bounds` int64 [D + 1] are those of the documents in use, in sentences, and `lengths` int32
    those of all sentences in tokens. Epochs are the fewest whole ones that give `num_samples`;
    None: one. A sample has at least `min_sentences`. Empty where no document can be used.
    """
    walk = _walk_of(bounds, lengths, max_length, min_sentences)
    kind = np.int64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    if len(walk.first) == 0:
        return np.zeros((0, 3), kind)
    blocks: list[np.ndarray] = []
    targets = _targets(max_length, short_probability, seed, blocks)
    starts = array("q")
    following = None
    while len(starts) < max(1, num_samples or 0):
        _walk_once(walk, targets, following, starts)
        if following is None and len(starts) < (num_samples or 0):
            following = memoryview(_following(walk))
    sample = np.empty((len(starts), 3), kind)
    order = swapped_order(len(starts), seed + 1)
    for column, values in enumerate(_samples(walk, np.concatenate(blocks), starts)):
        sample[:, column] = values[order]
    return sample


def _samples(
    walk: Walk, draws: np.ndarray, starts: array
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first sentence, the one behind the last, target) of all samples in the walk's order."""
    first = np.frombuffer(starts, np.int64)
    begins_document = np.zeros(len(walk.tokens), bool)
    begins_document[walk.first] = True
    begins = begins_document[first]
    document = np.cumsum(begins) - 1
    last = walk.last[document % len(walk.last)]
    within = np.flatnonzero(~begins[1:])  # samples that end where the next one begins
    last[within] = first[within + 1]
    draw = document + np.arange(len(first))  # one is lost behind each document
    return first, last, draws[draw]


def _walk_of(bounds: np.ndarray, lengths: np.ndarray, target: int, least: int) -> Walk:
    """The documents that have `least` sentences, none of several too long."""
    tokens = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.astype(np.int64), out=tokens[1:])
    too_long = np.flatnonzero(lengths > LONG_SENTENCE)
    long_before = np.searchsorted(too_long, bounds)
    counts = np.diff(bounds)
    has_long = np.diff(long_before) > 0
    is_used = (counts >= least) & ((counts <= 1) | ~has_long)
    first, last = bounds[:-1], bounds[1:]
    return Walk(first[is_used], last[is_used], tokens, target, least)


def _following(walk: Walk) -> np.ndarray:
    """For each sentence, the end of a sample of the longest target that begins with it."""
    count = len(walk.tokens) - 1
    end = np.full(count, -1)
    end[walk.first] = walk.last
    end = np.maximum.accumulate(end)
    reached = np.searchsorted(walk.tokens, walk.tokens[:-1] + walk.target)
    reached = np.maximum(reached, np.arange(walk.least, count + walk.least))
    return np.where(end - reached > 1, reached, end)


def _walk_once(
    walk: Walk, targets: Iterator[int], following: memoryview | None, starts: array
) -> None:
    """Append the first sentences of all samples of an epoch."""
    tokens, longest, least = memoryview(walk.tokens), walk.target, walk.least
    for sentence, end in zip(walk.first.tolist(), walk.last.tolist(), strict=True):
        for target in targets:  # the draw behind the last sample is made, and lost
            if sentence == end:
                break
            starts.append(sentence)
            if target == longest and following is not None:
                sentence = following[sentence]
            else:
                reached = tokens[sentence] + target
                behind = bisect_left(tokens, reached, sentence + 1, end)
                if behind < sentence + least:
                    behind = sentence + least
                sentence = behind if end - behind > 1 else end


def _targets(
    longest: int, short_probability: float, seed: int, blocks: list[np.ndarray]
) -> Iterator[int]:
    """The target of each draw, in order, without end; `blocks` gets them as they are made."""
    ratio = int(1 / short_probability + 0.5) if short_probability else 0
    rng = np.random.RandomState(seed)

    def block() -> np.ndarray:
        if not ratio:
            return np.full(_DRAWS, longest)
        draws = rng.randint(0, 1 << 32, _DRAWS, np.uint32).astype(np.int64)
        return np.where(draws % ratio == 0, 2 + draws % (longest - 1), longest)

    def made() -> Iterator[list[int]]:
        while True:
            blocks.append(block())
            yield blocks[-1].tolist()

    return chain.from_iterable(made())


# ---- the shuffle ---------------------------------------------------------------------------------


def swapped_order(count: int, seed: int) -> np.ndarray:
    """The order that swapping entry i with j = draw % (i + 1) gives, for i = count - 1 .. 1.

    The swaps need no loop. Entry i is final after its own swap; then it has the entry that was at
    j. A place p has the entry p, unless an earlier swap, of the smallest i' > i with j = p, brought
    the entry of i'. So each place points to another one, and pointers are followed to their ends,
    twice as far each time.
    """
    if count < 2:
        return np.arange(count)
    kind = np.int32 if count < 2**31 else np.int64
    places = np.arange(count, dtype=kind)
    partner = np.zeros(count, kind)
    draws = twister64(seed, count - 1)[::-1]
    partner[1:] = draws % np.arange(2, count + 1, dtype=np.uint64)
    order = _stable_order(partner)  # swaps by partner, then by i
    sorted_partner = partner[order]
    same = sorted_partner[1:] == sorted_partner[:-1]
    later = np.full(count, -1, kind)  # the next larger i with the same partner
    later[order[:-1][same]] = order[1:][same]
    first = np.full(count, -1, kind)  # the smallest i whose partner is this place
    firsts = np.concatenate([[True], ~same])
    first[sorted_partner[firsts]] = order[firsts]
    brought = np.where(first == places, later, first)  # by itself an entry brings nothing
    held = np.where(brought < 0, places, brought)
    moving = np.flatnonzero(held != places)
    while len(moving):
        further = held[held[moving]]
        moving, further = moving[further != held[moving]], further[further != held[moving]]
        held[moving] = further
    return np.where(later < 0, partner, held[later])


def _stable_order(keys: np.ndarray) -> np.ndarray:
    """`np.argsort(keys, kind="stable")` of keys below 2^32, by two radix sorts of 16 bits each."""
    if len(keys) >= 2**31:
        return np.argsort(keys, kind="stable")
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable").astype(np.int32)
    high = (keys >> 16).astype(np.uint16)[order]
    return order[np.argsort(high, kind="stable")]


def twister64(seed: int, count: int) -> np.ndarray:
    """The first `count` draws of std::mt19937_64, uint64. Source: Nishimura and Matsumoto, 2004."""
    size, half = 312, 156
    words = [seed % 2**64]
    for i in range(1, size):
        before = words[-1]
        words.append((6364136223846793005 * (before ^ before >> 62) + i) % 2**64)
    state = np.array(words, np.uint64)
    high, low = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
    one, matrix = np.uint64(1), np.uint64(0xB5026F5AA96619E9)

    def mixed(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        x = (upper & high) | (lower & low)
        return (x >> one) ^ ((x & one) * matrix)

    draws = np.empty((-(-count // size), size), np.uint64)
    for row in draws:
        state[:half] = state[half:] ^ mixed(state[:half], state[1 : half + 1])
        state[half:-1] = state[: half - 1] ^ mixed(state[half:-1], state[half + 1 :])
        state[-1:] = state[half - 1 : half] ^ mixed(state[-1:], state[:1])
        row[:] = state
    x = draws.reshape(-1)[:count]
    for shift, mask in (
        (-29, 0x5555555555555555),
        (17, 0x71D67FFFEDA60000),
        (37, 0xFFF7EEE000000000),
    ):
        moved = x << np.uint64(shift) if shift > 0 else x >> np.uint64(-shift)
        x = x ^ (moved & np.uint64(mask))
    return x ^ (x >> np.uint64(43))
