"""Megatron-LM `torch_dist` checkpoints as a `Source`: where each of our parameters lies in them.

Names are in `parameter_names.py`, layouts in `layouts.py`. Optimizer state, random state and
`_extra_state` are left out; any other tensor without a place is refused. Source: megatron/core
(transformer/transformer_block.py, dist_checkpointing).
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import nnx

from mjax.checkpoint.base.source import Index, Source
from mjax.checkpoint.base.source import Path as Leaf
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.arguments import model_config
from mjax.interop.megatron.heterogeneous import without_empty_layers
from mjax.interop.megatron.layouts import VOCABULARY, Fetch, MegatronLayout
from mjax.interop.megatron.parameter_names import (
    EXPERTS_PREFIX,
    PREDICTION,
    T5_TWINS,
    layer_prefixes,
    layers_in_stack,
    named_in_layer,
    named_in_model,
    sizes_at,
)
from mjax.interop.megatron.stored.opening import open_checkpoint
from mjax.interop.megatron.stored.torch_dist import TorchDist
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec

_SKIPPED = re.compile(
    r"(chained_\d+\.)?optimizer\.|.*_extra_state|rng_state|rerun_state_machine|common_state"
    r"|.*\.local_tokens_per_expert"  # counts since the last step
)


_OF_TOWER_ALONE = {"conv1.weight", "embedder.weight", "patch_embed.proj.weight"}  # CLIP, RADIO, ViT
# Raised by arguments of other types or signs than Megatron's.
_NONSENSE = (
    TypeError, ValueError, ArithmeticError, LookupError, AttributeError, StopIteration, MemoryError,
)  # fmt: skip


def megatron_source(folder: str | Path) -> Source:
    """The model in a run folder (latest iteration) or iteration folder; reads no weights yet."""
    store, cfg = opened_model(folder)
    return source_of_store(store, cfg, lambda: _check_tensors(store, cfg, places_of(store, cfg)))


def source_of_store(
    store: TorchDist,
    cfg: ModelConfig,
    check: Callable[[], None],
    has: frozenset[Leaf] | None = None,
) -> Source:
    """The tensors of `store` as parameters of `cfg`; `has`: those that it holds, None: all."""
    specs = nnx.traversals.flatten_mapping(definition_of(cfg).specs)
    places = places_of(store, cfg, has)

    def read(path: Leaf, index: Index) -> np.ndarray:
        spec = specs[path]
        _, layout = place_of(path, cfg)
        sizes = sizes_at(path, cfg)
        ends = [s.indices(n) for s, n in zip(index, spec.shape, strict=True)]
        box = [slice(first, last) for first, last, _ in ends]
        lead = leading_axes(spec)
        ranges = [range(s.start, s.stop) for s in box[:lead]]
        pieces = list(itertools.product(*ranges))
        first_part, *_ = places[path][pieces[0]]
        kind = store.dtype(first_part.name)
        out = np.empty([s.stop - s.start for s in box], f"u{kind.itemsize}")
        for at in pieces:
            here = tuple(i - s.start for i, s in zip(at, box[:lead], strict=True))
            fetch = _fetcher(store, places[path][at])
            x = layout.convert(fetch, sizes, spec.shape[lead:], box[lead:])
            _copy_by_columns(out[here], x)
        return out.view(kind)

    return Source(cfg, read, check, has)


def _copy_by_columns(out: np.ndarray, x: np.ndarray) -> None:
    """out[...] = x, by columns where x is a transposed view: four times as fast as at once."""
    step = max(1, x.shape[-1]) if x.flags.c_contiguous else 64
    for i in range(0, x.shape[-1], step):
        out[..., i : i + step] = x[..., i : i + step]


def opened_model(folder: str | Path) -> tuple[TorchDist, ModelConfig]:
    """An opened checkpoint, and the model that its saved arguments describe."""
    store = open_checkpoint(folder)
    values, kind = vars(store.arguments()), _kind_of_model(store)
    try:
        store = without_empty_layers(store)
        shapes = {name: tensor.shape for name, tensor in store.tensors.items()}
        cfg = model_config(values, store.where_common, kind, shapes)
        places_of(store, cfg)
    except UserError:
        raise
    except _NONSENSE as e:
        raise UserError(
            f"{store.where_common}: the arguments describe no model ({type(e).__name__}: {e}); "
            "copy the checkpoint again"
        ) from e
    return store, cfg


def _kind_of_model(store: TorchDist) -> str:
    """Kind of model that the tensors say; arguments do not say which script wrote them."""
    if any(name.startswith("vision_model.") for name in store.tensors):
        return "llava"
    if alone := _OF_TOWER_ALONE & store.tensors.keys():
        raise UserError(
            f"{store.folder}: tensor {min(alone)!r} is of an image tower alone, without a text "
            "model; give the LLaVA that it was joined to, or its weights from Hugging Face"
        )
    if not any(name.startswith("encoder.layers.") for name in store.tensors):
        return "gpt"
    return "t5" if any(name.startswith("decoder.layers.") for name in store.tensors) else "bert"


# ---- places: where each layer's and expert's tensor is -------------------------------------------


@dataclass(frozen=True)
class Place:
    """Entry `at` of the leading axes of a Megatron tensor whose shape should be `shape`, from row
    `first` of what is left."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    first: int = 0


# (layer of the stack, expert) -> its parts
PlacesOfPieces = dict[tuple[int, ...], tuple[Place, ...]]
Option = tuple[str, tuple[tuple[int, int], ...]]  # a name; of each leading axis the entry and size


