"""Adapters written as a folder that PEFT loads.

A matrix of PEFT may be several of mjax side by side (Phi-3's qkv_proj). Its adapter is then theirs:
A is stacked along the rank and B is block-diagonal; adapters that share an A keep one A. A matrix
of mjax may be several of PEFT (Qwen3.5's in_proj_b and in_proj_a), which all get its A. Ranks that
are zero at both ends are padding and are not written.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.companion_files import write_files
from mjax.checkpoint.base.hub import hub_name
from mjax.checkpoint.base.new_folder import new_folder
from mjax.checkpoint.base.safetensors import write_file
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.base.source import run_all
from mjax.checkpoint.merged import ADAPTER_PARTS, Adapters
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.files import real_specs, tensor_shapes, write_slot
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG, Setting, write_adapter_config
from mjax.interop.peft.modules import Module, ModulePart, keys_of, modules_of, with_family
from mjax.interop.peft.pair import (
    ADAPTER_WEIGHTS,
    KEY_PREFIX,
    LowRank,
    axis_of_half,
    names_in_memory,
    place_of_batch,
    side_by_side,
)
from mjax.sharding.spec import ParamSpec

log = logging.getLogger(__name__)

# PEFT refuses to adapt out_proj in these models; other readers of its files do not.
_WITHOUT_OUT_PROJ = ("mamba2", "nemotron_h", "falcon_h1")


def write_adapter(
    folder: str | Path,
    cfg: ModelConfig,
    specs: dict,
    adapters: Adapters,
    extras: Mapping[str, bytes] | None = None,
) -> None:
    """Write adapters as a folder that PEFT loads, with further files `extras` by name.

    Raises `UserError` where PEFT has no place for something, or the folder holds something.
    """
    cfg = with_family(cfg)
    of, modules = real_specs(cfg, specs), modules_of(cfg, specs)
    pairs = {name: _pair_of_module(module, adapters, of) for name, module in modules.items()}
    pairs = {name: pair for name, pair in pairs.items() if pair is not None}
    _require_writable(cfg, adapters, modules, set(pairs))
    tensors: dict[str, np.ndarray] = {}
    for name, key in keys_of(modules, set(pairs)).items():
        tensors |= dict(_tensors_of(key, modules[name], pairs[name]))
    whole, saved = _whole_tensors(cfg, specs, adapters, set(pairs))
    tensors |= whole
    if cfg.model_type in _WITHOUT_OUT_PROJ and any(n.endswith(".out_proj") for n in pairs):
        log.warning("PEFT refuses adapters of out_proj in %s; merge them", cfg.model_type)
    settings = {}
    for name, pair in pairs.items():
        target, is_parameter = modules[name].target(cfg)
        settings[target] = Setting(pair.rank, pair.scale, is_parameter, modules[name].transposed)
    wrapped = [name for name, setting in settings.items() if setting.is_parameter]
    if wrapped and adapters.dora:
        raise UserError(f"adapter: PEFT has no DoRA for {wrapped[0]}; merge it")
    names = names_in_memory(cfg, specs)
    of_hub = hub_name(adapters.base)
    config = write_adapter_config(
        settings,
        saved,
        {*modules, *names, *map(_module_of_tensor, names)},
        base_model_name_or_path=adapters.base if of_hub is None else of_hub.repo,
        revision=None if of_hub is None else of_hub.revision,
        task_type=_task_of(cfg),
        use_rslora=adapters.rslora,
        use_dora=adapters.dora,
        lora_dropout=0.0 if wrapped else adapters.dropout,
    )
    ordered = dict(sorted(tensors.items()))
    with new_folder(folder) as temporary:
        entries = {name: (array.shape, array.dtype) for name, array in ordered.items()}
        write_file(temporary / ADAPTER_WEIGHTS, entries, lambda name: [ordered[name]])
        write_files(temporary, {**(extras or {}), ADAPTER_CONFIG: config})


def _task_of(cfg: ModelConfig) -> str | None:
    """PEFT's word for what a model does, if it has one."""
    kind = cfg.architecture
    if kind.reads_target:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if kind.generates else None


def _pair_of_module(
    module: Module, adapters: Adapters, of: Mapping[Leaf, ParamSpec]
) -> LowRank | None:
    """The adapter of a module, or None if no part of it has one."""
    found = []
    for part in module.parts:
        if part.path in adapters.scales:
            pair = _pair_of_part(part, adapters, of[part.path], module.role).trimmed()
            if pair.rank and (pair.magnitude is None or np.any(pair.magnitude)):
                found.append((part.rows, pair))
    if not found:
        return None
    if adapters.dora:
        if len(found) < len(module.parts) or module.experts > 1 or module.role != "matrix":
            raise UserError(
                f"adapter: PEFT has no DoRA for experts, tables or some parts of a module, as for "
                f"{module.name}; merge it (mjax convert merge), or train without lora.dora"
            )
    return side_by_side(module.outputs, found)


