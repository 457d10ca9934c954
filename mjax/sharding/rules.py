"""THE table: logical axis of an array -> mesh axes it is split over. The one home of sharding.

Modules name the axes of their parameters (`models/params.py`); this table and `partition` turn
names into `PartitionSpec`s for the step, for initialisation and for checkpoints alike.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from mjax.errors import UserError
from mjax.sharding.collectives import Parallel, extra_axes, mesh_axes
from mjax.sharding.spec import ParamSpec

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("dp", "ep"),
    "seq": ("cp",),
    # parameters
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "experts": ("ep",),
    "router": (),
    "embed": (),
    "head_dim": (),
    "positions": (),
    "pair": (),
    "layers": ("pp",),  # in the order of pipeline/layout.py
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
            if name not in REPLICABLE:
                raise UserError(
                    f"{name}={shape[i]} is not divisible over {parallel.size(*live)} devices of "
                    f"{'/'.join(live)}; choose a mesh that divides it"
                )
            live = ()
        out.append(None if not live else live[0] if len(live) == 1 else live)
    return PartitionSpec(*out)


def param_partitions(specs: dict, parallel: Parallel) -> dict:
    """Tree of `ParamSpec` -> the same tree of `PartitionSpec`."""

    def one(spec: ParamSpec) -> PartitionSpec:
        return partition(spec.axes, parallel, spec.shape)

    return jax.tree.map(one, specs, is_leaf=lambda s: isinstance(s, ParamSpec))


# ZeRO stage -> (who is stored in shards over ZERO_AXES, when weights are made whole). Gradients
# are reduced into the stored layout: once a step (1, 3) or after every micro-batch (2).
ZERO_AXES = ("dp", "ep", "cp")
ZERO = {
    0: ("nothing", "never"),
    1: ("masters and moments", "once a step"),
    2: ("masters, moments and accumulated gradients", "once a step"),
    3: ("masters, moments, gradients and weights", "layer by layer"),
}


# A parameter of at least this many elements on a device (4 KB of fp32) is cut although nothing
# divides it: its last shards are padded. Smaller ones (norm gains, biases) then stay whole.
PADDED_FROM = 1024


def stored_partition(spec: ParamSpec, parallel: Parallel, group: int | None) -> PartitionSpec:
    """Partition of masters and moments under ZeRO >= 1: the compute partition, cut further.

    Of all ways to cut one dimension over some of the ZERO_AXES that the parameter is replicated on,
    the one that leaves a device the fewest elements: as many axes as possible, a dimension that
    they divide, else the one that needs least padding; the outermost where these agree, whose
    shards lie in one piece (others an exchange has to turn). `layers` is never cut, because a scan
    takes layers one by one. `group` bounds the shards (hybrid sharding: shard within a group of
    that many devices, replicate across groups).
    """
    base = partition(spec.axes, parallel, spec.shape)
    free = [a for a in parallel.live(*ZERO_AXES) if a not in mesh_axes(base)]
    local = [n // parallel.size(*mesh_axes((e,))) for n, e in zip(spec.shape, base, strict=True)]
    size = math.prod(local)
    best, found = (size, False, 0), base
    for axes in (c for n in range(len(free), 0, -1) for c in itertools.combinations(free, n)):
        shards = parallel.size(*axes)
        for dim, (name, length) in enumerate(zip(spec.axes, local, strict=True)):
            padded = length % shards > 0
            rank = size // length * -(-length // shards), padded, dim
            fits = shards <= (group or shards) and (size >= PADDED_FROM or not padded)
            if name != "layers" and fits and rank < best:
                entries = list(base)
                entries[dim] = (*mesh_axes((base[dim],)), *axes)
                best, found = rank, PartitionSpec(*entries)
    return found


class Padding(NamedTuple):
    """Dimension `dim` of a parameter, `blocks` (of its weight's partition) of `length` each, is
    stored with every block zero-padded to `padded`."""

    dim: int
    blocks: int
    length: int
    padded: int


def padding(
    spec: ParamSpec, weight: PartitionSpec, stored: PartitionSpec, parallel: Parallel
) -> Padding | None:
    """How a parameter is padded for its stored partition; None: it is not."""
    for dim, axes in extra_axes(weight, stored):
        blocks, shards = parallel.size(*mesh_axes((weight[dim],))), parallel.size(*axes)
        length = spec.shape[dim] // blocks
        if length % shards:
            return Padding(dim, blocks, length, -(-length // shards) * shards)
    return None


def stored_partitions(specs: dict, parallel: Parallel, zero: int, group: int | None) -> dict:
    """Tree of `ParamSpec` -> how masters, moments and reduced gradients are stored."""
    if zero == 0:
        return param_partitions(specs, parallel)
    return jax.tree.map(
        lambda spec: stored_partition(spec, parallel, group),
        specs,
        is_leaf=lambda s: isinstance(s, ParamSpec),
    )


def batch_partition(parallel: Parallel) -> PartitionSpec:
    """[B, S] arrays of a global batch."""
    return partition(("batch", "seq"), parallel)
