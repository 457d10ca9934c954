"""A table of pairs of tokens as a model: the baseline that a trained model must beat.

Interpolated bigram model with Witten-Bell smoothing: P(w|h) = (c(hw) + T(h) P(w)) / (c(h) + T(h)),
T(h) the number of different followers of h, and P(w) smoothed toward uniform in the same way.
Invariant: P(.|h) sums to one over the vocabulary. Source: Witten and Bell 1991.
"""

import math

import numpy as np


def bigram_cross_entropy(
    train_tokens: np.ndarray, valid_tokens: np.ndarray, vocab_size: int
) -> float:
    """Nats per token of `valid_tokens` (each given the one before) under a model of
    `train_tokens`: integer arrays of ids in [0, vocab_size), [N] and [N] or rows [B, N]."""
    train = np.asarray(train_tokens, np.int64)
    valid = np.asarray(valid_tokens, np.int64)
    assert valid.shape[-1] > 1, "a bigram needs two tokens"
    unigram = np.bincount(train, minlength=vocab_size)
    types = np.count_nonzero(unigram)
    p_unigram = (unigram + max(types, 1) / vocab_size) / (len(train) + max(types, 1))

    pairs, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    seen = np.bincount(train[:-1], minlength=vocab_size)

    before, after = valid[..., :-1], valid[..., 1:]
    predicted = before.size
    wanted, times = np.unique(before * vocab_size + after, return_counts=True)
    before, after = wanted // vocab_size, wanted % vocab_size
    at = np.minimum(np.searchsorted(pairs, wanted), max(len(pairs) - 1, 0))
    count = np.where(pairs[at] == wanted, counts[at], 0) if len(pairs) else np.zeros(len(wanted))
    known = followers[before] > 0
    total = np.where(known, seen[before] + followers[before], 1)
    backed = np.where(known, followers[before], 1)
    p = (count + backed * p_unigram[after]) / total
    return -math.fsum(times * np.log(p)) / predicted
