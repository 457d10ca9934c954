"""THE table: logical axis of an array -> mesh axes it is split over. The one home of sharding.

Modules name the axes of their parameters (`models/params.py`); this table and `partition` turn
names into `PartitionSpec`s for the step, for initialisation and for checkpoints alike.
"""

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from mjax.models.params import ParamSpec
from mjax.sharding.collectives import Parallel

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("dp", "ep"),
    "seq": ("cp",),
    # parameters
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "embed": (),
    "head_dim": (),
    "positions": (),
    "pair": (),
    "layers": (),
}

# Axes that fall back to replication where the mesh does not divide them: a device then takes the
# kv heads that its query heads use (`models/attention.py`). All others are refused by validate.py.
REPLICABLE = frozenset({"kv_heads"})


def partition(
    axes: Sequence[str | None], parallel: Parallel, shape: Sequence[int] | None = None
) -> PartitionSpec:
    """PartitionSpec of an array with logical `axes`; `shape` is needed for replicable axes."""
    out: list[str | tuple[str, ...] | None] = []
    for i, name in enumerate(axes):
        live = parallel.live(*RULES[name]) if name else ()
        if live and shape is not None and shape[i] % parallel.size(*live):
            assert name in REPLICABLE, f"{name}={shape[i]} is not divisible over {live}"
            live = ()
        out.append(None if not live else live[0] if len(live) == 1 else live)
    return PartitionSpec(*out)


def param_partitions(specs: dict, parallel: Parallel) -> dict:
    """Tree of `ParamSpec` -> the same tree of `PartitionSpec`."""

    def one(spec: ParamSpec) -> PartitionSpec:
        return partition(spec.axes, parallel, spec.shape)

    return jax.tree.map(one, specs, is_leaf=lambda s: isinstance(s, ParamSpec))


def batch_partition(parallel: Parallel) -> PartitionSpec:
    """[B, S] arrays of a global batch."""
    return partition(("batch", "seq"), parallel)
