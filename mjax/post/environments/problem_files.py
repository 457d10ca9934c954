"""Problems in files of JSON lines (or JSON, or parquet), and their order in a stream."""

import functools

import numpy as np

from mjax.data.conversations.records import read_records, source_files
from mjax.errors import UserError
from mjax.post.environments.environment import draws


def read_problems(path: str, **kinds: type) -> list[dict]:
    """The records of a file or folder, which have these fields. Raises `UserError` for others."""
    found = []
    for place, row in read_records(source_files(path)):
        if isinstance(row, UserError):
            raise row
        for name, kind in kinds.items():
            if not isinstance(row.get(name), kind) or not row[name]:
                said = f"{name!r} is not a {kind.__name__} with something in it"
                raise UserError(f"{place}: {said}; mend the record or leave it out")
        found.append(row)
    if not found:
        raise UserError(f"{path}: no problems; give a file that has some")
    return found


def problem_at(seed: int, index: int, count: int) -> int:
    """The number of the problem at `index`: each of `count` once, in a new order each time."""
    return int(_problem_order(seed, index // count, count)[index % count])


@functools.lru_cache(maxsize=4)
def _problem_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return draws(seed, epoch).permutation(count)
