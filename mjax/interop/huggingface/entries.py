"""The tensors of an export before they are written: shapes, what stands for what, files."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Entry = tuple[tuple[int, ...], np.dtype]  # shape and dtype of a tensor


class CodedTensors(NamedTuple):
    """Tensors that are stored in the place of others.

    entries: by the name of the other one. make: that name -> the arrays of its entries.
    """

    entries: dict[str, dict[str, Entry]]
    make: Callable[[str], dict[str, np.ndarray]]


def with_coded(
    tensors: dict[str, Entry], parts: Callable, coded: CodedTensors
) -> tuple[dict[str, Entry], Callable[[str], list[np.ndarray]]]:
    """(tensors, parts) with coded ones in the places of others."""
    found: dict[str, Entry] = {}
    for name, entry in tensors.items():
        found |= coded.entries.get(name, {name: entry})
    origin = {part: name for name, entries in coded.entries.items() for part in entries}
    made: dict[str, np.ndarray] = {}

    def parts_of(name: str) -> list[np.ndarray]:
        if name not in origin:
            return parts(name)
        if name not in made:
            made.update(coded.make(origin[name]))
        return [made.pop(name)]

    return found, parts_of


def bytes_of_entry(tensor: Entry) -> int:
    """The bytes of a tensor in its file."""
    return tensor[1].itemsize * math.prod(tensor[0])


def shards(tensors: dict[str, Entry], most: int) -> dict[str, dict[str, Entry]]:
    """File name -> its tensors, in order, filled up to `most` bytes; a tensor is never cut."""
    parts: list[dict[str, Entry]] = [{}]
    room = most
    for name, tensor in tensors.items():
        if parts[-1] and bytes_of_entry(tensor) > room:
            parts.append({})
            room = most
        parts[-1][name] = tensor
        room -= bytes_of_entry(tensor)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {f"model-{i:05}-of-{count:05}.safetensors": p for i, p in enumerate(parts, start=1)}
