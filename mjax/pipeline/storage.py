"""Parameters as the mesh stores them, and back: pipeline order and padding.

On the mesh a stack of L layers is stored as [pp * v * slots, ...] in slot order, so that a
contiguous shard over pp is a device's chunks. A dimension that the ZeRO axes do not divide is
padded (`sharding/rules.py`); padding is zero and stays so. Invariant: whatever leaves the trainer
(parameters, gradients, checkpoints) is in canonical order [L] and shape, hence independent of
layout and mesh. Nothing is copied if the two forms are the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.pipeline.layout import Layout
from mjax.sharding.collectives import Parallel, mesh_axes
from mjax.sharding.mesh import on_shards, parallel_of
from mjax.sharding.rules import Padding, weight_partition
from mjax.sharding.spec import ParamSpec, is_spec


class StoredForm(NamedTuple):
    """How one parameter is stored.

    rows: of a stack, the canonical row of each stored row, -1 for padding; None: all in order.
    padding: of a dimension that shards do not divide, or None.
    """

    rows: tuple[int, ...] | None
    padding: Padding | None


CANONICAL = StoredForm(None, None)


@dataclass(frozen=True)
class Storage:
    """How all parameters are stored.

    layout: of the pipeline, or None. paddings: the padding of each parameter, by its key path.
    """

    layout: Layout | None = None
    paddings: dict[str, Padding | None] = field(default_factory=dict)

    @property
    def is_canonical(self) -> bool:
        """Whether every parameter is stored as it is in checkpoints."""
        if any(self.paddings.values()):
            return False
        if self.layout is None:
            return True
        return all(_in_order(self.layout.storage_rows(stack)) for stack in self.layout.stacks)

    def form(self, path: tuple) -> StoredForm:
        """How the parameter (or a tensor like it) at a key path is stored."""
        rows = None
        stack = _stack_of(self.layout, path)
        if stack is not None:
            storage_rows = self.layout.storage_rows(stack)
            if not _in_order(storage_rows):
                rows = tuple(map(int, storage_rows))
        return StoredForm(rows, entry_of_parameter(self.paddings, path))


def to_storage(storage: Storage, tree: dict) -> dict:
    """Parameters (or a tree like them, at any depth) as stored, from their canonical form.

    Stacks go from [L, ...] to [pp * v * slots, ...]; padding is zero.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _store(x, storage.form(path)), tree)


def to_canonical(storage: Storage, tree: dict) -> dict:
    """The inverse of `to_storage`."""
    return jax.tree_util.tree_map_with_path(lambda path, x: _restore(x, storage.form(path)), tree)


def _store(x: jax.Array, form: StoredForm) -> jax.Array:
    if form.rows is not None:
        x = _take_rows(x, np.asarray(form.rows))
    if form.padding is not None:
        x = _pad(x, form.padding)
    return x


def _restore(x: jax.Array, form: StoredForm) -> jax.Array:
    if form.padding is not None:
        x = _unpad(x, form.padding)
    if form.rows is None:
        return x
    rows = np.asarray(form.rows)
    padding_last = np.where(rows < 0, rows.size, rows)
    stored_rows = np.argsort(padding_last, kind="stable")
    layers = np.count_nonzero(rows >= 0)
    return _take_rows(x, stored_rows[:layers])


def storage_specs(layout: Layout | None, specs: dict) -> dict:
    """Declarations of the parameters in the order they are stored in, without padding."""

    def stored(path: tuple, spec: ParamSpec) -> ParamSpec:
        stack = _stack_of(layout, path)
        if stack is None:
            return spec
        rows = layout.storage_rows(stack).size
        return replace(spec, shape=(rows, *spec.shape[1:]))

    return jax.tree_util.tree_map_with_path(stored, specs, is_leaf=is_spec)


