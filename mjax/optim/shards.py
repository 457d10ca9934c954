"""How Muon makes the stored shards of a matrix whole, and cuts them again.

Newton-Schulz needs whole matrices. Axes that enumerate matrices (layers, experts) stay cut.
"""

import jax
from jax.sharding import PartitionSpec

from mjax.optim.muon import Resharder
from mjax.sharding.collectives import gather_weight, shard_weight
from mjax.sharding.rules import Placement, partition
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec


def muon_resharders(placement: Placement) -> tuple[Resharder, Resharder]:
    """(gather, shard): make a stored shard of a Muon matrix whole, and cut it again."""
    parallel = placement.parallel
    leaves = jax.tree.leaves(placement.specs), jax.tree.leaves(placement.stored)
    stored = dict(zip(*leaves, strict=True))

    def cuts(spec: ParamSpec) -> list[PartitionSpec]:
        """As stored, as a weight, whole."""
        fine, weight = stored[spec], partition(spec.axes, parallel, spec.shape)
        rows = [
            (own,) * 3 if axis in ENUMERATING_AXES else (own, coarse, None)
            for axis, own, coarse in zip(spec.axes, fine, weight, strict=True)
        ]
        return [PartitionSpec(*entries) for entries in zip(*rows, strict=True)]

    def gather(x: jax.Array, spec: ParamSpec) -> jax.Array:
        fine, weight, whole = cuts(spec)
        x = gather_weight(x, fine, weight, spec.shape, parallel)
        return gather_weight(x, weight, whole, spec.shape, parallel)

    def shard(x: jax.Array, spec: ParamSpec) -> jax.Array:
        fine, weight, whole = cuts(spec)
        x = shard_weight(x, whole, weight, parallel)
        return shard_weight(x, weight, fine, parallel)

    return gather, shard
