"""The base of a run with adapters as the run stores it: rounded, in NF4, without principal parts.

Its digest is that of the run's record, if the weights that it comes from are those of the run.
Invariant: at most a few matrices are computed anew at a time.
"""

import functools
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.checkpoint.base.base_digest import digest_of
from mjax.checkpoint.base.source import THREADS, Index, Source
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.source_digest import sum_of_part, sums_of_source
from mjax.interop.principal import take_principal
from mjax.kernels.nf4.parameters import (
    codes_of,
    is_magnitude,
    round_weight,
    value_of_base,
    wide_spec,
)
from mjax.models.base.adapted import base_of, is_of_adapter, part_path
from mjax.sharding.spec import ParamSpec


class HeldMatrix(NamedTuple):
    """One layer or expert of a weight, every array with leading axes of size 1.

    value: as products with it read it. stored: the arrays that the run holds, by path. a and b: its
    principal part, or None.
    """

    value: np.ndarray
    stored: dict[Leaf, np.ndarray]
    a: np.ndarray | None
    b: np.ndarray | None


@dataclass(frozen=True)
class HeldBase:
    """The base of a run. `source`: the weights that the run began with, in its shapes.

    specs: the run's declarations by path. compute: the dtype of the computation. is_principal:
    adapters began as the principal parts of their weights, which lost them.
    """

    source: Source
    specs: Mapping[Leaf, ParamSpec]
    compute: str
    is_principal: bool

    @functools.cached_property
    def principal(self) -> list[Leaf]:
        """The weights that lost their principal parts."""
        adapted = [base_of(path) for path in self.specs if is_of_adapter(path) and path[-1] == "b"]
        is_matmul = [path for path in adapted if self.specs[path].matmul is not None]
        return is_matmul if self.is_principal else []

    @functools.cached_property
    def codes(self) -> dict[Leaf, ParamSpec]:
        """The declarations of weights in NF4, by path."""
        return codes_of(unflatten_dict(self.specs))

    def read(self, path: Leaf, index: Index) -> np.ndarray:
        """A part of a weight as the run computed with it, as `Source.read`."""
        held = self.specs[path].held
        if path not in self.codes and path not in self.principal:
            part = self.source.read(path, index)
            return part if held is None else part.astype(jnp.dtype(held), copy=False)
        lead = self.specs[path].lead
        rows = [range(s.start, s.stop) for s in index[:lead]]
        parts = []
        for at in itertools.product(*rows):
            matrix = self._matrix(path, at).value
            matrix = matrix.squeeze(tuple(range(lead)))
            parts.append(matrix[index[lead:]])
        leading = map(len, rows)
        return np.stack(parts).reshape(*leading, *parts[0].shape)

    def digest(self) -> str:
        """The digest of the base; reads it all."""
        frozen = {path: spec for path, spec in self.specs.items() if not spec.is_trained}
        changed = {*self.codes, *self.principal}
        plain = {p: s for p, s in frozen.items() if p not in changed and not is_magnitude(p)}
        sums = dict.fromkeys(frozen, 0) | sums_of_source(self.source, plain)
        for path in sorted(changed):
            spec = self.specs[path]
            for at in np.ndindex(spec.shape[: spec.lead]):
                for name, array in self._matrix(path, at).stored.items():
                    first = [*at] + [0] * (array.ndim - len(at))
                    sums[name] += sum_of_part(array, first, self.specs[name].shape)
        return digest_of(sums)

    def first_adapter(self, path: Leaf) -> dict[str, np.ndarray]:
        """ "a" and "b", with which the adapter of a weight began."""
        spec = self.specs[path]
        leading = spec.shape[: spec.lead]
        matrices = [self._matrix(path, at) for at in np.ndindex(leading)]
        found = {}
        for name in "ab":
            parts = np.concatenate([getattr(matrix, name) for matrix in matrices])
            found[name] = parts.reshape(self.specs[part_path(path, name)].shape)
        return found

    def _matrix(self, path: Leaf, at: tuple[int, ...]) -> HeldMatrix:
        with self._lock:
            return self._computed(path, at)

    @functools.cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @functools.cached_property
    def _computed(self) -> functools._lru_cache_wrapper:
        return functools.lru_cache(2 * THREADS)(self._compute)

    def _compute(self, path: Leaf, at: tuple[int, ...]) -> HeldMatrix:
        spec = self.specs[path]
        wide = wide_spec(spec) if path in self.codes else spec
        index = [slice(i, i + 1) for i in at]
        index += [slice(0, n) for n in wide.shape[spec.lead :]]
        part = self.source.read(path, tuple(index)).astype(jnp.dtype(self.compute))
        value, a, b = _on_one_device(part), None, None
        if path in self.principal:
            value, a, b = take_principal(value, wide, self.specs[part_path(path, "b")])
        stored = {path: value}
        if path in self.codes:
            stored, value = _rounded_to_nf4(value, path, spec)
        return HeldMatrix(*jax.device_get((value, stored, a, b)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rounded_to_nf4(
    value: jax.Array, path: Leaf, spec: ParamSpec
) -> tuple[dict[Leaf, jax.Array], jax.Array]:
    """(codes and magnitudes by path, the fp32 value that they stand for) of a part of a weight."""
    stored = round_weight(value, path, spec)
    return stored, value_of_base(stored, path, spec)


def _on_one_device(array: np.ndarray) -> jax.Array:
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("one",))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
