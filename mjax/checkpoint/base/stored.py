"""The arrays and the record of one step as they lie on disk, opened without orbax or a device.

Format: orbax-checkpoint's (`_METADATA` and one zarr array a leaf, in files of their own or in one
OCDBT store), as of 0.11 and 0.12.
"""

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tensorstore as ts

from mjax.checkpoint.base.source import Path as Leaf
from mjax.errors import UserError, first_line, or_user_error
from mjax.json_file import read_json

WEIGHTS = "weights"  # record["contents"] of a checkpoint without optimizer state (weights.py)


@dataclass(frozen=True)
class StoredArrays:
    """The arrays of the step in `folder`, by their paths, e.g. ("params", "dense", "mlp", "up")."""

    folder: Path

    @cached_property
    def state(self) -> Path:
        return self.folder / "state"

    @cached_property
    def layout(self) -> dict:
        """Orbax's description of the tree."""
        return read_json(self.state / "_METADATA")

    def paths(self) -> list[Leaf]:
        """The paths of all arrays, in the order of the tree."""
        file = self.state / "_METADATA"
        wrong = f"{file}: not orbax's description of a tree; the checkpoint is damaged"
        with or_user_error(wrong, (ValueError, SyntaxError, KeyError, TypeError)):
            return [tuple(ast.literal_eval(key)) for key in self.layout["tree_metadata"]]

    def open(self, path: Leaf) -> ts.TensorStore:
        """The array at `path`; raises `UserError` if it cannot be opened."""
        name = ".".join(path)
        base = {"driver": "file", "path": f"{self.state}/"}
        if self.layout["use_ocdbt"]:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            kvstore = base | {"path": f"{self.state}/{name}/"}
        driver = "zarr3" if self.layout["use_zarr3"] else "zarr"
        spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
        with self.readable(path):
            # No cache: what is read is handed on at once.
            context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
            return ts.open(spec, read=True, context=context).result()

    @contextlib.contextmanager
    def readable(self, path: Leaf) -> Iterator[None]:
        """Turn tensorstore's errors into one line that names the array."""
        try:
            yield
        except (ValueError, OSError) as e:
            name = ".".join(path)
            raise UserError(f"{self.state}: cannot read array {name}: {first_line(e)}") from None


def read_record(folder: Path) -> dict:
    """The record of the step in `folder`: config, step, versions, data."""
    return read_json(folder / "meta" / "metadata")
