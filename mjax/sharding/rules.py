"""THE table: logical axis of an array -> mesh axes it is split over. The one home of sharding.

Modules name the axes of their parameters (`sharding/spec.py`). This table and `partition` turn
names into `PartitionSpec`s for the step, for initialization and for checkpoints alike.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mjax.errors import UserError
from mjax.sharding.collectives import (
    Parallel,
    extra_axes,
    gather_layer_weight,
    gather_weight,
    mesh_axes,
    scatter_gradient,
)
from mjax.sharding.spec import ParamSpec, is_spec, trained_only

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("dp", "ep"),
    "seq": ("cp",),
    "target": ("cp",),  # the decoder's sequence in an encoder-decoder
    "neighbors": (),  # of all chunks of a row
    "retrieved": ("cp",),  # the tokens of each
    "images": (),  # of a row
    "image_tokens": ("cp",),  # of each, or padding
    "pixels": (),  # of a patch
    "corners": (),  # of a token of a tiled image
    "places": (),  # of a patch of a packed image
    "axes": (),  # of positions
    "sounds": (),  # of a row
    "sound_tokens": ("cp",),
    "mels": (),  # of a sound's token
    "teacher_top": (),  # of its likeliest tokens
    "teacher_layers": (),  # whose outputs a student learns from
    "teacher_width": (),  # of a teacher's activations
    "expert_layers": (),  # of a model
    "chosen": (),  # of a layer's experts, for a token
    # parameters
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "experts": ("ep",),  # and tp where experts are folded: `rule_of`
    "router": (),
    "embed": (),
    "groups": ("tp",),
    "latent": (),
    "state": (),
    "taps": (),
    "head_dim": (),
    "positions": (),
    "patch": (),
    "pair": (),
    "layers": ("pp",),  # in the order of pipeline/layout.py
}

# Axes that fall back to replication where the mesh does not divide them: a device then takes the
# kv heads that its query heads use (`models/attention/self_attention.py`), and the groups that its
# heads of a state-space mixer use (`models/recurrent/mamba.py`). All others are refused by
# validate.py.
REPLICABLE = frozenset({"kv_heads", "groups"})

# Mesh axes over which ZeRO cuts masters, moments and reduced gradients; `whole` ones over tp, too.
ZERO_AXES = ("dp", "ep", "cp")

# A parameter of at least this many elements on a device (4 KB of fp32) is cut although nothing
# divides it: its last shards are padded. Smaller ones (norm gains, biases) then stay whole.
PADDED_FROM = 1024


def partition(
    axes: Sequence[str | None], parallel: Parallel, shape: Sequence[int] | None = None
) -> PartitionSpec:
    """The `PartitionSpec` of an array with logical `axes`.

    Replicable axes need `shape`. Raises `UserError` where the mesh does not divide another axis.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for dim, name in enumerate(axes):
        live = parallel.live(*rule_of(name, axes, parallel)) if name else ()
        if live and shape is not None and shape[dim] % parallel.size(*live):
            if name not in REPLICABLE:
                raise UserError(
                    f"{name}={shape[dim]} is not divisible over {parallel.size(*live)} devices of "
                    f"{'/'.join(live)}; choose sizes that divide it"
                )
            live = ()
        entries.append(None if not live else live[0] if len(live) == 1 else live)
    return PartitionSpec(*entries)


def rule_of(name: str, axes: Sequence[str | None], parallel: Parallel) -> tuple[str, ...]:
    """The mesh axes that split logical axis `name` of an array that has `axes`.

    An axis that divides experts does not cut each of them.
    """
    if "experts" not in axes:
        return RULES[name]
    over = parallel.expert_axes.over
    return over if name == "experts" else tuple(axis for axis in RULES[name] if axis not in over)


def tp_cuts(spec: ParamSpec, axes: Sequence[str | None], parallel: Parallel) -> bool:
    """Whether tp cuts each matrix of a parameter along one of these axes of it."""
    rules = [rule_of(name, spec.axes, parallel) for name in axes if name not in (None, "experts")]
    return not spec.whole and any("tp" in rule for rule in rules)


