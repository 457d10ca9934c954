"""Checkpoints of Megatron-LM's format `torch`, opened as those of `torch_dist`.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds what the rank of these tp, pp and ep has, under
the names of its modules: layers and experts by their number there, shards of the rest. Each
becomes a chunk of the whole tensor, under the name that it has in `torch_dist`.
Source: megatron/training/checkpointing.py, core/tensor_parallel, core/transformer.
"""

import argparse
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from mjax.errors import UserError
from mjax.interop.megatron.stored.archives import (
    FilePart,
    MappedTensor,
    damage_named,
    load_archive,
    mapped_tensor,
    storage_places,
)
from mjax.interop.megatron.stored.quantized import Quantized
from mjax.interop.megatron.stored.torch_dist import CONVERT, TorchChunk, TorchDist, TorchTensor

_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"(.*?(?:encoder|decoder)\.layers\.)(\d+)(\..*)")
_EXPERT_OF_RANK = re.compile(
    r"(.*\.mlp\.experts\.)(?:local_experts\.(\d+)\.(linear_fc\d\.\w+)|(linear_fc\d\.weight)(\d+))"
)
# Tensors whose rows or columns are cut over tp; the others are whole on every rank.
_CUT_ROWS = re.compile(
    r".*\.(word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1|linear_q_proj"
    r"|linear_q_up_proj|linear_kv_up_proj|eh_proj|self_attention|mlp)\.(weight|bias)"
    r"|.*\.softmax_offset"
)
_CUT_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2|mixer\.out_proj)\.weight")
_CUT_MIXER = re.compile(r".*\.mixer\.(A_log|D|dt_bias|(conv1d|in_proj|norm)\.(weight|bias))")
_PARTS_OF_MIXER = re.compile(r".*\.mixer\.(in_proj|conv1d)\.(?:weight|bias)")  # has several parts
_LATENT = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")  # cut or whole, by the modules' kind


@dataclass(frozen=True)
class _RankFile:
    """The file of a rank: its name within the folder, and the tensors of its parts of the model by
    name, of which there are several in a virtual pipeline."""

    name: str
    size: int
    models: list[dict[str, MappedTensor]]
    args: argparse.Namespace
    iteration: object


def holds_files_by_rank(folder: Path) -> bool:
    return any(folder.glob(f"mp_rank_*/{_FILE}"))


def open_per_rank(folder: Path) -> TorchDist:
    """Open an iteration's folder. Reads no tensor; runs nothing that its pickles name."""
    files = {}
    for path in sorted(folder.glob(f"mp_rank_*/{_FILE}")):
        if found := _RANK.fullmatch(path.parent.name):
            files[found.groups()] = _file_of_rank(folder, path)
    if not files:
        raise UserError(f"{folder}: no folder is named mp_rank_00 or alike; copy it again")
    first = next(iter(files.values()))
    axes = "tensor", "pipeline", "expert"
    tp, pp, ep = (_number_of_ranks(folder, first, f"{axis}_model_parallel_size") for axis in axes)
    ranks: dict[tuple[int, int], dict[int, _RankFile]] = defaultdict(dict)
    for (t, one, other), file in files.items():
        stage, expert = (one if pp > 1 else None), (other if pp > 1 else one)
        ranks[int(t), int(stage or 0)][int(expert or 0)] = file
    wanted = {(t, p) for t in range(tp) for p in range(pp)}
    experts = {e for own in ranks.values() for e in own}
    parts = {len(file.models) for file in files.values()}  # of the model, in a virtual pipeline
    if wanted != set(ranks) or experts != set(range(ep)) or len(parts) > 1:
        raise UserError(
            f"{folder} has {len(files)} folders mp_rank_*, which are not those of tp {tp}, pp {pp} "
            f"and ep {ep} that its arguments say; copy the checkpoint again, whole"
        )
    with damage_named(f"{folder}: its ranks hold no one model"):
        tensors = _Assembly(folder, first.args, tp, pp, ep).tensors(ranks, max(parts))
    common = {"args": first.args, "iteration": first.iteration}
    why = f"the format 'torch' numbers the optimizer's state by rank; {CONVERT}"
    return TorchDist(folder, tensors, common, first.name, why)


def _number_of_ranks(folder: Path, file: _RankFile, name: str) -> int:
    value = getattr(file.args, name, 1) or 1
    if not isinstance(value, int) or not 1 <= value < 10_000:
        raise UserError(f"{folder / file.name}: args.{name}={value!r} is no number of ranks")
    return value


def _file_of_rank(folder: Path, path: Path) -> _RankFile:
    name, size = str(path.relative_to(folder)), path.stat().st_size
    with damage_named(f"{path}: cannot read it"), path.open("rb") as file:
        part = FilePart(file, 0, size)
        state = load_archive(part)
        places = storage_places(part)
        args = state.get("args")
        if not isinstance(args, argparse.Namespace):
            raise UserError(f"{path} holds no `args`: it is no checkpoint of Megatron-LM's scripts")
        keys = [key for key in state if re.fullmatch(r"model\d*", str(key))]
        keys.sort(key=lambda key: (len(key), key))
        models = [_mapped_model(path, state[key], places) for key in keys]
        return _RankFile(name, size, models, args, state.get("iteration"))


def _mapped_model(path: Path, model: object, places: dict[str, int]) -> dict[str, MappedTensor]:
    """The tensors of a part of the model; extra states are left out."""
    if not isinstance(model, dict) or "language_model" in model:
        raise UserError(f"{path}: the model is one of Megatron-LM before its core; {CONVERT}")
    found = {}
    for name, value in model.items():
        if str(name).rpartition(".")[2].startswith("_extra_state"):
            continue
        if isinstance(value, tuple | Quantized):
            found[str(name)] = mapped_tensor(value, places)
    return found


