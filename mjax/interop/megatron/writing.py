"""Writes `torch_dist` checkpoints that Megatron-LM loads, tensor by tensor.

A tensor of a layer or expert is a chunk. Each is built from the parts of ours that lie in it: their
layouts, run on the places of entries, say where (`layouts.py`). All is read back and compared
before the folder gets its name. Source: megatron/core/dist_checkpointing (serialization.py,
strategies/common.py), training/checkpointing.py.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

import mjax
from mjax.checkpoint.base.source import Index, Source, flat
from mjax.checkpoint.base.source import Path as Leaf
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.data_files import DataFiles, unfinished_folder
from mjax.interop.megatron.layouts import PLAIN, TRANSPOSED, VOCABULARY, MegatronLayout
from mjax.interop.megatron.llava import is_llava
from mjax.interop.megatron.optimizer_state import optimizer_state, trained_paths
from mjax.interop.megatron.parameter_names import T5_TWINS, layers_in_stack, sizes_at
from mjax.interop.megatron.parameters import (
    Option,
    leading_axes,
    megatron_source,
    options_of,
    place_of,
)
from mjax.interop.megatron.stored.torch_dist import open_torch_dist
from mjax.interop.megatron.stored.torch_pickle import (
    Instance,
    archive,
    metadata_file,
    namespace,
    object_metadata,
    tensor_archive,
    tensor_metadata,
)
from mjax.interop.megatron.written_arguments import megatron_arguments, megatron_kind
from mjax.interop.megatron.written_run import WrittenRun
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec

ROWS_BYTES = 64 * 2**20  # of a chunk of a vocabulary


@dataclass
class _Piece:
    """A part of a Megatron tensor: one of ours, at an entry of its leading axes."""

    path: Leaf
    at: tuple[int, ...]
    part: int = 0
    parts_apart: bool = False


@dataclass
class _Target:
    """A tensor to write: its shape behind the leading axes, their sizes, and the pieces of each
    entry of them."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: dict[tuple[int, ...], list[_Piece]] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenPart:
    """Tensors to write, under `prefix` before Megatron's names. also: a second prefix of them."""

    prefix: str
    source: Source
    dtype: np.dtype
    also: str = ""


