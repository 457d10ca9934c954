"""`Family`: a row of the table of Hugging Face's model families; `Slot`: a place in their tensors.

A `TensorLayout` places the pieces of a parameter of one role in tensors. `LAYOUTS` has those of
most families; a family overrides one in `Family.layouts`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.parts import Part
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec


@dataclass(frozen=True)
class Slot:
    """The place of one matrix or vector of a parameter in a Hugging Face checkpoint.

    tensor: the name of the tensor.
    batch: the piece's index along the parameter's `ENUMERATING_AXES`, in their order.
    dims: for each dimension of the tensor after `lead`, the parameter's axes flattened into it.
    start: the piece's first index along dimension `axis` of a tensor that fuses several.
    step: the piece takes every `step`-th index there, or block of so many indices (`block`).
    lead: the leading index in a tensor that stacks several, or in its leading dimensions of size 1.
    number: the tensor lacks the parameter's dimension of size 1.
    part: (axis, first, end) of the parameter's indices that the piece has; None: all.
    """

    tensor: str
    batch: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    start: int = 0
    axis: int = 0
    step: int = 1
    lead: tuple[int, ...] = ()
    number: bool = False
    block: int = 1
    part: tuple[int, int, int] | None = None

    @property
    def piece(self) -> tuple:
        """The piece; of slots with the same one, the last is read and the others repeat it."""
        return self.batch, self.part

    def spec_of(self, spec: ParamSpec) -> ParamSpec:
        """The declaration of the part of the parameter that the piece has."""
        if self.part is None:
            return spec
        axis, first, end = self.part
        shape = *spec.shape[:axis], end - first, *spec.shape[axis + 1 :]
        return replace(spec, shape=shape, parts=())

    def row(self, i: int) -> int:
        """The index along `axis` of the tensor that has index `i` of the piece."""
        block, within = divmod(i, self.block)
        return self.start + block * self.block * self.step + within

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """`dims` of the same bytes as a matrix or vector: all dimensions but the first are one."""
        rest = tuple(axis for axes in self.dims[1:] for axis in axes)
        return (self.dims[0], rest) if rest else self.dims[:1]


SlotsByPath = Mapping[tuple[str, ...], tuple[Slot, ...]]  # of each parameter, by its path


def changed(slots: SlotsByPath, change: Callable[[Slot], Slot]) -> SlotsByPath:
    """The slots, each as `change` makes it."""
    return {path: tuple(map(change, places)) for path, places in slots.items()}


# ---- layouts -------------------------------------------------------------------------------------

# (declaration, index along each enumerating axis) -> slot, named as the parameter declares it; or
# the slots of its parts.
TensorLayout = Callable[[ParamSpec, dict[str, int]], Slot | tuple[Slot, ...]]


def _slot(spec: ParamSpec, at: dict[str, int], *dims: tuple[int, ...], axis: int = 0) -> Slot:
    name = spec.hf[at.get("pair", 0)]
    return Slot(name, tuple(at.values()), dims, axis=axis)


def _axes_of_piece(spec: ParamSpec) -> tuple[int, ...]:
    return tuple(i for i, axis in enumerate(spec.axes) if axis not in ENUMERATING_AXES)


def _inputs_and_outputs(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    axes = _axes_of_piece(spec)
    return axes[: spec.inputs], axes[spec.inputs :]


def vector(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """[n]: all axes flattened into one."""
    return _slot(spec, at, _axes_of_piece(spec))


def outputs_first(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """[out, in], as torch's Linear has it."""
    inputs, outputs = _inputs_and_outputs(spec)
    return _slot(spec, at, outputs, inputs)


