"""The modules that PEFT adapts, and the parts of mjax's weights in each.

Modules follow from the slots of an export. transformers 5 stores a model in other tensors than its
files have: experts in one parameter, some modules under other names. PEFT's files go by the former;
`in_memory` turns the latter into them.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mjax.checkpoint.base.source import Path as Leaf
from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.families.family import Slot
from mjax.interop.huggingface.files import natural, real_specs
from mjax.sharding.spec import ParamSpec

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")
_OLDER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OF_LLAVA = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model", "model.language_model"),
    (r"^vision_tower\.vision_model", "model.vision_tower"),
    (r"^multi_modal_projector", "model.multi_modal_projector"),
    (r"^image_newline", "model.image_newline"),
)
_OF_GRANITE = (
    (r"(block_sparse_moe)\.input_linear\.weight$", r"\1.experts.gate_up_proj"),
    (r"(block_sparse_moe)\.output_linear\.weight$", r"\1.experts.down_proj"),
    (r"(block_sparse_moe\.router)\.layer\.", r"\1."),
)
# Regular expressions on names of files and what replaces them, in order, by model_type.
_RENAMED = {
    "mixtral": ((r"\.block_sparse_moe\.", ".mlp."),),
    "nemotron_h": ((r"^backbone", "model"),),
    "minimax_m2": ((r"\.block_sparse_moe\.", ".mlp."),),
    "hy_v3": ((r"\.router\.gate\.", ".gate."), (r"\.shared_mlp\.", ".shared_experts.")),
    "granitemoe": _OF_GRANITE,
    "granitemoehybrid": _OF_GRANITE,
    "llava": _OF_LLAVA,
    "llava_onevision": _OF_LLAVA,
    "vit": (
        (r"^vit\.encoder\.layer\.", "vit.layers."),
        (r"\.attention\.(query|key|value)\.", r".\1_proj."),
        (r"\.(\w)\w+_proj\.", r".\1_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
}
# In these models PEFT takes every module of these names for an expert of older files, and drops it.
# As a parameter it is adapted all the same.
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
WITH_OLD_EXPERTS = frozenset(
    """deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite hunyuan_v1_moe
    hy_v3 kimi_k2 olmoe qwen2_moe qwen3_moe qwen3_next solar_open""".split()
)

Rows = slice | list[int]
ALL = slice(None)


@dataclass(frozen=True)
class ModulePart:
    """Rows of a module's outputs that are a matrix of mjax or a part of it, or one of each expert.

    batches: for each expert, or once, the matrix's index along the enumerating axes of the weight.
    outputs: those of the matrix that the rows are, in their order; others lie in other modules.
    """

    path: Leaf
    batches: tuple[tuple[int, ...], ...]
    rows: Rows
    outputs: Rows

    @property
    def first_row(self) -> int:
        """The first of its rows."""
        return self.rows.start if isinstance(self.rows, slice) else self.rows[0]


@dataclass(frozen=True)
class Module:
    """A matrix of transformers, [outputs, inputs], or one of each expert.

    name: that of the module, or of the parameter where `is_parameter`.
    transposed: it is stored as [inputs, outputs].
    parts: in the order of their rows.
    """

    name: str
    role: str
    inputs: int
    outputs: int
    parts: tuple[ModulePart, ...]
    is_parameter: bool = False
    transposed: bool = False

    @property
    def experts(self) -> int:
        return len(self.parts[0].batches)

    def target(self, cfg: ModelConfig) -> tuple[str, bool]:
        """(the name by which PEFT finds it, whether as a parameter)."""
        is_taken = self.name.endswith(TAKEN_FOR_EXPERTS) and cfg.model_type in WITH_OLD_EXPERTS
        if self.is_parameter or not is_taken:
            return self.name, self.is_parameter
        return f"{self.name}.weight", True

    @property
    def owner(self) -> str:
        """The module that has the parameter."""
        return self.name.rpartition(".")[0]


def in_memory(cfg: ModelConfig, tensor: str) -> str:
    """The name in transformers' model of a tensor of a file that is no expert's own."""
    for old, new in _RENAMED.get(cfg.model_type or "", ()):
        tensor = re.sub(old, new, tensor)
    return tensor


def with_family(cfg: ModelConfig) -> ModelConfig:
    """The model with the `model_type` of the family that its export has."""
    return cfg.model_copy(update={"model_type": config_to_hf(cfg)["model_type"]})


def modules_of(cfg: ModelConfig, specs: dict, in_files: bool = False) -> dict[str, Module]:
    """The modules of a model, by name; `in_files`: under the names and with the experts of files.

    cfg: a model with `model_type`. Matrices that take no adapter, as kernels, are left out.
    """
    modules: dict[str, Module] = {}
    of = real_specs(cfg, specs)
    for path, places in slots(cfg, specs).items():
        for slot in {slot.piece: slot for slot in places}.values():
            found = _module_of(cfg, path, of[path], slot, in_files)
            if found is not None:
                before = modules.get(found.name)
                modules[found.name] = found if before is None else _with_part(before, found)
    return {name: modules[name] for name in sorted(modules, key=natural)}


def _module_of(
    cfg: ModelConfig, path: Leaf, spec: ParamSpec, slot: Slot, in_files: bool
) -> Module | None:
    """The module of one matrix or of a part of it, with the part that this is."""
    sizes = _sizes_of_matrix(slot.spec_of(spec), slot)
    if sizes is None:
        return None
    (inputs, outputs), start = sizes, slot.start
    expert = None if in_files else _EXPERT.fullmatch(slot.tensor)
    name, is_parameter = slot.tensor.removesuffix(".weight"), False
    if expert is not None:
        kind = _OLDER_NAMES.get(expert[2], expert[2])
        if "pair" in spec.axes:
            start, kind = outputs * (kind == "up_proj"), "gate_up_proj"
        name, is_parameter = in_memory(cfg, f"{expert[1]}.{kind}"), True
    elif not in_files:
        tensor = in_memory(cfg, slot.tensor)
        is_parameter = spec.role == "router" and spec.axes[-1] == "router"
        is_parameter = is_parameter or not tensor.endswith(".weight")
        name = tensor if is_parameter else tensor.removesuffix(".weight")
    elif slot.lead:
        return None
    stop = start + slot.row(outputs - 1) - slot.start + 1
    rows: Rows = slice(start, stop, slot.step)
    if slot.block > 1 or slot.part is not None:
        rows = [slot.row(i) for i in range(outputs)]
    part = ModulePart(path, (slot.batch,), rows, _outputs_of(spec, slot))
    transposed = bool(slot.axis) and not is_parameter
    return Module(name, spec.role, inputs, stop, (part,), is_parameter, transposed)


def _sizes_of_matrix(spec: ParamSpec, slot: Slot) -> tuple[int, int] | None:
    """(inputs, outputs) of the matrix that a slot places, or None if it is no such matrix."""
    _, inputs, outputs = spec.matrix_view()
    if spec.role in ("embedding", "head") and slot.dims == (inputs, outputs) and not slot.lead:
        rows, columns = (spec.shape[axis] for axis in (*inputs, *outputs))
        return (rows, columns) if spec.role == "embedding" else (columns, rows)
    is_matrix = spec.role in ("matrix", "router") and len(slot.dims) == 2
    if not is_matrix or (slot.dims[1 - slot.axis], slot.dims[slot.axis]) != (inputs, outputs):
        return None

    def size(axes: tuple[int, ...]) -> int:
        count = 1
        for axis in axes:
            count *= spec.shape[axis]
        return count

    return size(inputs), size(outputs)


def _outputs_of(spec: ParamSpec, slot: Slot) -> Rows:
    """The outputs of a matrix of mjax that a slot has; a part is of its last axis."""
    if slot.part is None:
        return ALL
    _, first, end = slot.part
    width, count = spec.shape[-1], math.prod(spec.shape[axis] for axis in spec.matrix_view()[2])
    return [i for i in range(count) if first <= i % width < end]


def _with_part(module: Module, other: Module) -> Module:
    """Two parts of one module as one: rows side by side, or further experts."""
    parts = list(module.parts)
    new = other.parts[0]
    for i, part in enumerate(parts):
        if (part.path, part.rows) == (new.path, new.rows):
            parts[i] = replace(part, batches=(*part.batches, *new.batches))
            break
        if (part.path, part.batches) == (new.path, new.batches):
            rows, outputs = _joined(part.rows, new.rows), _joined(part.outputs, new.outputs)
            parts[i] = replace(part, rows=rows, outputs=outputs)
            break
    else:
        parts.append(new)
    parts.sort(key=lambda part: part.first_row)
    return replace(module, parts=tuple(parts), outputs=max(module.outputs, other.outputs))


def _joined(rows: Rows, others: Rows) -> Rows:
    assert isinstance(rows, list) and isinstance(others, list), (rows, others)
    return rows + others


def keys_of(modules: Mapping[str, Module], adapted: set[str]) -> dict[str, str]:
    """The start of the keys of each adapted module in a file, by its name.

    PEFT wraps a module once for each of its parameters, the first of them innermost.
    """
    keys = {}
    for name in adapted:
        module = modules[name]
        if not module.is_parameter:
            keys[name] = f"base_model.model.{name}"
            continue
        beside = [other for other in wrapped_in_order(modules, module.owner) if other in adapted]
        depth = len(beside) - 1 - beside.index(name)
        keys[name] = f"base_model.model.{module.owner}{'.base_layer' * depth}"
    return keys


def wrapped_in_order(modules: Mapping[str, Module], owner: str) -> list[str]:
    """The parameters of a module that take adapters, in the order in which it declares them."""
    names = (n for n, module in modules.items() if module.is_parameter and module.owner == owner)
    return sorted(names, key=lambda name: name.endswith("down_proj"))


def shortest_names(wanted: set[str], names: set[str], dotted: bool = True) -> list[str]:
    """Ends of dotted names that match those in `wanted` and none of the others in `names`.

    dotted: whether an end matches at a dot only.
    """
    others, found = names - wanted, set()
    ends_of_others = {end for name in others for end in _ends(name)}

    def is_free(end: str) -> bool:
        return end not in ends_of_others if dotted else not any(o.endswith(end) for o in others)

    for name in wanted:
        found.add(next(filter(is_free, _ends(name)), name))
    return sorted(found, key=natural)


def _ends(name: str) -> Iterator[str]:
    """The ends of a dotted name that do not begin with a number, the shortest first."""
    words = name.split(".")
    for first in reversed(range(len(words))):
        if not words[first].isdecimal():
            yield ".".join(words[first:])