class _Assembly:
    """Puts the tensors of all ranks together."""

    def __init__(self, folder: Path, args: argparse.Namespace, tp: int, pp: int, ep: int):
        self.folder, self.args, self.tp, self.pp = folder, args, tp, pp
        self.experts = (getattr(args, "num_experts", None) or 0) // ep  # of a rank
        self.expert_tp = getattr(args, "expert_tensor_parallel_size", None) or tp
        if self.experts and self.expert_tp not in (1, tp):
            raise UserError(
                f"{folder}: args.expert_tensor_parallel_size={self.expert_tp} is neither 1 nor tp; "
                f"{CONVERT}"
            )
        self.ties = not getattr(args, "untie_embeddings_and_output_weights", False)
        self.found: dict[str, dict[tuple, TorchChunk]] = defaultdict(dict)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def tensors(self, ranks: dict, parts: int) -> dict[str, TorchTensor]:
        """The tensors of all ranks, each of which has so many parts of the model."""
        before: Counter = Counter()  # layers of earlier stages, by the name of their block
        for part in range(parts):
            for stage in range(self.pp):
                layers: Counter = Counter()
                for tensor in range(self.tp):
                    for expert, file in ranks[tensor, stage].items():
                        for name, place in file.models[part].items():
                            own = self._name(name, before, layers, expert)
                            self._add(own, place, file, tensor)
                before += layers
        return {
            name: TorchTensor(self.shapes[name], tuple(chunks.values()))
            for name, chunks in self.found.items()
        }

    def _name(self, name: str, before: Counter, layers: Counter, rank: int) -> str:
        """The name in `torch_dist`: layers and experts by their number in the model."""
        if found := _LAYER.fullmatch(name):
            block, number, rest = found[1], int(found[2]), found[3]
            layers[block] = max(layers[block], number + 1)
            name = f"{block}{number + before[block]}{rest}"
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        name = name.replace(".mixer.conv1d_", ".mixer.conv1d.")  # of newer versions
        if found := _EXPERT_OF_RANK.fullmatch(name):
            number = int(found[2] or found[5]) + rank * self.experts
            name = f"{found[1]}experts.{number}.{found[3] or found[4]}"
        return name

    def _add(self, name: str, place: MappedTensor, file: _RankFile, rank: int) -> None:
        """Add the chunks that a rank has of a tensor; what another has, too, is left out."""
        if not place.shape or (name.endswith("output_layer.weight") and self.ties):
            return  # the last stage's own copy of the embedding
        axis, ways = self._cut(name, place)
        first = 0
        for ending, size in self._parts(name, place):
            start, shape = [0] * len(place.shape), list(place.shape)
            shape[0] = size
            whole = list(shape)
            start[axis], whole[axis] = rank * shape[axis] if ways > 1 else 0, ways * shape[axis]
            self.shapes.setdefault(name + ending, tuple(whole))
            box = tuple(start), tuple(shape)
            chunk = TorchChunk(*box, file.name, 0, file.size, place, first)
            self.found[name + ending].setdefault(chunk.start, chunk)
            first += size

    def _parts(self, name: str, place: MappedTensor) -> list[tuple[str, int]]:
        """Endings of the names of a tensor's parts, each of which is cut for itself, and the rows
        of each."""
        rows = place.shape[0]
        if self._is_gated(name):
            return [("_w", rows // 2), ("_v", rows // 2)]
        if not (found := _PARTS_OF_MIXER.fullmatch(name)):
            return [("", rows)]
        head = self._argument("mamba_head_dim", 64)
        heads = self._argument("mamba_num_heads", 2 * self._argument("hidden_size", 0) // head)
        groups = self._argument("mamba_num_groups", 8) // self.tp
        heads, group = heads // self.tp, groups * self._argument("mamba_state_dim", 128)
        inner = heads * head
        sizes = {".z": inner, ".x": inner, ".B": group, ".C": group, ".dt": heads}
        if found[1] == "conv1d":
            sizes = {ending: sizes[ending] for ending in (".x", ".B", ".C")}
        if sum(sizes.values()) != rows:
            raise UserError(
                f"{self.folder}: {name!r} of a rank has {rows} rows, not the {sum(sizes.values())} "
                "of the Mamba mixer in its arguments; such a model cannot be imported"
            )
        return [*sizes.items()]

    def _cut(self, name: str, place: MappedTensor) -> tuple[int, int]:
        """The axis over which a tensor is cut, and the number of its parts."""
        ways = self.expert_tp if ".mlp.experts." in name else self.tp
        dotted = f".{name}"
        if found := _LATENT.fullmatch(dotted):
            rank = getattr(self.args, f"{found[1]}_lora_rank", None) or 0
            turned = getattr(self.args, "qk_pos_emb_head_dim", 0) if found[1] == "kv" else 0
            return 0, 1 if place.shape[0] == rank + turned else ways
        if _CUT_ROWS.fullmatch(dotted) or _CUT_MIXER.fullmatch(dotted):
            return 0, ways
        return (1, ways) if _CUT_COLUMNS.fullmatch(dotted) else (0, 1)

    def _argument(self, name: str, default: int) -> int:
        return getattr(self.args, name, None) or default

    def _is_gated(self, name: str) -> bool:
        gated = any(getattr(self.args, key, False) for key in ("swiglu", "gated_linear_unit"))
        of_tower = name.startswith("vision_") and getattr(self.args, "vision_model_type", None)
        return gated and not of_tower and name.endswith((".linear_fc1.weight", ".linear_fc1.bias"))
