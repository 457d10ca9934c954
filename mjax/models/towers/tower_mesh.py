"""Mesh sizes of a tower's own: where its weights lie, and how its rows get there and back.

A tower runs on all devices of the mesh. Its layers have a handle of their own, whose tp or cp may
be 1 (`mesh.towers`). They then exchange nothing along that axis. It divides the rows of their
stream instead, a whole item each. Weights are whole over tp (`ParamSpec.whole`), and a device's
share of their gradients is that of its rows: the gradient rule sums the shares. Rows are filled up
with empty ones where the devices do not divide them. The counterpart in Megatron-LM is MIMO, whose
modules have process groups of their own.
"""

from dataclasses import replace

import jax

from mjax.config.languages.layer_pattern import modality_of, stack_of
from mjax.config.schema.run import Config
from mjax.models.attention.zigzag import natural
from mjax.models.base.context import Context
from mjax.sharding.collectives import Parallel, padded_to_shards
from mjax.sharding.spec import ParamSpec, is_spec


def tower_handles(cfg: Config, parallel: Parallel) -> dict[str, Parallel]:
    """The handles of modalities whose layers have mesh sizes of their own."""
    handles = {}
    for name, sizes in cfg.mesh.towers.items():
        handles[name] = replace(parallel, **sizes)
    return handles


def with_whole_towers(specs: dict, cfg: Config) -> dict:
    """Declarations in which towers of tp=1 and their projectors are whole over tp."""
    found = dict(specs)
    for kind in set(cfg.model.layer_kinds):
        if is_whole(kind, cfg):
            stack = stack_of(kind)
            found[stack] = whole_specs(specs[stack])
    return found


def is_whole(kind: str, cfg: Config) -> bool:
    """Whether the weights of a layer are whole over tp because its tower's tp is 1."""
    sizes = cfg.mesh.towers.get(modality_of(kind), {})
    return sizes.get("tp") == 1


def whole_specs(specs: dict) -> dict:
    """The same declarations, whole over tp."""

    def one(spec: ParamSpec) -> ParamSpec:
        return replace(spec, whole=True)

    return jax.tree.map(one, specs, is_leaf=is_spec)


def row_axes(modality: str, ctx: Context) -> tuple[str, ...]:
    """The axes that divide the rows of a tower's stream, besides those of the batch."""
    own = ctx.of(modality).parallel
    axes = []
    for axis in ("cp", "tp"):
        if own.size(axis) < ctx.parallel.size(axis):
            axes.append(axis)
    return tuple(axes)


def rows_here(x: jax.Array, modality: str, ctx: Context) -> jax.Array:
    """[R', ...]: this device's rows of x [R, ...], which is equal on all devices of `row_axes`."""
    axes = row_axes(modality, ctx)
    devices = ctx.parallel.size(*axes)
    x = padded_to_shards(x, 0, devices)
    return ctx.parallel.shard(x, axes, 0)


def whole_rows_here(x: jax.Array, modality: str, ctx: Context) -> jax.Array:
    """This device's rows of x [R, T/cp, ...]: [R', T, ...] in order where the tower's cp is 1."""
    axes, parallel = row_axes(modality, ctx), ctx.parallel
    if "cp" not in axes:
        return rows_here(x, modality, ctx)
    devices = parallel.size(*axes)
    x = padded_to_shards(x, 0, devices)
    x = parallel.all_to_all(x, "cp", 0, 1)
    x = natural(x, parallel.cp)
    return parallel.shard(x, axes[1:], 0)


def rows_of_all(x: jax.Array, count: int, modality: str, ctx: Context) -> jax.Array:
    """[count, ...]: the rows of all devices of `row_axes`, from each one's [R', ...]."""
    axes = row_axes(modality, ctx)
    if not axes:
        return x
    x = ctx.parallel.all_gather(x, axes, 0)
    return x[:count]
