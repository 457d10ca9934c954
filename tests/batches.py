"""Batches compared by their bytes."""

import hashlib

import numpy as np


def stream_hash(batch: dict[str, np.ndarray]) -> str:
    """A short digest of every field's name, shape, dtype and bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array)
    return digest.hexdigest()
