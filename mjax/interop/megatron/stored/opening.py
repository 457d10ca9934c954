"""Opens a checkpoint of Megatron-LM in any format that is read, told by the files in its folder.

`fsdp_dtensor` (Megatron-FSDP) is torch's own distributed checkpoint of the nested state, its names
joined by dots: of modules as they are wrapped, and of optimizer state a parameter at a time.
Source: megatron/training/checkpointing.py, core/transformer/fsdp_dtensor_checkpoint.py.
"""

import re
from pathlib import Path

from mjax.errors import UserError
from mjax.interop.megatron.stored.archives import FilePart, Inert, damage_named, load_archive
from mjax.interop.megatron.stored.per_rank import holds_files_by_rank, open_per_rank
from mjax.interop.megatron.stored.torch_dist import (
    CONVERT,
    TorchDist,
    file_within,
    iteration_folder,
    open_torch_dist,
    read_metadata,
    tensors_of,
)

_WRAPPED = re.compile(r"(?:model\.|module\.)+")
_STATE_OF_ONE = re.compile(r"optimizer\.state\.(.+)\.(\w+)")
_EXPERT_OF_GROUP = re.compile(r"(.*\.mlp\.experts\.)(linear_fc\d\.weight)(\d+)(_[wv])?")
_OBJECTS = re.compile(r"args|iteration|optimizer\.param_groups|opt_param_scheduler\..+")


def open_checkpoint(path: str | Path) -> TorchDist:
    """Open a run folder (its latest iteration) or one iteration's folder. Reads no tensor."""
    folder = iteration_folder(Path(path))
    if (folder / "metadata.json").exists():
        return open_torch_dist(folder)
    if holds_files_by_rank(folder):
        return open_per_rank(folder)
    if (folder / ".metadata").exists():
        return _open_fsdp(folder)
    return open_torch_dist(folder)


def _open_fsdp(folder: Path) -> TorchDist:
    with damage_named(f"{folder}: cannot read .metadata"):
        metadata = read_metadata(folder)
        tensors = {_name_of_wrapped(name): x for name, x in tensors_of(metadata).items()}
        common = _objects(folder, metadata)
    args = common.get("args")
    is_fsdp = getattr(args, "ckpt_format", None) == "fsdp_dtensor"
    if not is_fsdp or (getattr(args, "pipeline_model_parallel_size", 1) or 1) != 1:
        raise UserError(
            f"{folder} has .metadata but no metadata.json: format torch_dcp, fsdp_dtensor with a "
            f"pipeline, or a save that never finished; {CONVERT}, or take another iteration"
        )
    return TorchDist(folder, tensors, common, "args")


def _objects(folder: Path, metadata: Inert) -> dict:
    """The objects that are read, nested as they were saved."""
    found: dict = {}
    for index, place in metadata.storage_data.items():
        if not _OBJECTS.fullmatch(index.fqn):
            continue
        with file_within(folder, str(place.relative_path)).open("rb") as file:
            value = load_archive(FilePart(file, place.offset, place.length))
        group, _, name = index.fqn.rpartition(".")
        (found.setdefault(group, {}) if group else found)[name] = value
    return found


def _name_of_wrapped(name: str) -> str:
    """The name that `torch_dist` has for a tensor."""
    if state := _STATE_OF_ONE.fullmatch(name):
        return f"optimizer.state.{state[2]}.{_name_of_wrapped(state[1])}"
    name = _WRAPPED.sub("", name, count=1) if _WRAPPED.match(name) else name
    if found := _EXPERT_OF_GROUP.fullmatch(name):
        return f"{found[1]}experts.{found[3]}.{found[2]}{found[4] or ''}"
    return name.replace(".experts.local_experts.", ".experts.experts.")
