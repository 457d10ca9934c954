"""A global batch of numpy arrays -> sharded arrays on the mesh, with the place of every token.

Invariant: a token's row and column are those of the global batch, whatever the mesh.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.errors import UserError
from mjax.models.context_attention import zigzag
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import global_array, local_part
from mjax.sharding.rules import batch_partition, partition

BATCH_FIELDS = {
    "tokens": np.int32,
    "labels": np.int32,
    "loss_mask": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
}


def batch_partitions(parallel: Parallel) -> dict[str, PartitionSpec]:
    """The partition of every field of a batch on the mesh."""
    partitions = {name: batch_partition(parallel) for name in BATCH_FIELDS}
    rows, columns = (partition((axis,), parallel) for axis in ("batch", "seq"))
    return partitions | {"rows": rows, "columns": columns}


@dataclass(frozen=True)
class BatchPlacer:
    """Places batches on `mesh`; `micro_batch_size` sequences a device must divide their rows."""

    mesh: Mesh
    parallel: Parallel
    micro_batch_size: int

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows, numpy [B, S] fields -> global arrays, rows and columns added.

        Raises `UserError` for a missing field or sizes that do not divide over the mesh.
        """
        rows = self.global_rows(batch)
        width = batch["tokens"].shape[1]
        mine = self.local_rows(rows)
        fields = {name: np.asarray(batch[name], dtype) for name, dtype in BATCH_FIELDS.items()}
        fields["rows"] = np.arange(rows, dtype=np.int32)[mine]
        fields["columns"] = np.arange(width, dtype=np.int32)
        if self.parallel.cp > 1:
            order = zigzag(width, self.parallel.cp)
            fields |= {name: a[..., order] for name, a in fields.items() if name != "rows"}
        shardings = self.shardings()
        sizes = {name: (rows, mine.start) for name in fields} | {"columns": (width, 0)}
        return {
            name: global_array(field, shardings[name], *sizes[name])
            for name, field in fields.items()
        }

    def abstract(self, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a placed batch of `rows` sequences."""
        dtypes = BATCH_FIELDS | {"rows": np.int32, "columns": np.int32}
        shapes = {"rows": (rows,), "columns": (width,)}
        return {
            name: jax.ShapeDtypeStruct(
                shapes.get(name, (rows, width)), dtypes[name], sharding=sharding
            )
            for name, sharding in self.shardings().items()
        }

    def shardings(self) -> dict[str, NamedSharding]:
        partitions = batch_partitions(self.parallel)
        return {name: NamedSharding(self.mesh, cut) for name, cut in partitions.items()}

    def local_rows(self, count: int) -> slice:
        """The rows, of `count` in a global batch, that this process's devices work on."""
        rows = partition(("batch",), self.parallel)
        return local_part(NamedSharding(self.mesh, rows), count)

    def global_rows(self, batch: dict[str, np.ndarray]) -> int:
        """The rows of the global batch that this process's part belongs to; checks its sizes."""
        for name in BATCH_FIELDS:
            if name not in batch:
                needed = ", ".join(BATCH_FIELDS)
                raise UserError(f"batch: field {name!r} is missing; it needs {needed}")
        local, width = batch["tokens"].shape
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
