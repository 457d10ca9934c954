"""Low-rank adapters of a model, and its weights with them merged, block by block.

A merged weight is W + scale * a b, computed in fp32 once; with DoRA each output of it is stretched
to a trained length. Invariant: a block is the same whatever blocks are asked for, because each sum
over the rank is made in one order.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mjax.checkpoint.base.source import Index, Source, block_shape, blocks
from mjax.checkpoint.base.source import Path as Leaf
from mjax.errors import UserError
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec

ADAPTER = "_lora"  # ends the name of the entry that holds the adapter of a parameter
_AT_ONCE = 2**16  # numbers of a product that are summed up at a time; they stay in a core's cache


@dataclass(frozen=True)
class Adapters:
    """What a run trained beside a frozen base, in mjax's layout.

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
        of_adapters = {part_path(path, name) for path in self.scales for name in PARTS}
        return {path: array for path, array in self.arrays.items() if path not in of_adapters}


PARTS = ("a", "b", "magnitude")


def part_path(path: Leaf, name: str) -> Leaf:
    """The path of an array of the adapter of the weight at `path`."""
    return (*path[:-1], path[-1] + ADAPTER, name)


def part_shapes(spec: ParamSpec, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of an adapter of that rank, by name."""
    lead, inputs = _lead(spec), _lead(spec) + spec.inputs
    halves = (2,) if "pair" in spec.axes else ()
    first, outputs = spec.shape[:lead], spec.shape[inputs:]
    return {
        "a": (*spec.shape[:inputs], *halves, rank),
        "b": (*first, rank, *outputs),
        "magnitude": (*first, 1, *outputs),
    }


def merged(base: Source, adapters: Adapters, specs: Mapping[Leaf, ParamSpec]) -> Source:
    """The weights of `base` with `adapters`, of a model that `specs` declare, by path.

    Raises `UserError` where an array does not fit the model.
    """
    for path, array in _with_wanted_shapes(adapters, specs):
        if array[0].shape != array[1]:
            raise UserError(
                f"adapter: {'.'.join(path)} has shape {array[0].shape}, but the model makes it "
                f"{array[1]}; is it of another model?"
            )
    whole, lengths, lock = adapters.whole, {}, threading.Lock()

    def held(path: Leaf, index: Index) -> np.ndarray:
        return whole[path][index] if path in whole else base.read(path, index)

    def changed(path: Leaf, index: Index) -> np.ndarray:
        a, b = (adapters.part(path, name) for name in ("a", "b"))
        change = _change(a, b, specs[path], index)
        change *= np.float32(adapters.scales[path])
        return held(path, index).astype(np.float32) + change

    def read(path: Leaf, index: Index) -> np.ndarray:
        if path not in adapters.scales:
            return held(path, index)
        magnitude = adapters.part(path, "magnitude")
        if magnitude is None:
            return changed(path, index)
        spec = specs[path]
        with lock:
            if path not in lengths:
                lengths[path] = _lengths(lambda at: changed(path, at), spec)
        lead, inputs = _lead(spec), _lead(spec) + spec.inputs
        at = (*index[:lead], slice(None), *index[inputs:])
        wanted = magnitude.astype(np.float32)[at]
        found = lengths[path][at].astype(np.float32)
        stretch = np.divide(wanted, found, out=np.ones_like(wanted), where=wanted != 0)
        ones = (1,) * spec.inputs
        sizes = stretch.shape
        return changed(path, index) * stretch.reshape(*sizes[:lead], *ones, *sizes[lead + 1 :])

    return replace(base, read=read)


def _with_wanted_shapes(adapters: Adapters, specs: Mapping[Leaf, ParamSpec]):
    """(path, (array, the shape that the model makes it)) of all arrays."""
    for path, array in adapters.whole.items():
        yield path, (array, specs[path].shape if path in specs else None)
    for path in adapters.scales:
        a = adapters.part(path, "a")
        shapes = part_shapes(specs[path], a.shape[-1])
        for name in PARTS:
            array = adapters.part(path, name)
            if array is not None:
                yield part_path(path, name), (array, shapes[name])


def _lead(spec: ParamSpec) -> int:
    """How many axes enumerate matrices before their inputs: layers, experts."""
    return next(i for i, axis in enumerate(spec.axes) if axis not in ENUMERATING_AXES)


def _change(a: np.ndarray, b: np.ndarray, spec: ParamSpec, index: Index) -> np.ndarray:
    """The part `index` of a b, fp32, without the scale."""
    lead, inputs = _lead(spec), _lead(spec) + spec.inputs
    a = a[index[:inputs]].astype(np.float32)
    b = b[(*index[:lead], slice(None), *index[inputs:])].astype(np.float32)
    out = np.empty([s.stop - s.start for s in index], np.float32)
    for at in np.ndindex(out.shape[:lead]):
        if "pair" not in spec.axes:
            out[at] = _product(a[at], b[at])
            continue
        axis = spec.axes.index("pair")
        before = (slice(None),) * (axis - inputs)
        rows = (slice(None),) * spec.inputs
        for i, half in enumerate(range(index[axis].start, index[axis].stop)):
            product = _product(a[at][..., half, :], b[at][(slice(None), *before, i)])
            out[at][(*rows, *before, i)] = product
    return out


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [*inputs, r] times b [r, *outputs], fp32: one product of numbers after the other is added.

    Libraries of linear algebra sum in an order that depends on the shapes.
    """
    rows, columns = a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)
    out = np.zeros((len(rows), columns.shape[1]), np.float32)
    step = max(1, _AT_ONCE // max(columns.shape[1], 1))
    for first in range(0, len(rows), step):
        part, factors = out[first : first + step], rows[first : first + step]
        for i, row in enumerate(columns):
            part += factors[:, i : i + 1] * row
    return out.reshape(*a.shape[:-1], *b.shape[1:])


def _lengths(read, spec: ParamSpec) -> np.ndarray:
    """The length of each output's weights, fp64 [*lead, 1, *outputs]; `read(index)` gives them."""
    lead, inputs = _lead(spec), _lead(spec) + spec.inputs
    squares = np.zeros((*spec.shape[:lead], 1, *spec.shape[inputs:]))
    for index in blocks(spec.shape, block_shape(spec.shape, 8, tuple(range(lead)))):
        part = np.square(read(index).astype(np.float64))
        summed = part.sum(tuple(range(lead, inputs)))
        here = summed.reshape(*summed.shape[:lead], 1, *summed.shape[lead:])
        squares[(*index[:lead], slice(None), *index[inputs:])] += here
    return np.sqrt(squares)


def scale_of(alpha: float, rank: int, rslora: bool) -> float:
    """The factor of an adapter's product."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def alpha_of(scale: float, rank: int, rslora: bool) -> float:
    """The alpha that gives this scale, a whole number where it is nearly one."""
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    near = round(alpha)
    return near if math.isclose(alpha, near, rel_tol=1e-9) else alpha