def export_torch_dist(
    source: Source, out: Path, dtype: str, impl: str, run: WrittenRun | None = None, of: str = ""
) -> None:
    """Write `out` for Megatron-LM; a `UserError` leaves nothing there.

    Without `run` it is a release, weights without an iteration; else an iteration with its
    optimizer. `impl`: transformer_engine or local, whose modules' names it has. of: what `source`
    is of; a process that was killed is gone on with if it wrote the same.
    """
    args = megatron_arguments(source.cfg, impl)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    parts = [
        WrittenPart("", source, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    ]
    name, tracked = "release", "release"
    if run is not None:
        common |= run.common(args)
        name, tracked = f"iter_{run.step:07d}", str(run.step)
        single = np.dtype(np.float32)
        trained = replace(source, has=trained_paths(source.cfg))
        parts.append(WrittenPart("optimizer.state.param.", trained, single, _OLDER_MASTERS))
        parts.append(WrittenPart("optimizer.state.exp_avg.", run.mu, single))
        parts.append(WrittenPart("optimizer.state.exp_avg_sq.", run.nu, single))
    source.check()
    common["args"] = namespace(common["args"])
    command = {"mjax": mjax.__version__, "of": of, "dtype": dtype, "impl": impl, "name": name}
    with unfinished_folder(out, command) as (temporary, journal):
        folder = temporary / name
        folder.mkdir(exist_ok=True)
        writer = _Writer(DataFiles(folder, journal), source.cfg, args)
        for part in parts:
            writer.write_part(part)
        writer.finish(common)
        _compare(folder, parts)
        (temporary / "latest_checkpointed_iteration.txt").write_text(tracked)


class _Writer:
    """Writes tensors, and keeps what `.metadata` will say of them."""

    def __init__(self, files: DataFiles, cfg: ModelConfig, args: dict):
        self.files, self.cfg, self.args = files, cfg, args
        self.specs = flat(definition_of(cfg).specs)
        self.entries: dict[str, Instance] = {}
        self.twins = T5_TWINS if megatron_kind(cfg) == "t5" else {}

    def write_part(self, part: WrittenPart) -> None:
        """Write all parameters of a part under Megatron's names."""
        for name, target in self._targets(part.source.has).items():
            chunks = []
            for at, pieces in target.pieces.items():
                for first, shape, make in self._chunks(part, target, pieces):
                    offsets = (*at, first, *(0 for _ in target.shape[1:]))
                    sizes = (*(1 for _ in at), *shape)
                    chunks.append((offsets, sizes))
                    content = partial(_archive_of, make, sizes)
                    self.files.append(part.prefix + name, offsets, content)
            shape = (*target.sizes, *target.shape)
            entry = tensor_metadata(part.dtype, shape, chunks)
            self.entries[part.prefix + name] = entry
            if part.also:
                self._alias(part.prefix + name, part.also + name)
            for one, twin in self.twins.items():
                if name.startswith(one):
                    for prefix in dict.fromkeys((part.prefix, part.also or part.prefix)):
                        self._alias(prefix + name, prefix + name.replace(one, twin))
            linear = name.removesuffix(".z")  # the first part of a mixer's projection
            if not part.prefix and linear.endswith(_WITH_EXTRA_STATE):
                self._write_extra_states(linear, target.sizes)

    def _alias(self, name: str, other: str) -> None:
        self.files.alias(name, other)
        self.entries[other] = self.entries[name]

    def finish(self, common: dict) -> None:
        """Write what is not sharded, and last the file that makes the folder a checkpoint."""
        heads = [one for one in self.twins if one.endswith("output_layer.")]
        own = "language_model.output_layer." if is_llava(self.cfg) else "output_layer."
        for head in (own, *heads):
            self._write_extra_states(f"{head}weight", ())
        folder = self.files.folder
        (folder / "common.pt").write_bytes(archive(common))
        (folder / ".metadata").write_bytes(metadata_file(self.entries, self.files.places))
        said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        said |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(said))

    def _write_extra_states(self, name: str, sizes: tuple[int, ...]) -> None:
        """Write the empty objects that Megatron's linear layers ask for beside weights."""
        sizes = sizes or (1,)
        for at in np.ndindex(sizes):
            shard = ".".join(map(str, at)), ".".join(map(str, sizes))
            key = f"{name.removesuffix('weight')}_extra_state/shard_{shard[0]}_{shard[1]}"
            self.entries[key] = object_metadata()
            self.files.append(key, None, partial(archive, [None]))

    def _targets(self, has: frozenset[Leaf] | None) -> dict[str, _Target]:
        """The tensors of these parameters, None: of all, by name."""
        targets: dict[str, _Target] = {}
        for path, spec in self.specs.items():
            if has is not None and path not in has:
                continue
            _, layout = place_of(path, self.cfg)
            lead = leading_axes(spec)
            shape = layout.shape(sizes_at(path, self.cfg), spec.shape[lead:])
            for at in np.ndindex(spec.shape[:lead]):
                name, places = self._name(path, spec, at)
                entry, sizes = tuple(i for i, _ in places), tuple(n for _, n in places)
                apart = bool(layout.endings) and layout.endings[0].startswith(".")
                ends = layout.endings if apart else ("",)
                for part, end in enumerate(ends):
                    own = (shape[0] // len(ends), *shape[1:])
                    target = targets.setdefault(name + end, _Target(own, sizes))
                    piece = _Piece(path, at, part, apart)
                    target.pieces.setdefault(entry, []).append(piece)
        return targets

    def _name(self, path: Leaf, spec: ParamSpec, at: tuple[int, ...]) -> Option:
        """The name that the modules of `impl` give a piece, and its place in leading axes."""
        options = options_of(path, spec, self.cfg, at)
        names, _ = place_of(path, self.cfg)
        of_layer = spec.axes[:1] == ("layers",)
        numbered = of_layer and len(options) > len(names)
        first = len(names) if numbered and _stacks_layers(self.args) else 0
        last = first + len(names)
        group = options[first:last]
        return group[-1] if self._is_plain_norm(path) else group[0]

    def _is_plain_norm(self, path: Leaf) -> bool:
        """Whether a norm is a module of its own, not a part of the linear layer that follows."""
        if len(path) < 2 or not path[-2].endswith("norm"):
            return False
        if path[:1] == ("final_norm",):
            return self.args["hybrid_layer_pattern"] is not None
        if is_llava(self.cfg) and not self._is_te():
            return True
        layer = (layers_in_stack(self.cfg, path[0]) or [-1])[0]
        kind = self.cfg.layer_kinds[layer]
        if not self._is_te():
            is_hybrid = self.args["hybrid_layer_pattern"] is not None
            return "mla" in kind or (is_hybrid and path[-2] != "attention_norm")
        return path[-2] == "mlp_norm" and "experts" in kind

    def _is_te(self) -> bool:
        return self.args["transformer_impl"] == "transformer_engine"

    def _chunks(
        self, part: WrittenPart, target: _Target, pieces: list[_Piece]
    ) -> Iterator[tuple[int, tuple[int, ...], Callable[[], np.ndarray]]]:
        """(first row, shape, what makes the rows) of the chunks of one entry of a tensor: of a
        vocabulary by parts, of all else at once."""
        first = pieces[0]
        _, layout = place_of(first.path, self.cfg)
        rows, *inner = target.shape
        if layout is not VOCABULARY:
            yield 0, target.shape, partial(self._whole, part, target, pieces)
            return
        step = max(1, ROWS_BYTES // max(1, 4 * math.prod(inner)))
        for start in range(0, rows, step):
            box = (slice(start, min(start + step, rows)), *(slice(0, n) for n in inner))
            shape = (box[0].stop - start, *inner)
            yield start, shape, partial(_read_as, part, first.path, box)

    def _whole(self, part: WrittenPart, target: _Target, pieces: list[_Piece]) -> np.ndarray:
        out = np.empty(target.shape, part.dtype)
        for piece in pieces:
            spec = self.specs[piece.path]
            _, layout = place_of(piece.path, self.cfg)
            lead = leading_axes(spec)
            inner = spec.shape[lead:]
            index = (*(slice(i, i + 1) for i in piece.at), *(slice(0, n) for n in inner))
            ours = part.source.read(piece.path, index).reshape(inner)
            sizes = sizes_at(piece.path, self.cfg)
            _put_in_place(out, ours, layout, sizes, piece)
        return out


def _read_as(part: WrittenPart, path: Leaf, box: Index) -> np.ndarray:
    return part.source.read(path, box).astype(part.dtype)


def _archive_of(make: Callable[[], np.ndarray], sizes: tuple[int, ...]) -> bytes:
    return tensor_archive(make().reshape(sizes))


_OLDER_MASTERS = "optimizer.state.fp32_param."  # of optimizers that are not distributed
_WITH_EXTRA_STATE = tuple(
    f"{name}.weight"
    for name in """linear_proj linear_qkv linear_fc1 linear_fc2 linear_q_proj linear_q_down_proj
    linear_q_up_proj linear_kv_down_proj linear_kv_up_proj linear_q linear_kv fc1_latent_proj
    fc2_latent_proj eh_proj in_proj out_proj self_attention mlp""".split()
)


def _stacks_layers(args: dict) -> bool:
    """Whether Megatron puts equal tensors of all layers into one: as its transformer_block.py."""
    if args["hybrid_layer_pattern"] is not None or args.get("heterogeneous_block_specs"):
        return False
    return not isinstance(args["moe_layer_freq"], list)


def _put_in_place(
    out: np.ndarray, ours: np.ndarray, layout: MegatronLayout, cfg: ModelConfig, piece: _Piece
) -> None:
    """Put one of ours into Megatron's tensor."""
    if layout is PLAIN or (layout.convert is TRANSPOSED.convert):
        out[...] = ours if layout is PLAIN else ours.T
        return
    box = [slice(0, n) for n in ours.shape]
    part_rows = len(out) if piece.parts_apart else len(out) // layout.parts

    def places(rows: slice, *rest: slice, part: int = 0) -> np.ndarray:
        """The places of a box in the tensor; parts that are tensors of their own lie far away."""
        first = part * (_APART_ROWS if piece.parts_apart else part_rows)
        at = np.arange(rows.start, rows.stop) + first
        sizes = out.shape[1:]
        for columns, size in zip(rest, sizes, strict=True):
            at = at[..., None] * size + np.arange(columns.start, columns.stop)
        return at

    at = layout.convert(places, cfg, ours.shape, box).reshape(-1)
    ours = ours.reshape(-1)
    if piece.parts_apart:
        apart = _APART_ROWS * math.prod(out.shape[1:])
        own = at // apart == piece.part
        at, ours = at[own] % apart, ours[own]
    out.reshape(-1)[at] = ours


_APART_ROWS = 2**24  # between the rows of parts that are tensors of their own


def _compare(folder: Path, parts: list[WrittenPart]) -> None:
    """`UserError` unless the folder gives back what was written."""
    store = open_torch_dist(folder)
    model = megatron_source(folder)
    model.check()
    found = [model]
    if len(parts) > 1:
        state = optimizer_state(store, model.cfg, model)
        found += [state.masters, state.mu, state.nu]
    for back, part in zip(found, parts, strict=True):
        for path, spec in flat(definition_of(model.cfg).specs).items():
            if part.source.has is None or path in part.source.has:
                _compare_leaf(folder, back, part, path, spec)


def _compare_leaf(
    folder: Path, back: Source, part: WrittenPart, path: Leaf, spec: ParamSpec
) -> None:
    """Compare a parameter, one that is stacked layer by layer."""
    boxes = [tuple(slice(0, n) for n in spec.shape)]
    if leading_axes(spec):
        rest = boxes[0][1:]
        boxes = [(slice(i, i + 1), *rest) for i in range(spec.shape[0])]
    for box in boxes:
        want = _masked(_read_as(part, path, box), path, part.source.cfg)
        if not np.array_equal(back.read(path, box), want, equal_nan=True):
            name = part.prefix + ".".join(path)
            raise UserError(f"{folder}: {name} reads back differently; write again")


def _masked(x: np.ndarray, path: Leaf, cfg: ModelConfig) -> np.ndarray:
    """Rows that pad the vocabulary are zero when read."""
    if place_of(path, cfg)[1] is VOCABULARY:
        x = np.array(x)
        x[cfg.vocab_size :] = 0
    return x