def places_of(
    store: TorchDist, cfg: ModelConfig, has: frozenset[Leaf] | None = None
) -> dict[Leaf, PlacesOfPieces]:
    """The places of all parameters, or of those that `store` has."""
    specs = nnx.traversals.flatten_mapping(definition_of(cfg).specs)
    own = specs.keys() if has is None else has
    return {path: _find(store, cfg, path, specs[path]) for path in own}


def place_of(path: Leaf, cfg: ModelConfig) -> tuple[tuple[str, ...], MegatronLayout]:
    """Megatron's names (within the layer, for a layer's parameter) and layout of one of ours."""
    if (named := named_in_model(path, cfg)) is not None:
        return named
    if path[0].startswith("mtp_"):
        number = int(path[0].removeprefix("mtp_")) - 1
        if path[1] != "block":
            return _behind(f"mtp.layers.{number}.", PREDICTION[path[1:]])
        kind = cfg.prediction_kinds[number]
        named = named_in_layer(path[2:], kind, cfg)
        return _behind(f"mtp.layers.{number}.transformer_layer.", named)
    kind = cfg.layer_kinds[layers_in_stack(cfg, path[0])[0]]
    return named_in_layer(path[1:], kind, sizes_at(path, cfg))


def _behind(prefix: str, named: tuple[tuple[str, ...], MegatronLayout]):
    names, layout = named
    return tuple(prefix + name for name in names), layout


def leading_axes(spec: ParamSpec) -> int:
    """Leading axes of ours that enumerate Megatron's tensors: layers, experts."""
    return sum(axis in ("layers", "experts") for axis in spec.axes[:2])


def options_of(path: Leaf, spec: ParamSpec, cfg: ModelConfig, at: tuple[int, ...]) -> list[Option]:
    """The names that the piece `at` of a parameter may have."""
    names, _ = place_of(path, cfg)
    options: list[Option] = [(name, ()) for name in names]
    if spec.axes[:1] == ("layers",) and named_in_model(path, cfg) is None:
        layer = layers_in_stack(cfg, path[0])[at[0]]
        prefix, number, count = layer_prefixes(cfg)[layer]
        options = [(f"{prefix}{number}.{name}", ()) for name in names]
        options += [(f"{prefix}{name}", ((number, count),)) for name in names]
    if "experts" in spec.axes[:2]:
        expert = at[-1]
        stacked = [(name, (*lead, (expert, cfg.moe.num_experts))) for name, lead in options]
        own = f"{EXPERTS_PREFIX}{expert}."
        options = stacked + [(name.replace(EXPERTS_PREFIX, own), lead) for name, lead in options]
    return options


def _find(store: TorchDist, cfg: ModelConfig, path: Leaf, spec: ParamSpec) -> PlacesOfPieces:
    _, layout = place_of(path, cfg)
    lead = leading_axes(spec)
    shape = layout.shape(sizes_at(path, cfg), spec.shape[lead:])
    found = {}
    for at in np.ndindex(spec.shape[:lead]):
        options = options_of(path, spec, cfg, at)
        found[at] = _parts_of_tensor(store, options, shape, layout)
    return found


def _parts_of_tensor(
    store: TorchDist, options: list[Option], shape: tuple[int, ...], layout: MegatronLayout
) -> tuple[Place, ...]:
    """The first option that is there: whole, or as parts with names of their own."""
    part = shape[0] // layout.parts
    for name, lead in options:
        at, sizes = tuple(i for i, _ in lead), tuple(n for _, n in lead)
        if name in store.tensors:
            rows = range(layout.parts)
            return tuple(Place(name, (*sizes, *shape), at, row * part) for row in rows)
        ends = layout.endings
        if ends and {name + end for end in ends} <= store.tensors.keys():
            return tuple(Place(name + end, (*sizes, part, *shape[1:]), at) for end in ends)
    names = " or ".join(repr(name) for name, _ in options)
    raise UserError(
        f"{store.folder}: tensor {names} is missing, which the arguments in "
        f"{store.name_of_common} ask for; the model was built in another way than they say and "
        "cannot be imported"
    )


def _fetcher(store: TorchDist, parts: tuple[Place, ...]) -> Fetch:
    def fetch(rows: slice, *rest: slice, part: int = 0) -> np.ndarray:
        place = parts[part]
        lead = [slice(i, i + 1) for i in place.at]
        first, last = rows.start + place.first, rows.stop + place.first
        x = store.read(place.name, (*lead, slice(first, last), *rest))
        inner = x.shape[len(lead) :]
        return x.reshape(inner)

    return fetch


def _check_tensors(store: TorchDist, cfg: ModelConfig, places: dict[Leaf, PlacesOfPieces]) -> None:
    """Shapes of all tensors, tensors without a place, files that are not whole."""
    whole = (named_in_model(path, cfg) for path in places)
    vocab = {name for named in whole if named and named[1] is VOCABULARY for name in named[0]}
    used = {p.name: p for own in places.values() for parts in own.values() for p in parts}
    for name, place in used.items():
        found, want = store.tensors[name].shape, place.shape
        if name in vocab:  # Megatron's padding follows its tp, ours does not
            want = (max(cfg.vocab_size, found[0]), *want[1:])
        if found != want:
            raise UserError(
                f"{store.folder}: tensor {name!r} is {list(found)}, but by the arguments in "
                f"{store.name_of_common} it should be {list(want)}; such a model cannot be imported"
            )
    twins = {name.replace(one, other) for name in used for one, other in T5_TWINS.items()}
    for name in store.tensors:
        if name not in used and name not in twins and not _SKIPPED.match(name):
            raise UserError(
                f"{store.folder}: tensor {name!r} has no counterpart in the model that the "
                f"arguments in {store.name_of_common} describe; such a model cannot be imported"
            )
    store.check_files(set(used))
