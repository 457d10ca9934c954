"""A global batch of numpy arrays -> sharded arrays on the mesh, with the place of every token.

Invariant: a token's row and column are those of the global batch, whatever the mesh.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.errors import UserError
from mjax.models.context_attention import zigzag
from mjax.models.objective import LAYER_FIELDS, Batch, BatchField, HostBatch, Objective
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import global_array, local_part
from mjax.sharding.rules import partition

# The place of a token in the global batch.
PLACE_FIELDS = {
    "rows": BatchField(np.int32, ("batch",)),
    "columns": BatchField(np.int32, ("seq",)),
}


def given_fields(objective: Objective) -> dict[str, BatchField]:
    """The fields of a batch before it is placed: those of the objective and of the layers."""
    return {**objective.fields, **LAYER_FIELDS}


def batch_partitions(objective: Objective, parallel: Parallel) -> dict[str, PartitionSpec]:
    """The partition of every field of a batch on the mesh."""
    fields = given_fields(objective) | PLACE_FIELDS
    return {name: partition(field.axes, parallel) for name, field in fields.items()}


@dataclass(frozen=True)
class BatchPlacer:
    """Places batches of `objective` on `mesh`.

    `micro_batch_size` sequences a device must divide their rows.
    """

    mesh: Mesh
    parallel: Parallel
    objective: Objective
    micro_batch_size: int

    @property
    def fields(self) -> Mapping[str, BatchField]:
        """The fields that a batch is given with."""
        return given_fields(self.objective)

    def place(self, batch: HostBatch) -> Batch:
        """This process's rows, numpy [B, ...] fields -> global arrays, rows and columns added.

        Raises `UserError` for a missing field or sizes that do not divide over the mesh.
        """
        rows = self.global_rows(batch)
        width = batch["positions"].shape[1]
        mine = self.local_rows(rows)
        arrays = {name: np.asarray(batch[name], field.dtype) for name, field in self.fields.items()}
        arrays["rows"] = np.arange(rows, dtype=np.int32)[mine]
        arrays["columns"] = np.arange(width, dtype=np.int32)
        if self.parallel.cp > 1:
            order = zigzag(width, self.parallel.cp)
            arrays = {name: self._reordered(name, array, order) for name, array in arrays.items()}
        shardings = self.shardings()
        sizes = {name: (rows, mine.start) for name in arrays} | {"columns": (width, 0)}
        return {
            name: global_array(array, shardings[name], *sizes[name])
            for name, array in arrays.items()
        }

    def _reordered(self, name: str, array: np.ndarray, order: np.ndarray) -> np.ndarray:
        """A field with its sequence in another order."""
        axes = (self.fields | PLACE_FIELDS)[name].axes
        return array.take(order, axes.index("seq")) if "seq" in axes else array

    def abstract(self, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a placed batch of `rows` sequences."""
        size = {"batch": rows, "seq": width}
        shardings = self.shardings()
        shapes = {}
        for name, field in (self.fields | PLACE_FIELDS).items():
            shape = tuple(size[axis] for axis in field.axes)
            shapes[name] = jax.ShapeDtypeStruct(shape, field.dtype, sharding=shardings[name])
        return shapes

    def shardings(self) -> dict[str, NamedSharding]:
        partitions = batch_partitions(self.objective, self.parallel)
        return {name: NamedSharding(self.mesh, cut) for name, cut in partitions.items()}

    def local_rows(self, count: int) -> slice:
        """The rows, of `count` in a global batch, that this process's devices work on."""
        rows = partition(("batch",), self.parallel)
        return local_part(NamedSharding(self.mesh, rows), count)

    def global_rows(self, batch: HostBatch) -> int:
        """The rows of the global batch that this process's part belongs to; checks its sizes."""
        for name in self.fields:
            if name not in batch:
                needed = ", ".join(self.fields)
                raise UserError(f"batch: field {name!r} is missing; it needs {needed}")
        local, width = batch["positions"].shape
        devices = self.parallel.size("dp", "ep")
        here = self.local_rows(devices)  # this process's parts of a batch
        rows = local * devices // (here.stop - here.start)
        size = min(self.micro_batch_size, rows // devices)
        cuts = self.parallel.tp if self.parallel.cp == 1 else 2 * self.parallel.size("cp", "tp")
        if rows % devices or rows // devices % max(size, 1) or width % cuts:
            raise UserError(
                f"batch: {rows} sequences of {width} tokens do not divide over dp*ep={devices}, "
                f"train.micro_batch_size={size} and tp={self.parallel.tp}, cp={self.parallel.cp} "
                "(zigzag: 2*cp*tp); change one of them"
            )
        return rows


def most_documents(segment_ids: np.ndarray) -> int:
    """The largest number of documents in a sequence of [B, S]."""
    return 1 + int((np.diff(segment_ids, axis=1) != 0).sum(1).max(initial=0))