def held_groups(groups: int, heads: int, tp: int) -> int:
    """Counts the groups of heads (or kv heads) that tp devices hold together.

    If tp does not divide `groups`, a device holds the one that its heads use, or one for each head.
    """
    if groups % tp == 0:
        return groups
    uses_one = (heads // groups) % (heads // tp) == 0
    return tp if uses_one else heads


def weight_partition(spec: ParamSpec, parallel: Parallel) -> PartitionSpec:
    """The partition in which matmuls read a parameter."""
    if spec.whole:
        parallel = replace(parallel, tp=1)
    return partition(spec.axes, parallel, spec.shape)


def is_partly_read(spec: ParamSpec, parallel: Parallel) -> bool:
    """Whether a device holds a parameter whole and reads only a part of it (`REPLICABLE`)."""
    return not spec.whole and any(
        name in REPLICABLE and size % parallel.size(*RULES[name])
        for name, size in zip(spec.axes, spec.shape, strict=True)
    )


def param_partitions(specs: dict, parallel: Parallel) -> dict:
    """Tree of `ParamSpec` -> the same tree of `PartitionSpec`, as matmuls read the parameters."""
    return jax.tree.map(lambda spec: weight_partition(spec, parallel), specs, is_leaf=is_spec)


def stored_partition(spec: ParamSpec, parallel: Parallel, group: int | None) -> PartitionSpec:
    """The partition of masters and moments under ZeRO >= 1: that of the weight, cut further.

    One dimension is cut over some of the ZERO_AXES that the parameter is replicated on, such that a
    device holds the fewest elements. So it takes as many axes as possible, and a dimension that
    they divide, else the one that needs the least padding. Among equal ones it takes the outermost
    dimension: its shards lie in one piece, and others an exchange has to transpose.
    `layers` is never cut, because layers are read one by one. `group` bounds the shards (hybrid
    sharding: shard within a group of that many devices, replicate across groups).
    """
    base = weight_partition(spec, parallel)
    axes = (*ZERO_AXES, "tp") if spec.whole else ZERO_AXES
    free = [axis for axis in parallel.live(*axes) if axis not in mesh_axes(base)]
    local = [
        length // parallel.size(*mesh_axes((entry,)))
        for length, entry in zip(spec.shape, base, strict=True)
    ]
    size = math.prod(local)
    best, chosen = (size, False, 0), base
    for axes in _subsets(free):
        shards = parallel.size(*axes)
        for dim, (name, length) in enumerate(zip(spec.axes, local, strict=True)):
            padded = length % shards > 0
            rank = size // length * -(-length // shards), padded, dim
            allowed = shards <= (group or shards) and (size >= PADDED_FROM or not padded)
            if name != "layers" and allowed and rank < best:
                entries = list(base)
                entries[dim] = (*mesh_axes((base[dim],)), *axes)
                best, chosen = rank, PartitionSpec(*entries)
    return chosen


def _subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """All non-empty subsets of `axes`, the largest first."""
    sizes = range(len(axes), 0, -1)
    return [subset for size in sizes for subset in itertools.combinations(axes, size)]


def stored_partitions(specs: dict, parallel: Parallel, zero: int, group: int | None) -> dict:
    """Tree of `ParamSpec` -> the partitions of masters, moments and reduced gradients."""
    if zero == 0:
        return param_partitions(specs, parallel)

    def stored(spec: ParamSpec) -> PartitionSpec:
        if spec.counts or (spec.held and zero < 3):  # no optimizer moves it
            return weight_partition(spec, parallel)
        return stored_partition(spec, parallel, group)

    return jax.tree.map(stored, specs, is_leaf=is_spec)


class Padding(NamedTuple):
    """How a dimension is stored that its shards do not divide.

    Dimension `dim` consists of `blocks`, one for each cut of the weight's own partition, of
    `length` each. Every block is zero-padded to the length `padded`.
    """

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


@dataclass(frozen=True)
class ParamPlacement:
    """Partitions of one parameter on a mesh.

    stored: the partition of its master, its moments and its reduced gradient.
    weight: the partition in which matmuls read it; ZeRO cuts the stored one further.
    """

    spec: ParamSpec
    stored: PartitionSpec
    weight: PartitionSpec
    parallel: Parallel

    @property
    def layer(self) -> "ParamPlacement":
        """The placement of one layer, if this is that of a stack."""
        spec = replace(self.spec, shape=self.spec.shape[1:], axes=self.spec.axes[1:])
        stored, weight = PartitionSpec(*self.stored[1:]), PartitionSpec(*self.weight[1:])
        return ParamPlacement(spec, stored, weight, self.parallel)

    @property
    def weight_size(self) -> int:
        """Elements of the weight on one device."""
        return self._local_size(self.weight)

    @property
    def stored_size(self) -> int:
        """Elements of the master on one device, padding included."""
        return self._local_size(self.stored)

    def _local_size(self, cut: PartitionSpec) -> int:
        shards = [self.parallel.size(*mesh_axes((entry,))) for entry in cut]
        return math.prod(-(-n // s) for n, s in zip(self.spec.shape, shards, strict=True))

    def gather(self, x: jax.Array) -> jax.Array:
        """The weight from its stored shards."""
        return gather_weight(x, self.stored, self.weight, self.spec.shape, self.parallel)

    def gather_low(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The weight in `dtype` from its stored shards, by copies (`gather_layer_weight`)."""
        sizes = self.spec.shape, self.parallel
        return gather_layer_weight(x, self.stored, self.weight, *sizes, dtype)

    def scatter(self, gradient: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The stored shards of a gradient, summed in `dtype` over what ZeRO cuts."""
        return scatter_gradient(gradient, self.weight, self.stored, self.parallel, dtype)


@dataclass(frozen=True)
class Placement:
    """Partitions of a model's parameters on a mesh, as trees like the parameters.

    specs: declarations, with stacks in the order in which they are stored.
    stored, weights: partitions, as in `ParamPlacement`.
    """

    specs: dict
    stored: dict
    weights: dict
    parallel: Parallel

    @property
    def is_cut(self) -> bool:
        """Whether ZeRO stores anything in finer shards than it is read in."""
        return self.stored != self.weights

    @property
    def has_frozen(self) -> bool:
        """Whether any parameter is frozen."""
        return any(spec.frozen for spec in jax.tree.leaves(self.specs, is_leaf=is_spec))

    @property
    def of_gradients(self) -> dict:
        """The partitions of reduced gradients: those of masters, without frozen parameters."""
        return trained_only(self.stored, self.specs)

    def part(self, name: str) -> "Placement":
        """The placement of the parameters under one name."""
        return Placement(self.specs[name], self.stored[name], self.weights[name], self.parallel)

    def map(self, function: Callable, *trees: dict) -> dict:
        """function(its ParamPlacement, its entries of `trees`) for every parameter."""

        def one(spec: ParamSpec, stored: PartitionSpec, weight: PartitionSpec, *entries):
            return function(ParamPlacement(spec, stored, weight, self.parallel), *entries)

        return jax.tree.map(one, self.specs, self.stored, self.weights, *trees, is_leaf=is_spec)


def place(specs: dict, parallel: Parallel, zero: int, group: int | None = None) -> Placement:
    """The placement of parameters `specs` under a ZeRO stage (`stored_partition`)."""
    weights = param_partitions(specs, parallel)
    return Placement(specs, stored_partitions(specs, parallel, zero, group), weights, parallel)