def global_indices(
    storage: Storage, path: tuple, spec: ParamSpec, partition: PartitionSpec, parallel: Parallel
) -> tuple[jax.Array, ...]:
    """For each dimension of a parameter, the canonical index of every entry of the local shard.

    It reads the device's place in the mesh. `spec` is as `storage_specs` gives it. Padding gets
    any index.
    """
    rows, padding = storage.form(path)
    indices = []
    for dim, entry in enumerate(partition):
        axes = mesh_axes((entry,))
        is_padded = padding is not None and padding.dim == dim
        length = padding.blocks * padding.padded if is_padded else spec.shape[dim]
        shard = 0
        for axis in axes:
            shard = shard * parallel.size(axis) + parallel.index(axis)
        local = length // parallel.size(*axes)
        index = shard * local + jnp.arange(local)
        if is_padded:
            block, place = index // padding.padded, index % padding.padded
            index = block * padding.length + place
        if dim == 0 and rows is not None:
            index = jnp.asarray(rows)[index]
        indices.append(index)
    return tuple(indices)


def _stack_of(layout: Layout | None, path: tuple) -> str | None:
    """The stack that a key path lies in; None also without a pipeline."""
    stacks = () if layout is None else layout.stacks
    for key in path:
        name = getattr(key, "key", None)
        if name in stacks:
            return name
    return None


