"""Weights of a model with fewer layers and narrower ones: parts of the arrays of the whole.

A parameter's spec names its axes, so a choice of entries for each axis says of every parameter
which part is kept. Invariant: what is kept has the bits that it had.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mjax.checkpoint.base.source import Index, Path, Source, flat
from mjax.config.languages.layer_pattern import pattern_of, stack_index, stack_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec


@dataclass(frozen=True)
class KeptParts:
    """The parts that are kept of a model: numbers in rising order.

    layers: of the layers. embed: of the entries of the residual stream.
    within: of the axes of a layer's branches, "mlp", "heads" and "kv_heads", by layer and axis.
        An axis that is not there is kept whole.
    """

    layers: np.ndarray
    embed: np.ndarray
    within: Mapping[tuple[int, str], np.ndarray]


# The axes that are cut within branches of these names. Others, as of experts, keep their sizes.
CUT = {"mlp": ("mlp",), "attention": ("heads", "kv_heads")}


def pruned(source: Source, kept: KeptParts) -> Source:
    """The weights that are kept of a source. Raises `UserError` where no model has their shapes."""
    whole, cfg = source.cfg, pruned_config(source.cfg, kept)
    specs, old_specs = flat(definition_of(cfg).specs), flat(definition_of(whole).specs)
    rows = stack_index(whole.layer_kinds)
    layers: dict[str, list[int]] = {}  # kept ones of each stack
    for number in kept.layers:
        layers.setdefault(stack_of(whole.layer_kinds[number]), []).append(int(number))

    def choice(path: Path, spec: ParamSpec, number: int | None) -> list[np.ndarray]:
        """The entries that are kept of each axis of a parameter; `number` is that of its layer."""
        found = []
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            entries = np.arange(size)
            if axis == "layers":
                entries = np.array([rows[number]])
            elif axis == "embed":
                entries = kept.embed
            elif number is not None and axis in CUT.get(path[1], ()):
                entries = kept.within.get((number, axis), entries)
            found.append(entries)
        return found

    def read(path: Path, index: Index) -> np.ndarray:
        old = old_specs[path]
        if path[0] not in layers:
            entries = [e[i] for e, i in zip(choice(path, old, None), index, strict=True)]
            return _taken(source, path, entries)
        parts = []
        for number in layers[path[0]][index[0]]:
            first, *others = choice(path, old, number)
            cut = [e[i] for e, i in zip(others, index[1:], strict=True)]
            parts.append(_taken(source, path, [first, *cut]))
        return np.concatenate(parts)

    for path, spec in specs.items():
        for number in layers.get(path[0], [None]):
            shape = tuple(map(len, choice(path, old_specs[path], number)))
            wanted = (1, *spec.shape[1:]) if number is not None else spec.shape
            if shape != wanted:
                raise UserError(
                    f"{'.'.join(path)}: its axes {spec.axes} would keep {shape}, and the pruned "
                    f"model wants {wanted}; keep the size of this part, or prune layers alone"
                )
    return replace(source, cfg=cfg, read=read, unread=dict)


def pruned_config(whole: ModelConfig, kept: KeptParts) -> ModelConfig:
    """The config of what is kept. Raises `UserError` for models of unequal layers."""
    if whole.layer_sizes:
        raise UserError("mjax prune is not built for model.layer_sizes, layers of unequal sizes")
    sizes = {axis: len(entries) for (_, axis), entries in kept.within.items()}
    attention = whole.attention.model_copy(
        update={
            "num_attention_heads": sizes.get("heads", whole.attention.num_attention_heads),
            "num_key_value_heads": sizes.get("kv_heads", whole.attention.num_key_value_heads),
        }
    )
    kinds = [whole.layer_kinds[number] for number in kept.layers]
    changes = {
        "hidden_size": len(kept.embed),
        "intermediate_size": sizes.get("mlp", whole.intermediate_size),
        "num_hidden_layers": len(kinds),
        "layer_pattern": pattern_of(kinds),
        "attention": attention,
    }
    return ModelConfig.model_validate(whole.model_dump() | changes)


def _taken(source: Source, path: Path, entries: list[np.ndarray]) -> np.ndarray:
    """The part of a parameter with these entries of each axis, by one read around them."""
    if not all(map(len, entries)):
        return np.zeros(tuple(map(len, entries)), np.float32)
    firsts = [int(each[0]) for each in entries]
    ends = [int(each[-1]) + 1 for each in entries]
    around = tuple(map(slice, firsts, ends))
    block = source.read(path, around)
    within = map(np.subtract, entries, firsts)
    return block[np.ix_(*within)]
