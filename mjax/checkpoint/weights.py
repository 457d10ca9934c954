"""Weights-only checkpoints, written and read block by block.

The folder is what `Store` would have saved of {"params": ...} at step 0, so orbax restores it onto
any mesh; here its arrays are plain zarr, one file a block, uncompressed, and no parameter is ever
whole in memory. Reading takes the parameters out of any of our checkpoints, weights-only or of a
whole train state.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

import mjax
from mjax.checkpoint.base import digest
from mjax.checkpoint.base.companion_files import SIDE_FILES, write_files
from mjax.checkpoint.base.digest import FileDigest
from mjax.checkpoint.base.new_folder import new_folder
from mjax.checkpoint.base.safetensors import write_array
from mjax.checkpoint.base.source import Index, Source, block_shape, blocks, flat, run_all
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.base.stored import WEIGHTS, StoredArrays, read_record
from mjax.checkpoint.store import require_old
from mjax.config.languages.imports import import_modules
from mjax.config.schema.keys import model_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec


def write_weights(
    folder: str | Path,
    source: Source,
    specs: dict,
    dtype: str = "float32",
    extras: Mapping[str, bytes] | None = None,
) -> None:
    """Write the parameters of `source` as `dtype` to the checkpoint `folder`/0, which is new.

    `extras`: side files of the model, by name. Raises `UserError` with nothing written.
    """
    source.check()
    record = {
        "contents": WEIGHTS,
        "config": {"model": source.cfg.model_dump(mode="json")},
        "consumed_samples": 0,
    }
    parts = {("params",): StatePart(source, specs, jnp.dtype(dtype))}
    with new_folder(folder) as temporary:
        write_step(temporary / "0", parts, record, extras)


class StatePart(NamedTuple):
    """Arrays of a state that follow parameters: weights, or moments of one kind."""

    source: Source
    specs: dict
    dtype: np.dtype


def write_step(
    folder: Path,
    parts: Mapping[Leaf, StatePart],
    record: dict,
    extras: Mapping[str, bytes] | None = None,
    numbers: Mapping[Leaf, int | np.float32] | None = None,
) -> None:
    """Write the step `folder`, whose name is its number: `parts` and `numbers`, int32 or fp32, by
    their place in the state, and the record of what made them."""
    state, meta = folder / "state", folder / "meta"
    state.mkdir(parents=True)
    meta.mkdir()
    tasks, places = [], []
    for place, (source, specs, kind) in parts.items():
        for path, spec in flat(specs).items():
            if source.has is not None and path not in source.has:
                source_read = partial(_zero_block, kind)
            else:
                source_read = source.read
            block = block_shape(spec.shape, kind.itemsize, spec.matrix_view()[0])
            places.append((*place, *path))
            array = _create(state, places[-1], spec.shape, block, kind)
            for index in blocks(spec.shape, block):
                tasks.append(partial(_copy, source_read, path, index, array, block, kind))
    for place, number in (numbers or {}).items():
        places.append(place)
        kind = np.dtype(np.int32 if isinstance(number, int) else np.float32)
        array = _create(state, place, (), (), kind)
        read = partial(_scalar_block, number)
        tasks.append(partial(_copy, read, place, (), array, (), kind))
    digests = dict(run_all(tasks))
    (state / "_METADATA").write_text(json.dumps(_tree_metadata(places)), encoding="utf-8")
    versions = {"mjax": mjax.__version__, "jax": jax.__version__}
    record = {"digests": digest.FORMAT, "step": int(folder.name), "versions": versions} | record
    (meta / "metadata").write_text(json.dumps(record), encoding="utf-8")
    if extras:
        (folder / SIDE_FILES).mkdir()
        write_files(folder / SIDE_FILES, extras)
    digest.write_digests(folder, digests)


def _zero_block(kind: np.dtype, path: Leaf, index: Index) -> np.ndarray:
    return np.zeros([s.stop - s.start for s in index], kind)


def _scalar_block(number: int | np.float32, path: Leaf, index: Index) -> np.ndarray:
    return np.asarray(number)


def read_weights(folder: Path) -> Source:
    """The parameters in the newest checkpoint of a run or checkpoint folder; a step is its own.

    `check` of the source reads all files of the step once, to compare them with their digests.
    """
    where = newest_step(folder)
    assert where is not None, folder
    digests = digest.read_digests(where)
    if digests is not None:
        digests.verify("meta/", f"{SIDE_FILES}/", "state/_METADATA")
    cfg = read_config(where)
    return stored_source(where, cfg, flat(definition_of(cfg).specs))


def stored_source(
    where: Path, cfg: ModelConfig, specs: Mapping[Leaf, ParamSpec], part: Leaf = ("params",)
) -> Source:
    """The parameters, declared by path, that the step in `where` holds, or moments in `part`."""
    stored = StoredArrays(where)
    state, digests = stored.state, digest.read_digests(where)

    @cache
    def store(path: Leaf) -> ts.TensorStore:
        return stored.open((*part, *path))

    def read(path: Leaf, index: Index) -> np.ndarray:
        array = store(path)
        with stored.readable((*part, *path)):
            return array[index].read().result()

    def check() -> None:
        if digests is None:
            require_old(where, read_record(where))
        else:
            digests.verify("state/")
        for path, spec in specs.items():
            if store(path).shape != spec.shape:
                raise UserError(
                    f"{state}: parameter {_name(path)} has shape {store(path).shape}, but its "
                    f"config makes it {spec.shape}; the checkpoint is damaged"
                )

    return Source(cfg, read, check)


def read_config(step_folder: Path) -> ModelConfig:
    """The model of the checkpoint in `step_folder`."""
    meta = read_record(step_folder)
    import_modules(meta["config"])
    wrong = (
        f"{step_folder}: its config has model.{{key}}: {{why}}; read it with the mjax that wrote "
        f"it, {meta['versions']['mjax']}"
    )
    return model_of(meta["config"]["model"], wrong)


def _name(path: Leaf) -> str:
    return ".".join(("params", *path))


def _create(
    state: Path, place: Leaf, shape: tuple[int, ...], block: tuple[int, ...], dtype: np.dtype
) -> Path:
    """An array without data, in its own folder."""
    folder = state / ".".join(place)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {"compressor": None, "chunks": block},
    }
    ts.open(spec, create=True, shape=shape, dtype=ts.dtype(dtype)).result()
    return folder


def _copy(
    read: Callable[[Leaf, Index], np.ndarray],
    path: Leaf,
    index: Index,
    folder: Path,
    block: tuple[int, ...],
    dtype: np.dtype,
) -> tuple[str, FileDigest]:
    """Write a block as zarr wants it without compression: its bytes, filled up at the edges.

    Returns the name of the file in the step's folder and the digest of what was in memory.
    """
    part = read(path, index).astype(dtype, copy=False)
    if part.shape != block:
        part = np.pad(part, [(0, n - m) for n, m in zip(block, part.shape, strict=True)])
    name = ".".join(str(s.start // n) for s, n in zip(index, block, strict=True)) or "0"
    with open(folder / name, "wb", buffering=0) as f:
        write_array(f, part)
    content = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return f"state/{folder.name}/{name}", digest.digest_bytes(content)


def _tree_metadata(places: Iterable[Leaf]) -> dict:
    """Orbax's description of the tree {"params": ...}."""
    entries = {}
    for keys in places:
        entries[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # 2: of a dict
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    return {
        "tree_metadata": entries,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