def _take_rows(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """These rows of x, zeros for -1."""
    zero_row = jnp.zeros_like(x[:1])
    is_first = (np.diff(rows, prepend=-2) != 1) | (rows < 0) | (rows == 0)
    firsts = np.flatnonzero(is_first)
    pieces = []
    for consecutive in np.split(rows, firsts[1:]):
        first, last = consecutive[0], consecutive[-1]
        pieces.append(x[first : last + 1] if first >= 0 else zero_row)
    return jnp.concatenate(pieces)


def _in_order(rows: np.ndarray) -> bool:
    return np.array_equal(rows, np.arange(rows.size))


def entry_of_parameter(table: dict[str, object], path: tuple) -> object | None:
    """The entry of `table`, by key paths of parameters, that `path` belongs to.

    The path of a parameter ends `path`: that of a moment in the optimizer's state, for example.
    """
    for i in range(len(path)):
        name = jax.tree_util.keystr(path[i:])
        if name in table:
            return table[name]
    return None


def _pad(x: jax.Array, padding: Padding) -> jax.Array:
    blocks = _in_blocks(x, padding, padding.length)
    widths = [(0, 0)] * blocks.ndim
    widths[padding.dim + 1] = 0, padding.padded - padding.length
    return _joined(jnp.pad(blocks, widths), padding)


def _unpad(x: jax.Array, padding: Padding) -> jax.Array:
    blocks = _in_blocks(x, padding, padding.padded)
    unpadded = jax.lax.slice_in_dim(blocks, 0, padding.length, axis=padding.dim + 1)
    return _joined(unpadded, padding)


def _in_blocks(x: jax.Array, padding: Padding, length: int) -> jax.Array:
    """Split the padded dimension in two: [.., blocks * length, ..] -> [.., blocks, length, ..]."""
    dim = padding.dim
    before = x.shape[:dim]
    after = x.shape[dim + 1 :]
    return x.reshape(*before, padding.blocks, length, *after)


def _joined(blocks: jax.Array, padding: Padding) -> jax.Array:
    dim = padding.dim
    before = blocks.shape[:dim]
    after = blocks.shape[dim + 2 :]
    return blocks.reshape(*before, -1, *after)


# ---- arrays on the mesh ----------------------------------------------------------------------


def canonical(storage: Storage, tree: dict) -> dict:
    """Global arrays in canonical form, from those as stored."""
    if storage.is_canonical:
        return tree
    return _convert(storage, _restore, tree, canonical_abstract(storage, tree))


def from_canonical(storage: Storage, tree: dict, abstract: dict) -> dict:
    """Global arrays as stored and sharded like `abstract`, from their canonical form."""
    if storage.is_canonical:
        return tree
    return _convert(storage, _store, tree, abstract)


def _convert(storage: Storage, convert: Callable, tree: dict, abstract: dict) -> dict:
    """Every array converted by a program of its own, which bounds the memory that this takes."""

    def one(path: tuple, x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        form = storage.form(path)
        if form == CANONICAL:
            return x
        # Moments may live on the host.
        have = x.sharding.with_memory_kind("device")
        want = wanted.sharding.with_memory_kind("device")
        x = jax.device_put(x, have)
        x = _convert_and_reshard(convert, form, have, want, x)
        x = jax.device_put(x, wanted.sharding)
        return jax.block_until_ready(x)  # CPU devices may not mix two programs

    return jax.tree_util.tree_map_with_path(one, tree, abstract)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _convert_and_reshard(
    convert: Callable, form: StoredForm, have: NamedSharding, want: NamedSharding, x: jax.Array
) -> jax.Array:
    """`convert` between two shardings, by hand: all-gather, convert, take this device's shard.

    Only dimensions that `convert` changes or that are split differently are gathered. The compiler
    of jax 0.11.2 does not survive doing this by itself.
    """
    old = [*have.spec, *[None] * (x.ndim - len(have.spec))]
    new = [*want.spec, *[None] * (x.ndim - len(want.spec))]
    gathered = {dim for dim in range(x.ndim) if old[dim] != new[dim]}
    if form.rows is not None:
        gathered.add(0)
    if form.padding is not None:
        gathered.add(form.padding.dim)

    def body(x: jax.Array) -> jax.Array:
        for dim in gathered:
            axes = mesh_axes((old[dim],))
            if axes:
                x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        x = convert(x, form)
        for dim in gathered:
            axes = mesh_axes((new[dim],))
            devices = math.prod(want.mesh.shape[axis] for axis in axes)
            size = x.shape[dim] // devices
            first = jax.lax.axis_index(axes) * size if axes else 0
            x = jax.lax.dynamic_slice_in_dim(x, first, size, dim)
        return x

    return on_shards(body, want.mesh, PartitionSpec(*old), PartitionSpec(*new))(x)


def canonical_abstract(storage: Storage, tree: dict) -> dict:
    """Canonical shapes and shardings of arrays (or of shapes with shardings) as stored."""
    if storage.is_canonical:
        return tree

    def one(stored: jax.ShapeDtypeStruct, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = stored.sharding
        if shape.shape != stored.shape:
            sharding = even_sharding(sharding, shape.shape)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    shapes = jax.eval_shape(partial(to_canonical, storage), tree)
    return jax.tree.map(one, tree, shapes)


def sharded_by_stages(spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    """How a parameter in canonical form lies on a mesh whose stages hold equal parts of stacks."""
    parallel = parallel_of(mesh)
    cut = weight_partition(spec, replace(parallel, pp=1))
    if not spec.is_stacked or parallel.pp == 1:
        return NamedSharding(mesh, cut)
    wanted = PartitionSpec("pp", *cut[1:])
    return even_sharding(NamedSharding(mesh, wanted), spec.shape)


def even_sharding(like: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding of `shape` over the mesh axes of `like` that divides every dimension.

    Each axis stays on its dimension if it divides that. Otherwise it goes to the largest dimension
    that it divides, or to none.
    """
    entries: list[list[str]] = [[] for _ in shape]
    local = list(shape)
    for home, entry in enumerate(like.spec):
        for axis in mesh_axes((entry,)):
            size = like.mesh.shape[axis]
            divisible = [dim for dim, length in enumerate(local) if length % size == 0]
            if not divisible:
                continue
            dim = home if home in divisible else max(divisible, key=local.__getitem__)
            local[dim] //= size
            entries[dim].append(axis)
    spec = PartitionSpec(*(tuple(axes) or None for axes in entries))
    return NamedSharding(like.mesh, spec, memory_kind=like.memory_kind)