def inputs_first(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """A matrix [in, out], as GPT-2's Conv1D has it."""
    inputs, outputs = _inputs_and_outputs(spec)
    return _slot(spec, at, inputs, outputs, axis=1)


def table(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """An embedding or a head, with the parameter's own axes."""
    return _slot(spec, at, *((axis,) for axis in _axes_of_piece(spec)))


def patches(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """The kernel of a convolution over patches, [D, C, P, P]."""
    inputs, outputs = _inputs_and_outputs(spec)
    return _slot(spec, at, outputs, *((axis,) for axis in inputs))


def taps(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """The kernel of a depthwise convolution, [channels, 1, taps]."""
    axes = _axes_of_piece(spec)
    return _slot(spec, at, axes[:-1], (), axes[-1:])


def number(spec: ParamSpec, at: dict[str, int]) -> Slot:
    """One number without a dimension."""
    return replace(vector(spec, at), number=True)


def experts_stacked(layout: TensorLayout) -> TensorLayout:
    """All experts of a layer in one tensor, [E, ...]."""

    def place(spec: ParamSpec, at: dict[str, int]) -> Slot:
        slot = layout(spec, at)
        name = slot.tensor.replace(".{expert}", "")
        return replace(slot, tensor=name, lead=(at["experts"],))

    return place


def interleaved(layout: TensorLayout) -> TensorLayout:
    """Gate and up alternate along the last axis of one tensor, which has the name of gate."""

    def place(spec: ParamSpec, at: dict[str, int]) -> Slot:
        slot = layout(spec, at)
        if "pair" not in at:
            return slot
        return replace(slot, tensor=spec.hf[0], start=at["pair"], step=2)

    return place


def blocks_of_heads(first: int) -> TensorLayout:
    """q, k and v of a head follow each other in one tensor, [N, 3, H]; `first`: the piece's place
    among them, that of k where a parameter is k and v."""

    def place(spec: ParamSpec, at: dict[str, int]) -> Slot:
        slot = (outputs_first if spec.role == "matrix" else vector)(spec, at)
        head = spec.shape[-1]
        return replace(slot, start=(first + at.get("pair", 0)) * head, step=3, block=head)

    return place


def after_ones(count: int, layout: TensorLayout) -> TensorLayout:
    """A tensor that begins with `count` dimensions of size 1."""
    return lambda spec, at: replace(layout(spec, at), lead=(0,) * count)


# By what a parameter is; what has no row is a vector.
LAYOUTS: dict[str, TensorLayout] = {
    "matrix": outputs_first,
    "router": outputs_first,
    "expert_matrix": outputs_first,
    "patches": patches,
    "conv": taps,
    "embedding": table,
    "head": table,
}


def _kind_of(spec: ParamSpec) -> str:
    if "patch" in spec.axes and spec.role == "matrix":
        return "patches"
    if "experts" in spec.axes:
        return "expert_matrix" if spec.role == "matrix" else "expert_vector"
    return spec.role


# ---- families ------------------------------------------------------------------------------------


def _as_it_is(found: Any, names: Collection[str]) -> Any:
    return found


@dataclass(frozen=True)
class Family:
    """A row of the table of families.

    architecture: the class that an exported config.json names.
    parts: the two-way parts of its config.json, in the order in which they read.
    fixed: values that all its models share, by key.
    left_out: transformers' values of keys that a config.json lacks, where parts have others.
    rename: replacements on declared names, in order.
    fused: tensor -> the declared projections side by side in it.
    name_of: (model, name) -> a tensor's name, where replacements do not suffice.
    layouts: its own layouts, by kind as in `LAYOUTS` or by a parameter's declared name.
    base_class: its class without heads, if files of that class are read.
    mend: (model, names of tensors) -> the model that a file with these tensors holds.
    renamed_in: (slots, names of tensors) -> the slots of a file with these tensors.
    repeats_in_predictions: layers of multi-token prediction have copies of embedding and head.
    """

    architecture: str
    parts: tuple[Part, ...]
    fixed: dict[str, object] = field(default_factory=dict)
    left_out: dict[str, object] = field(default_factory=dict)
    rename: tuple[tuple[str, str], ...] = ()
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    name_of: Callable[[ModelConfig, str], str] = lambda cfg, name: name
    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    base_class: str | None = None
    mend: Callable[[ModelConfig, Collection[str]], ModelConfig] = _as_it_is
    renamed_in: Callable[[SlotsByPath, Collection[str]], SlotsByPath] = _as_it_is
    repeats_in_predictions: bool = True

    @classmethod
    def of(cls, architecture: str, *parts: Part, **others: Any) -> "Family":
        """A row of the table, its parts in the order in which they read."""
        return cls(architecture, parts, **others)

    def layout_of(self, spec: ParamSpec) -> TensorLayout:
        """The layout of a parameter."""
        layouts = LAYOUTS | self.layouts
        names = [re.sub(r"^model\.layers\.\d+\.", "", name) for name in spec.hf]
        own = next((layouts[name] for name in names if name in layouts), None)
        return own or layouts.get(_kind_of(spec), vector)

    def tensor_of(self, cfg: ModelConfig, name: str) -> tuple[str, int]:
        """(tensor, position among the projections fused in it) of a piece, by its declared name."""
        position = 0
        for tensor, parts in self.fused.items():
            for i, part in enumerate(parts):
                if re.search(rf"\b{re.escape(part)}\b", name):
                    name, position = name.replace(part, tensor), i
        for old, new in self.rename:
            name = name.replace(old, new)
        return self.name_of(cfg, name), position


# ---- experts that files have stacked or apart ----------------------------------------------------

_STACKED = re.compile(r"(?:mtp\.)?layers\.\d+\.mlp\.experts\.")
_APART = re.compile(rf"({_STACKED.pattern})0\.down_proj\.weight$")


def expert_apart(slot: Slot) -> Slot:
    """The place of an expert's matrix in a file that has a tensor for each."""
    layer, found, kind = slot.tensor.rpartition("mlp.experts.")
    if not found or not slot.lead:
        return slot
    if kind == "gate_up_proj":
        kind = "up_proj" if slot.start else "gate_proj"
    name = f"{layer}{found}{slot.lead[0]}.{kind}.weight"
    return replace(slot, tensor=name, lead=(), start=0)


def experts_as_in(slots: SlotsByPath, names: Collection[str]) -> SlotsByPath:
    """The slots of a file with these tensors, some of whose layers may have experts apart."""
    apart = {found[1] for name in names if (found := _APART.search(name))}

    def place(slot: Slot) -> Slot:
        layer = _STACKED.search(slot.tensor)
        return expert_apart(slot) if layer and layer[0] in apart else slot

    return changed(slots, place) if apart else slots
