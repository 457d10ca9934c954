"""Weights that are read piece by piece: what importing from any format comes down to.

Invariant: a piece is the same whatever pieces are asked for, so a source can fill the shards of any
mesh, or a checkpoint on disk, without ever holding a whole model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mjax.config.schema import ModelConfig

Path = tuple[str, ...]  # of a parameter in the nested dict, e.g. ("dense", "attention", "q")
Index = tuple[slice, ...]  # one per axis of the parameter, step 1


@dataclass(frozen=True)
class Source:
    """`read(path, index)` gives that part of a parameter in mjax's layout, fp32; the rows that pad
    a vocabulary are zero. `check()` raises `UserError` for missing, extra or mis-shaped tensors,
    reading no weights."""

    cfg: ModelConfig
    read: Callable[[Path, Index], np.ndarray]
    check: Callable[[], None]
