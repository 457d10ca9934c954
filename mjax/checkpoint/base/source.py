"""Weights that are read piece by piece: what importing from any format comes down to.

Invariant: a piece is the same whatever pieces are asked for, so a source can fill the shards of any
mesh, or a checkpoint on disk, without ever holding a whole model: at most `SOURCE_BLOCK` bytes a
thread.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.base.safetensors import require_fp16_range
from mjax.config.schema.model import ModelConfig

Path = tuple[str, ...]  # of a parameter in the nested dict, e.g. ("dense", "attention", "q")
Index = tuple[slice, ...]  # one per axis of the parameter, step 1

SOURCE_BLOCK = 64 * 2**20  # bytes that are read, converted and handed on at a time
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Source:
    """`read(path, index)` gives that part of a parameter in mjax's layout, in fp32 or in the dtype
    it is stored in; the rows that pad a vocabulary are zero. `check()` raises `UserError` for
    missing, extra or mis-shaped tensors, reading no weights. `has`: the parameters that there are;
    None: all of the model's. `unread()` makes the side file of the tensors that the model lacks.
    `name`: the weights, in a message on them."""

    cfg: ModelConfig
    read: Callable[[Path, Index], np.ndarray]
    check: Callable[[], None]
    has: frozenset[Path] | None = None
    unread: Callable[[], dict[str, bytes]] = dict
    name: str = "the weights to start from"


def flat(tree: dict) -> dict[Path, object]:
    """Nested dict (of specs, arrays, ...) -> path to leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_names_of(path): leaf for path, leaf in leaves}


def _names_of(path: tuple) -> Path:
    """Keys of dicts, and the numbers of entries of lists as text."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def array_source(cfg: ModelConfig, params: dict) -> Source:
    """The parameters of a live model, all of whose shards this process can read."""
    leaves = flat(params)
    return Source(cfg, lambda path, index: np.asarray(leaves[path][index]), lambda: None)


def layers_source(source: Source) -> Source:
    """A source of single layers of stacks: the number of a layer ends the path of its stack."""

    def read(path: Path, index: Index) -> np.ndarray:
        *stack, last = path
        if not last.isdecimal():
            return source.read(path, index)
        row = int(last)
        return source.read(tuple(stack), (slice(row, row + 1), *index))[0]

    return replace(source, read=read)


def block_shape(
    shape: tuple[int, ...], itemsize: int, first: tuple[int, ...] = (0,)
) -> tuple[int, ...]:
    """A block of `shape`: at most `SOURCE_BLOCK` bytes; cut along `first`, then longest axes."""
    block = list(shape)
    rest = sorted(set(range(len(shape))) - set(first), key=lambda i: -shape[i])
    for axis in [*first, *rest][: len(shape)]:
        row = itemsize * math.prod(block) // max(block[axis], 1)
        block[axis] = max(1, min(block[axis], SOURCE_BLOCK // max(row, 1)))
    return tuple(block)


def blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Index]:
    """The grid of blocks that covers `shape`, in row-major order."""
    cuts = (
        [slice(a, min(a + step, n)) for a in range(0, n, step)]
        for n, step in zip(shape, block, strict=True)
    )
    return product(*cuts)


def run_all(tasks: Iterable[Callable[[], object]]) -> list:
    """The results of `tasks`, run by `THREADS` threads; the first error cancels those not begun."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def arrays(source: Source, abstract: dict) -> dict:
    """Tree of `ShapeDtypeStruct` with shardings -> tree of arrays, read from `source`.

    Each process reads the shards of its own devices, a shard that several of them hold once.
    """
    leaves, shards = flat(abstract), {}
    for path, leaf in leaves.items():
        places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        for device, index in places.items():
            ranges = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, leaf.shape, strict=True))
            key = path, tuple((s.start, s.stop) for s in ranges)
            shards.setdefault(key, (path, ranges, []))[2].append(device)
    tasks = [
        partial(_fill, source, path, ranges, leaves[path].dtype, devices)
        for path, ranges, devices in shards.values()
    ]
    filled: dict[Path, list] = {}
    for (path, _, _), parts in zip(shards.values(), run_all(tasks), strict=True):
        filled.setdefault(path, []).extend(parts)

    def whole(path, leaf):
        path = _names_of(path)
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, filled[path])

    return jax.tree_util.tree_map_with_path(whole, abstract)


def _fill(source: Source, path: Path, ranges: Index, dtype: np.dtype, devices: list) -> list:
    """The shard `ranges` of a parameter on each of `devices`, passed through the host by blocks."""
    shape = tuple(s.stop - s.start for s in ranges)
    block = block_shape(shape, dtype.itemsize)
    if block == shape:
        part = _rounded_block(source, path, ranges, dtype)
        return [jax.device_put(part, device) for device in devices]
    made = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for index in blocks(shape, block):
        here = tuple(
            slice(r.start + i.start, r.start + i.stop) for r, i in zip(ranges, index, strict=True)
        )
        part = _rounded_block(source, path, here, dtype)
        at = tuple(np.int32(i.start) for i in index)
        made = [_put(shard, part, at) for shard in made]
        jax.block_until_ready(made)  # or blocks would pile up on the host
    return made


def _rounded_block(source: Source, path: Path, index: Index, dtype: np.dtype) -> np.ndarray:
    """A part of a parameter in `dtype`; raises `UserError` where float16 does not hold it."""
    with np.errstate(over="ignore"):
        part = source.read(path, index).astype(dtype, copy=False)
    require_fp16_range(part, ".".join(path))
    return part


@partial(jax.jit, donate_argnums=0)
def _put(shard: jax.Array, part: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, part, at)
