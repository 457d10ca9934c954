"""Room for adapters that come and go while a model is served: slots beside its weights.

Every matrix that can differ from token to token has arrays for as many adapters as there are slots,
of one rank. So an adapter changes numbers and no shape, and nothing is compiled. A slot without an
adapter is full of zeros.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.merged import Adapters
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.adapter_stack import (
    declared_adapters,
    read_adapters,
    require_stackable,
    with_arrays,
)
from mjax.interop.pretrained import Pretrained
from mjax.models.base.adapted import part_path


class AdapterSlots:
    """The adapters of slots 1 .. `count` of the model `cfg` that `specs` declare.

    rank: of the largest adapter.
    """

    def __init__(self, cfg: ModelConfig, specs: dict, count: int, rank: int):
        self.cfg, self.count, self.rank = cfg, count, rank
        self._specs = flatten_dict(specs)
        self._parts = {
            path: declared_adapters(spec, count + 1, rank)
            for path, spec in self._specs.items()
            if spec.matmul is not None and not spec.is_of_experts
        }
        self._filled: dict[int, Adapters] = {}

    def read(self, folder: str | Path) -> Adapters:
        """The adapters in a folder. Raises `UserError` for those that no slot can have."""
        found = read_adapters(folder, self.cfg, unflatten_dict(self._specs))
        require_stackable(str(folder), found, self._specs)
        rank = max((found.part(path, "a").shape[-1] for path in found.scales), default=0)
        if rank > self.rank:
            raise UserError(
                f"{folder}: its rank is {rank}, and slots are for {self.rank}: start the server "
                f"with --max-lora-rank {rank}"
            )
        return found

    def put(self, slot: int, adapters: Adapters | None) -> dict[Leaf, np.ndarray]:
        """Fill a slot, or empty it; returns the arrays that have changed, by path."""
        old = self._filled.pop(slot, None)
        if adapters is not None:
            self._filled[slot] = adapters
        changed = {path for each in (old, adapters) if each is not None for path in each.scales}
        return self._arrays(changed)

    def beside(self, model: Pretrained) -> Pretrained:
        """A loaded model of this kind with all slots beside its weights."""
        declared = dict(self._specs)
        for path, parts in self._parts.items():
            declared |= {part_path(path, name): spec for name, spec in parts.items()}
        arrays = self._arrays(self._parts)
        return with_arrays(model, unflatten_dict(declared), unflatten_dict(arrays))

    def _arrays(self, paths: Iterable[Leaf]) -> dict[Leaf, np.ndarray]:
        """The arrays of all slots of some weights, fp32."""
        found = {}
        for path in paths:
            for name, spec in self._parts[path].items():
                array = np.zeros(spec.shape, np.float32)
                for slot, each in self._filled.items():
                    if path in each.scales:
                        self._fill(array, name, path, slot, each)
                found[part_path(path, name)] = array
        return found

    def _fill(self, array: np.ndarray, name: str, path: Leaf, slot: int, own: Adapters) -> None:
        """Write one slot of one array; what the adapter's rank leaves stays zero."""
        lead = self._specs[path].lead
        here = np.moveaxis(array, lead, 0)[slot]
        if name == "scales":
            here[...] = own.scales[path]
            return
        part = own.part(path, name)
        axis = lead if name == "b" else here.ndim - 1
        np.moveaxis(here, axis, 0)[: part.shape[axis]] = np.moveaxis(part, axis, 0)


def slots_of(model: Pretrained, count: int, rank: int) -> AdapterSlots:
    """Empty slots for adapters of a loaded model."""
    return AdapterSlots(model.cfg, model.definition.specs, count, rank)


def with_slots_filled(
    model: Pretrained, slots: AdapterSlots, folders: Sequence[str | Path]
) -> Pretrained:
    """The model with slots, of which the first have the adapters in folders."""
    if len(folders) > slots.count:
        raise UserError(f"{len(folders)} adapters and max_loras={slots.count}: raise it")
    for slot, folder in enumerate(folders, 1):
        slots.put(slot, slots.read(folder))
    return slots.beside(model)


def with_changed(params: dict, arrays: Mapping[Leaf, np.ndarray]) -> dict:
    """Parameters that `take_apart` gave with other numbers in some, on the same devices."""
    flat = flatten_dict(params)

    def placed(new: np.ndarray, old: jax.Array) -> jax.Array:
        return jax.device_put(new.astype(old.dtype), old.sharding)

    for path, array in arrays.items():
        old = flat[path]
        is_list = isinstance(old, list)
        flat[path] = list(map(placed, array, old)) if is_list else placed(array, old)
    return unflatten_dict(flat)
