"""Adapters of PEFT's folders, in mjax's layout.

Invariants: every tensor of a file has a place or the file is refused. Reading what
`adapter_writer.py` wrote gives the arrays that it had.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.safetensors import Tensor, read_header
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.base.source import flat
from mjax.checkpoint.merged import ADAPTER_PARTS, Adapters
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.files import read_slot, real_specs, tensor_shapes
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG, AdapterConfig, read_adapter_config
from mjax.interop.peft.modules import (
    ALL,
    Module,
    ModulePart,
    Rows,
    modules_of,
    with_family,
    wrapped_in_order,
)
from mjax.interop.peft.pair import (
    ADAPTER_WEIGHTS,
    KEY_PREFIX,
    LowRank,
    axis_of_half,
    common_dtype,
    names_in_memory,
    place_of_batch,
    scaled_b,
    side_by_side,
)
from mjax.models.base.adapted import part_path, part_shapes
from mjax.sharding.spec import ParamSpec

_KEY = re.compile(
    r"(?P<module>.+)\.(?:(?P<table>lora_embedding_[AB])|(?P<matrix>lora_[AB])\.weight"
    r"|(?P<length>lora_magnitude_vector)(?:\.weight)?)"
)


def read_adapter(folder: str | Path, cfg: ModelConfig, specs: dict) -> Adapters:
    """The adapters in a folder of PEFT, of a model.

    Weights of layers that have no adapter in the file get one of zeros, if others of their stack
    have one. Raises `UserError` naming what is damaged, unsupported or of another model.
    """
    folder, cfg = Path(folder), with_family(cfg)
    config, tensors = read_adapter_config(folder), _open_adapter(folder)
    found, whole = _sorted_keys(tensors)
    of = real_specs(cfg, specs)
    named = modules_of(cfg, specs), modules_of(cfg, specs, in_files=True)
    parts: dict[Leaf, dict[tuple[int, ...], list[tuple[Rows, LowRank]]]] = {}
    for key, group in found.items():
        module = _module_of_key(folder, key, named, config, found)
        pair = _read_pair(module, group, config)
        for part, own in _apart(module, pair):
            for number, batch in enumerate(part.batches):
                here = replace(own, a=own.a[number : number + 1], b=own.b[number : number + 1])
                beside = parts.setdefault(part.path, {}).setdefault(batch, [])
                if any(part.outputs == outputs for outputs, _ in beside):
                    raise UserError(f"{folder}: {key} is adapted twice; copy the adapter again")
                beside.append((part.outputs, here))
    arrays, scales = {}, {}
    full = flat(specs)
    for path, batches in parts.items():
        own, scales[path] = _arrays_of_weight(path, full[path], of[path], batches, config.dora)
        arrays |= own
    arrays |= _read_whole(cfg, specs, whole)
    if cfg.tie_word_embeddings and any(path[0] == "embedding" for path in (*arrays, *scales)):
        raise UserError(
            f"{folder}: it changes the embedding, and the head that is tied to it in the model "
            "would change with it; untie them (tie_word_embeddings=false) first"
        )
    return Adapters(arrays, scales, config.rslora, config.dropout, config.base)


def _open_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by name."""
    if not (folder / ADAPTER_WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(
            f"{folder}: adapter_model.bin is a pickle, which can run code; save it "
            f"as {ADAPTER_WEIGHTS} (safe_serialization=True)"
        )
    return read_header(folder / ADAPTER_WEIGHTS)


def _sorted_keys(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(parts of adapters by module and name, other tensors by the name that the model has)."""
    found: dict[str, dict[str, Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        if not name.startswith(KEY_PREFIX):
            raise UserError(f"{tensor.file}: tensor {name} is not of PEFT's LoRA; is it a model?")
        rest = name.removeprefix(KEY_PREFIX)
        match = _KEY.fullmatch(rest)
        if match is None:
            rest = rest.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
            whole[rest] = tensor
            continue
        part = "magnitude" if match["length"] else (match["table"] or match["matrix"])[-1].lower()
        found.setdefault(match["module"], {})[part] = tensor
    for group in found.values():
        lacking = {"a", "b"} - set(group)
        if lacking:
            tensor = next(iter(group.values()))
            raise UserError(
                f"{tensor.file}: beside {tensor.name} there is no lora_{lacking.pop().upper()}; "
                "copy the adapter again"
            )
    return found, whole


def _module_of_key(
    folder: Path,
    key: str,
    named: tuple[dict[str, Module], dict[str, Module]],
    config: AdapterConfig,
    found: Mapping[str, dict],
) -> Module:
    """The module that a key of a file belongs to."""
    in_model, in_files = named
    owner, depth = key.replace(".base_layer", ""), key.count(".base_layer")
    wrapped = [n for n in wrapped_in_order(in_model, owner) if config.is_parameter(n)]
    if key not in in_model and wrapped:
        total = max(other.count(".base_layer") for other in found if _is_at(other, owner)) + 1
        if len(wrapped) == total:
            return in_model[wrapped[total - 1 - depth]]
    module = in_model.get(key) or in_files.get(key)
    if module is None:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS}: {key} has an adapter, but the model has no such matrix; "
            "is it an adapter of another model?"
        )
    return module


def _is_at(key: str, owner: str) -> bool:
    return key.replace(".base_layer", "") == owner


def _read_pair(module: Module, group: Mapping[str, Tensor], config: AdapterConfig) -> LowRank:
    """The adapter of a module, its shapes checked."""
    count, rank = module.experts, config.rank_of(module.name)
    wanted = {
        "a": (count * rank, module.inputs),
        "b": (module.outputs, count * rank),
        "magnitude": (module.outputs,),
    }
    values = {}
    for part, tensor in group.items():
        if tensor.shape != wanted[part]:
            raise UserError(
                f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, but the model and "
                f"{ADAPTER_CONFIG} make it {wanted[part]}"
            )
        tensor.dtype  # noqa: B018 - refuses what is no number
        values[part] = tensor.whole()
        if not np.isfinite(values[part]).all():
            raise UserError(f"{tensor.file}: tensor {tensor.name} holds inf or NaN")
    if ("magnitude" in values) != config.dora:
        tensor = next(iter(group.values()))
        raise UserError(
            f"{tensor.file}: {ADAPTER_CONFIG} says use_dora={config.dora}, and of {module.name} "
            f"the file has {', '.join(sorted(values))}; copy the adapter again"
        )
    a = values["a"].reshape(count, rank, module.inputs)
    b = values["b"].reshape(module.outputs, rank, count).transpose(2, 0, 1)
    return LowRank(a, b, config.scale_of(module.name, rank), values.get("magnitude"))


def _apart(module: Module, pair: LowRank) -> Iterator[tuple[ModulePart, LowRank]]:
    """The adapters of the parts of a module: of blocks of B, or with the one A that they share."""
    filled = [part for part in module.parts if np.any(pair.b[:, part.rows])]
    apart = None
    if filled:
        apart = _cuts(pair, module.parts) or _cuts(pair, filled)
    for part, ranks in apart or [(part, slice(None)) for part in module.parts]:
        rows = part.rows
        own = replace(pair, a=pair.a[:, ranks], b=pair.b[:, rows, ranks])
        if pair.magnitude is not None:
            own = replace(own, magnitude=pair.magnitude[rows])
        yield part, own


def _cuts(pair: LowRank, parts: Sequence[ModulePart]) -> list[tuple[ModulePart, slice]] | None:
    """Parts and their equal shares of the rank, or None if B is not zero outside of those."""
    each, rest = divmod(pair.rank, len(parts))
    cuts = [(part, slice(i * each, (i + 1) * each)) for i, part in enumerate(parts)]
    is_zero = (not np.any(np.delete(pair.b[:, part.rows], cut, axis=2)) for part, cut in cuts)
    return cuts if not rest and all(is_zero) else None


def _arrays_of_weight(
    path: Leaf,
    spec: ParamSpec,
    real: ParamSpec,
    batches: Mapping[tuple[int, ...], list[tuple[Rows, LowRank]]],
    dora: bool,
) -> tuple[dict[Leaf, np.ndarray], float]:
    """(arrays of the adapter of a weight by path, its scale) of those of its matrices' outputs."""
    inputs, outputs = (tuple(real.shape[axis] for axis in axes) for axes in real.matrix_view()[1:])
    of_each = {batch: _of_matrix(math.prod(outputs), found) for batch, found in batches.items()}
    pairs = list(of_each.values())
    scale, dtype = pairs[0].scale, common_dtype(pairs)
    shapes = part_shapes(spec, max(pair.rank for pair in pairs))
    names = ADAPTER_PARTS if dora else ADAPTER_PARTS[:2]
    arrays = {name: np.zeros(shapes[name], dtype) for name in names}
    for batch, pair in of_each.items():
        lead, half = place_of_batch(spec, batch)
        own = {name: array[lead] for name, array in arrays.items()}
        if half is not None:
            own = {name: _view_of_half(array, name, half, spec) for name, array in own.items()}
        a, b = pair.a[0].T, scaled_b(pair.b[0], pair.scale / scale).T
        if spec.role == "head":
            a, b = b.T, a.T
        into = own["a"][tuple(map(slice, inputs))]
        into[..., : pair.rank] = a.reshape(*inputs, pair.rank)
        own["b"][: pair.rank] = b.reshape(pair.rank, *outputs)
        if dora:
            own["magnitude"][...] = pair.magnitude.reshape(1, *outputs)
    return {part_path(path, name): array for name, array in arrays.items()}, scale


def _of_matrix(outputs: int, found: list[tuple[Rows, LowRank]]) -> LowRank:
    """The adapter of a matrix of those of its outputs."""
    rows, pair = found[0]
    return pair if rows == ALL else side_by_side(outputs, found)


def _view_of_half(array: np.ndarray, name: str, half: int, spec: ParamSpec) -> np.ndarray:
    """A view of one half of a part of an adapter."""
    axis = -2 if name == "a" else axis_of_half(spec)
    return np.moveaxis(array, axis, 0)[half]


def _read_whole(
    cfg: ModelConfig, specs: dict, tensors: Mapping[str, Tensor]
) -> dict[Leaf, np.ndarray]:
    """The parameters that a file has whole."""
    if not tensors:
        return {}
    names, of, full = names_in_memory(cfg, specs), real_specs(cfg, specs), flat(specs)
    shapes, left = tensor_shapes(cfg, specs, slots(cfg, specs)), dict(tensors)
    arrays = {}
    there = {names.get(name, name): tensor for name, tensor in tensors.items()}
    for path, places in slots(cfg, specs).items():
        wanted = {slot.piece: slot for slot in places}
        having = [slot for slot in wanted.values() if slot.tensor in there]
        if not having:
            continue
        if len(having) < len(wanted):
            lacking = next(slot for slot in wanted.values() if slot.tensor not in there)
            raise UserError(
                f"{there[having[0].tensor].file}: has {having[0].tensor} whole but not "
                f"{lacking.tensor}, which mjax trains with it; leave it out of modules_to_save"
            )
        array = np.zeros(full[path].shape, there[having[0].tensor].dtype)
        for slot in having:
            tensor = there[slot.tensor]
            if tensor.shape != shapes[slot.tensor]:
                raise UserError(
                    f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, but the model "
                    f"makes it {shapes[slot.tensor]}"
                )
            cut = [slice(n) for n in of[path].shape]
            for axis, number in zip(of[path].matrix_view()[0], slot.batch, strict=True):
                cut[axis] = number
            ranges = [(0, n) for n in of[path].shape]
            read_slot(tensor, slot, of[path], ranges, array[tuple(cut)])
            left = {name: t for name, t in left.items() if t is not tensor}
        arrays[path] = array
    for tensor in left.values():
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has no place in the model; is it an adapter of "
            "another model?"
        )
    return arrays
