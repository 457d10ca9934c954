"""Low-rank adapters of a model, and its weights with them merged, block by block.

A merged weight is W + scale * a b, computed in fp32 once; with DoRA each output of it is stretched
to a trained length. Invariant: a block is the same whatever blocks are asked for, because each sum
over the rank is made in one order.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mjax.checkpoint.base.source import Index, Source, block_shape, blocks
from mjax.checkpoint.base.source import Path as Leaf
from mjax.errors import UserError
from mjax.models.base.adapted import is_of_adapter, part_path, part_shapes
from mjax.sharding.spec import ParamSpec

ADAPTER_PARTS = ("a", "b", "magnitude")
_PRODUCT_BLOCK = (
    2**16
)  # numbers of a product that are summed up at a time; they stay in a core's cache


@dataclass(frozen=True)
class Adapters:
    """Arrays that were trained beside a frozen base, in mjax's layout.

    arrays: the parts "a", "b" and "magnitude" of adapters and parameters trained whole, by path. A
        magnitude is 0 where an output has no adapter.
    scales: the factor of each adapter's product, by the path of its weight.
    rslora: whether scales are alpha / sqrt(rank) rather than alpha / rank.
    dropout: of an adapter's input while training.
    base: the folder or the name of the weights that they belong to, if it is known.
    """

    arrays: Mapping[Leaf, np.ndarray]
    scales: Mapping[Leaf, float]
    rslora: bool = False
    dropout: float = 0.0
    base: str | None = None

    def part(self, path: Leaf, name: str) -> np.ndarray | None:
        """One array of the adapter of the weight at `path`."""
        return self.arrays.get(part_path(path, name))

    @property
    def dora(self) -> bool:
        return any(path[-1] == "magnitude" for path in self.arrays)

    @property
    def whole(self) -> dict[Leaf, np.ndarray]:
        """The parameters that were trained whole."""
        return {path: array for path, array in self.arrays.items() if not is_of_adapter(path)}


def adapter_alpha(scale: float, rank: int, rslora: bool) -> float:
    """The alpha that gives this scale, a whole number where it is nearly one."""
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    near = round(alpha)
    return near if math.isclose(alpha, near, rel_tol=1e-9) else alpha


def merged(base: Source, adapters: Adapters, specs: Mapping[Leaf, ParamSpec]) -> Source:
    """The weights of `base` with `adapters`, of a model that `specs` declare, by path.

    Adapted weights are fp32, others as they are stored. Raises `UserError` where an array does not
    fit the model.
    """
    require_shapes(adapters, specs)
    whole, lengths, lock = adapters.whole, {}, threading.Lock()

    def held(path: Leaf, index: Index) -> np.ndarray:
        return whole[path][index] if path in whole else base.read(path, index)

    def changed(path: Leaf, index: Index) -> np.ndarray:
        change = _change(adapters, path, specs[path], index)
        change *= np.float32(adapters.scales[path])
        return held(path, index).astype(np.float32) + change

    def length(path: Leaf) -> np.ndarray:
        with lock:
            if path not in lengths:
                lengths[path] = _lengths(lambda index: changed(path, index), specs[path])
            return lengths[path]

    def read(path: Leaf, index: Index) -> np.ndarray:
        if path not in adapters.scales:
            return held(path, index)
        value, wanted = changed(path, index), adapters.part(path, "magnitude")
        if wanted is None:
            return value
        at = _of_outputs(index, specs[path])
        return value * _length_factor(wanted[at], length(path)[at], specs[path])

    return replace(base, read=read)


def require_shapes(adapters: Adapters, specs: Mapping[Leaf, ParamSpec]) -> None:
    """Raise `UserError` for an array that does not fit the model."""
    for path, array, wanted in _wanted_shapes(adapters, specs):
        if array.shape != wanted:
            raise UserError(
                f"adapter: {'.'.join(path)} has shape {array.shape}, but the model makes it "
                f"{wanted}; is it of another model?"
            )


def _wanted_shapes(
    adapters: Adapters, specs: Mapping[Leaf, ParamSpec]
) -> Iterator[tuple[Leaf, np.ndarray, tuple[int, ...] | None]]:
    """(path, array, the shape that the model makes it or None) of all arrays."""
    for path, array in adapters.whole.items():
        yield path, array, specs[path].shape if path in specs else None
    for path in adapters.scales:
        a = adapters.part(path, "a")
        shapes = part_shapes(specs[path], a.shape[-1]) if path in specs else {}
        for name in ADAPTER_PARTS:
            array = adapters.part(path, name)
            if array is not None:
                yield part_path(path, name), array, shapes.get(name)


def _of_outputs(index: Index, spec: ParamSpec) -> Index:
    """The index of b or a magnitude that belongs to one of the weight."""
    return (*index[: spec.lead], slice(None), *index[spec.lead + spec.inputs :])


def _change(adapters: Adapters, path: Leaf, spec: ParamSpec, index: Index) -> np.ndarray:
    """The part `index` of a b, fp32, without the scale."""
    of_a = index[: spec.lead + spec.inputs]
    of_b = _of_outputs(index, spec)
    a = adapters.part(path, "a")[of_a].astype(np.float32)
    b = adapters.part(path, "b")[of_b].astype(np.float32)
    out = np.empty([s.stop - s.start for s in index], np.float32)
    for at in np.ndindex(out.shape[: spec.lead]):
        if "pair" not in spec.axes:
            out[at] = _summed_product(a[at], b[at])
            continue
        axis = spec.output_axes.index("pair")
        halves = index[spec.axes.index("pair")]
        into = np.moveaxis(out[at], spec.inputs + axis, 0)
        own = np.moveaxis(b[at], 1 + axis, 0)
        for i, half in enumerate(range(halves.start, halves.stop)):
            into[i] = _summed_product(a[at][..., half, :], own[i])
    return out


def _summed_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [*inputs, r] times b [r, *outputs], fp32: one product of numbers after the other is added.

    Libraries of linear algebra sum in an order that depends on the shapes.
    """
    rank = len(b)
    factors = a.reshape(-1, rank)
    columns = b.reshape(rank, -1)
    width = columns.shape[1]
    out = np.zeros((len(factors), width), np.float32)
    step = max(1, _PRODUCT_BLOCK // max(width, 1))
    for first in range(0, len(out), step):
        rows = slice(first, first + step)
        for i in range(rank):
            out[rows] += factors[rows, i, None] * columns[i]
    return out.reshape(*a.shape[:-1], *b.shape[1:])


def _lengths(read: Callable[[Index], np.ndarray], spec: ParamSpec) -> np.ndarray:
    """The length of each output's weights, fp64 [*lead, 1, *outputs]; `read(index)` gives them."""
    squares = np.zeros(part_shapes(spec, 1)["magnitude"])
    lead = tuple(range(spec.lead))
    inputs = tuple(range(spec.lead, spec.lead + spec.inputs))
    block = block_shape(spec.shape, 8, lead)
    for index in blocks(spec.shape, block):
        part = read(index).astype(np.float64)
        summed = np.square(part).sum(inputs)
        squares[_of_outputs(index, spec)] += np.expand_dims(summed, spec.lead)
    return np.sqrt(squares)


def _length_factor(wanted: np.ndarray, length: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """The factor of each output that gives it the length `wanted`, shaped as for the weight."""
    wanted, length = wanted.astype(np.float32), length.astype(np.float32)
    factor = np.divide(wanted, length, out=np.ones_like(wanted), where=wanted != 0)
    further_inputs = range(spec.lead, spec.lead + spec.inputs - 1)
    return np.expand_dims(factor, tuple(further_inputs))
