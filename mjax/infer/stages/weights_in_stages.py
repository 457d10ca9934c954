"""The weights of layers in stages: for each slot of a stage an array [pp, ...], one row a device.

They come from stacks [L, ...] in any order and cut. Invariant: beside its own layers a device holds
its part of one stack, and one layer of each stage.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mjax.checkpoint.base.source import Path
from mjax.kernels.fp8.channels import Channels8
from mjax.pipeline.layout import Layout
from mjax.sharding.collectives import mesh_axes
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import on_shards, parallel_of


def rows_of_slots(layout: Layout, stack: str) -> np.ndarray:
    """int32 [slots of the stack, pp]: the row of the stack that each stage has; -1: none."""
    return layout.storage_rows(stack).reshape(layout.pp, -1).T


def arrays_in_stages(
    arrays: Mapping[Path, np.ndarray], layout: Layout | None
) -> dict[Path, np.ndarray]:
    """Parameters by path, those of stacks [L, ...] as [slots, pp, ...] with zeros for no layer."""
    found = dict(arrays)
    for path, array in arrays.items():
        if layout is not None and path[0] in layout.stacks:
            nothing = np.zeros_like(array[:1])
            found[path] = np.concatenate([array, nothing])[rows_of_slots(layout, path[0])]
    return found


class StackMove(NamedTuple):
    """How rows of a stack [L, ...] come to stages.

    have, cut: partitions of the stack, and of rows [pp, ...] in the order of stages.
    held: whether pp cuts the layers of the stack. at_home: and each is where it belongs.
    """

    have: NamedSharding
    cut: PartitionSpec
    held: bool
    at_home: bool


def move_to_stages(stack: jax.Array, rows: np.ndarray, cut: PartitionSpec) -> StackMove:
    """The move of a stack of which slots get these rows (`rows_of_slots`)."""
    pp = rows.shape[1]
    held = mesh_axes(stack.sharding.spec[:1]) == ("pp",)
    at_home = False
    if held:
        homes = rows // (len(stack) // pp)
        at_home = bool(np.all((rows < 0) | (homes == np.arange(pp))))
    return StackMove(stack.sharding, cut, held, at_home)


def row_of_each_stage(stack: jax.Array, rows: jax.Array, move: StackMove) -> jax.Array:
    """[L, ...] -> [pp, ...], whose row s is row rows[s] of the stack, zeros for -1.

    It is done by hand, as the compiler of jax 0.11.2 does not survive doing it by itself.
    """
    have, cut, held, at_home = move
    parallel = parallel_of(have.mesh)
    old = [*have.spec, *[None] * (stack.ndim - len(have.spec))]
    new = [*cut, *[None] * (stack.ndim - len(cut))]
    changed = [dim for dim in range(1, stack.ndim) if old[dim] != new[dim]]

    def gathered(x: jax.Array, dims: list[int]) -> jax.Array:
        for dim in dims:
            x = parallel.all_gather(x, mesh_axes((old[dim],)), dim)
        return x

    def body(x: jax.Array, rows: jax.Array) -> jax.Array:
        stage, each = parallel.index("pp"), len(x)
        own = jnp.maximum(rows, 0)
        if at_home:
            mine = gathered(x[own[stage] - each * stage][None], changed)
        elif held:
            mine = jnp.zeros_like(x[:1])
            for number in range(parallel.pp):
                here = jnp.where(own[number] // each == stage, x[own[number] % each], 0)
                there = parallel.psum(here, "pp").astype(x.dtype)
                mine = jnp.where(stage == number, there, mine)
            mine = gathered(mine, changed)
        else:
            of_all = gathered(gathered(x, [0])[own], changed)
            mine = of_all[stage][None]
        mine = jnp.where(rows[stage] < 0, jnp.zeros_like(mine), mine)
        for dim in changed:
            mine = parallel.shard(mine, mesh_axes((new[dim],)), dim)
        return mine

    if have.mesh.devices.flat[0].platform == "cpu":
        body = in_program_order(body)
    specs = PartitionSpec(*old), PartitionSpec()
    return on_shards(body, have.mesh, specs, PartitionSpec(*new))(stack, rows)


def own_layers(params: dict, layout: Layout | None) -> dict:
    """A device's part of weights, of layers without the axis of stages."""
    if layout is None:
        return params

    def own(weight: jax.Array | Channels8) -> Any:
        one = jax.tree.map(lambda x: x[0], weight)
        if isinstance(one, Channels8):  # to which the axis is one more of matrices
            one = Channels8(one.values, one.scales, one.inputs, one.lead - 1)
        return one

    def of_stack(weights: dict) -> dict:
        return jax.tree.map(own, weights, is_leaf=lambda x: isinstance(x, Channels8))

    return {name: of_stack(w) if name in layout.stacks else w for name, w in params.items()}