def _pair_of_part(part: ModulePart, adapters: Adapters, spec: ParamSpec, role: str) -> LowRank:
    """The adapter of one matrix of mjax, or of one of each expert, as PEFT has it."""
    matrices = [_matrices_of_batch(part.path, batch, adapters, spec) for batch in part.batches]
    a = np.stack([matrix["a"] for matrix in matrices])
    b = np.stack([matrix["b"] for matrix in matrices])[:, part.outputs]
    if role in ("embedding", "head"):  # without the rows that pad the vocabulary
        a = a[:, :, : spec.shape[0]]
    if role == "head":
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    pair = LowRank(a, b, adapters.scales[part.path])
    if adapters.dora:
        length = matrices[0]["magnitude"][part.outputs, 0]
        pair = replace(pair, magnitude=length)
    return pair


def _matrices_of_batch(
    path: Leaf, batch: tuple[int, ...], adapters: Adapters, spec: ParamSpec
) -> dict[str, np.ndarray]:
    """The adapter of one matrix of a weight.

    a: [r, inputs]. b: [outputs, r]. magnitude, with DoRA: [outputs, 1].
    """
    lead, half = place_of_batch(spec, batch)
    found = {}
    for name in ADAPTER_PARTS:
        array = adapters.part(path, name)
        if array is None:
            continue
        array = array[lead]
        if half is not None:
            array = array.take(half, -2 if name == "a" else axis_of_half(spec))
        rows = array.reshape(-1, array.shape[-1]) if name == "a" else array.reshape(len(array), -1)
        found[name] = rows.T
    return found


def _tensors_of(key: str, module: Module, pair: LowRank) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file that hold an adapter, by name."""
    a = pair.a.reshape(-1, module.inputs)
    b = pair.b.transpose(1, 2, 0).reshape(module.outputs, -1)  # experts change fastest
    is_table = module.role == "embedding"
    for letter, array in (("A", a), ("B", b)):
        name = f"lora_embedding_{letter}" if is_table else f"lora_{letter}.weight"
        yield f"{key}.{name}", np.ascontiguousarray(array)
    if pair.magnitude is not None:
        yield f"{key}.lora_magnitude_vector", pair.magnitude


def _require_writable(
    cfg: ModelConfig, adapters: Adapters, modules: Mapping[str, Module], adapted: set[str]
) -> None:
    """Raise `UserError` for what PEFT's files have no place for."""
    placed = {part.path for module in modules.values() for part in module.parts}
    for path in adapters.scales:
        if path not in placed:
            name = ".".join(path)
            raise UserError(f"adapter: PEFT has no module for {name}; leave it out of lora.targets")
    if cfg.tie_word_embeddings:
        tables = [path for path in (*adapters.scales, *adapters.whole) if path[0] == "embedding"]
        if tables:
            raise UserError(
                "adapter: PEFT trains the embedding apart from a head that is tied to it; merge "
                "(mjax convert merge), or leave the embedding as it is"
            )


def _module_of_tensor(name: str) -> str:
    return name.rpartition(".")[0]


def _whole_tensors(
    cfg: ModelConfig, specs: dict, adapters: Adapters, adapted: set[str]
) -> tuple[dict[str, np.ndarray], set[str]]:
    """(tensors of the parameters that were trained whole, their modules but adapted ones)."""
    whole, places, of = adapters.whole, slots(cfg, specs), real_specs(cfg, specs)
    shapes, names = tensor_shapes(cfg, specs, places), names_in_memory(cfg, specs)
    pieces: dict[str, list] = {}
    for path, found in places.items():
        for slot in found:
            pieces.setdefault(slot.tensor, []).append((path, slot))
    wanted = {name for name, of_name in pieces.items() if any(p in whole for p, _ in of_name)}
    modules = {_module_of_tensor(here) for here, there in names.items() if there in wanted}
    tensors = {}
    for here, there in names.items():
        if not any(here.startswith(f"{module}.") for module in modules):
            continue
        if not all(path in whole for path, _ in pieces[there]):
            raise UserError(
                f"adapter: PEFT saves modules whole, and {there} was trained in part or not at all;"
                " train all of its module (lora.trained), or merge (mjax convert merge)"
            )
        dtype = whole[pieces[there][0][0]].dtype
        out = np.empty(shapes[there], dtype)
        for path, slot in pieces[there]:
            run_all(write_slot(out, slot, of[path], lambda index, path=path: whole[path][index]))
        module = _module_of_tensor(here)
        base = ".base_layer" if module in adapted else ""
        tensors[f"{KEY_PREFIX}{module}{base}{here.removeprefix(module)}"] = out
    return tensors, modules - adapted
