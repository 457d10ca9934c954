"""How Muon gathers the matrices of stored shards, and splits them again.

Newton-Schulz needs complete matrices. Axes that enumerate matrices (layers, experts) stay split.
"""

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from mjax.optim.muon import Resharder
from mjax.sharding.collectives import gather_weight, shard_weight
from mjax.sharding.rules import Placement, weight_partition
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec


class Partitions(NamedTuple):
    """Three ways to split a parameter, each finer than the next.

    stored: as ZeRO stores it. weight: as matmuls read it. matrix: only along enumerating axes.
    """

    stored: PartitionSpec
    weight: PartitionSpec
    matrix: PartitionSpec


def muon_resharders(placement: Placement) -> tuple[Resharder, Resharder]:
    """(gather, shard): from the stored shard of a parameter to complete matrices, and back."""
    parallel = placement.parallel
    specs = jax.tree.leaves(placement.specs)
    stored = jax.tree.leaves(placement.stored)
    stored_partition_of = dict(zip(specs, stored, strict=True))

    def partitions(spec: ParamSpec) -> Partitions:
        stored = stored_partition_of[spec]
        read = weight_partition(spec, parallel)
        weight, matrix = [], []
        for axis, stored_entry, read_entry in zip(spec.axes, stored, read, strict=True):
            enumerates = axis in ENUMERATING_AXES
            weight.append(stored_entry if enumerates else read_entry)
            matrix.append(stored_entry if enumerates else None)
        return Partitions(stored, PartitionSpec(*weight), PartitionSpec(*matrix))

    def gather(x: jax.Array, spec: ParamSpec) -> jax.Array:
        stored, weight, matrix = partitions(spec)
        x = gather_weight(x, stored, weight, spec.shape, parallel)
        return gather_weight(x, weight, matrix, spec.shape, parallel)

    def shard(x: jax.Array, spec: ParamSpec) -> jax.Array:
        stored, weight, matrix = partitions(spec)
        x = shard_weight(x, matrix, weight, parallel)
        return shard_weight(x, weight, stored, parallel)

    return gather, shard
