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

from mjax.config.pattern import modality_of, stack_of
from mjax.config.schema import Config
from mjax.models.context import Context
from mjax.models.context_attention import natural
from mjax.sharding.collectives import Parallel, padded_to_shards
from mjax.sharding.spec import ParamSpec, is_spec


def tower_handles(cfg: Config, parallel: Parallel) -> dict[str, Parallel]:
    """The handles of modalities whose layers have mesh sizes of their own."""
    return {name: replace(parallel, **sizes) for name, sizes in cfg.mesh.towers.items()}


def with_whole_towers(specs: dict, cfg: Config) -> dict:
    """Declarations in which towers of tp=1 and their projectors are whole over tp."""
    stacks = {stack_of(kind) for kind in cfg.model.layer_kinds if is_whole(kind, cfg)}
    return {name: whole_specs(part) if name in stacks else part for name, part in specs.items()}


def is_whole(kind: str, cfg: Config) -> bool:
    """Whether the weights of a layer are whole over tp because its tower's tp is 1."""
    return cfg.mesh.towers.get(modality_of(kind), {}).get("tp") == 1


def whole_specs(specs: dict) -> dict:
    """The same declarations, whole over tp."""

    def one(spec: ParamSpec) -> ParamSpec:
        return replace(spec, whole=True)

    return jax.tree.map(one, specs, is_leaf=is_spec)


def row_axes(modality: str, ctx: Context) -> tuple[str, ...]:
    """The axes that divide the rows of a tower's stream, besides those of the batch."""
    own, mesh = ctx.of(modality).parallel, ctx.parallel
    return tuple(axis for axis in ("cp", "tp") if own.size(axis) < mesh.size(axis))


def rows_here(x: jax.Array, modality: str, ctx: Context) -> jax.Array:
    """[R', ...]: this device's rows of x [R, ...], which is equal on all devices of `row_axes`."""
    axes = row_axes(modality, ctx)
    x = padded_to_shards(x, 0, ctx.parallel.size(*axes))
    return ctx.parallel.shard(x, axes, 0)


def whole_rows_here(x: jax.Array, modality: str, ctx: Context) -> jax.Array:
    """This device's rows of x [R, T/cp, ...]: [R', T, ...] in order where the tower's cp is 1."""
    axes, parallel = row_axes(modality, ctx), ctx.parallel
    x = padded_to_shards(x, 0, parallel.size(*axes))
    if "cp" in axes:
        x = parallel.all_to_all(x, "cp", 0, 1)
        x = natural(x, parallel.cp)
    return parallel.shard(x, tuple(axis for axis in axes if axis != "cp"), 0)


def rows_of_all(x: jax.Array, count: int, modality: str, ctx: Context) -> jax.Array:
    """[count, ...]: the rows of all devices of `row_axes`, from each one's [R', ...]."""
    axes = row_axes(modality, ctx)
    return ctx.parallel.all_gather(x, axes, 0)[:count] if axes else x
