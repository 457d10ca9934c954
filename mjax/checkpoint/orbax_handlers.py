"""Handlers added to orbax's own: digests of all files of a step, and files that travel with it.

Its arguments for the arrays of a state are here, too.

`registry` is handed to orbax's CheckpointManager. Invariant: digests are made after the last byte
of a step is written and before orbax gives the step its name, in the background like the writing.
Each process reads back the arrays it wrote itself, and the first one the rest, so no process reads
more than its own part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.future import ChainedFuture, Future

from mjax.checkpoint.base import digest
from mjax.checkpoint.base.companion_files import SIDE_FILES, write_files
from mjax.config.languages.layer_pattern import stacks_of

CHUNK = 64 * 2**20  # bytes; parameters can then be read in parts without reading much more
CRITIC = "critic"  # item of a step: the state of a critic that is trained beside (PPO)
DATA_OF_PROCESS = "ocdbt.process_{}"  # orbax's folder for the arrays that a process wrote


def registry(digests: bool) -> ocp.handlers.CheckpointHandlerRegistry:
    """The handlers of a step's arrays and files; `digests`: whether digests are computed.

    Orbax finds its own handler for the record.
    """
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    state = DigestingHandler() if digests else ocp.StandardCheckpointHandler()
    critic = ocp.StandardCheckpointHandler()  # ends before `state`, whose digests are of all files
    handlers.add(CRITIC, ocp.args.StandardSave, critic)
    handlers.add(CRITIC, ocp.args.StandardRestore, critic)
    handlers.add("state", ocp.args.StandardSave, state)
    handlers.add("state", ocp.args.StandardRestore, state)
    handlers.add(SIDE_FILES, FilesSave, FilesHandler())
    return handlers


def with_buffers(wanted: dict, saved: Mapping) -> dict:
    """An abstract state with the buffers of orbax's record of a step, whole on each device."""
    sharding = wanted["step"].sharding

    def whole(array: ocp.metadata.ArrayMetadata) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    state = dict(wanted)
    state.pop("buffers", None)
    if "buffers" in saved:
        state["buffers"] = jax.tree.map(whole, saved["buffers"])
    return state


class DigestingHandler(ocp.StandardCheckpointHandler):
    """Orbax's handler of arrays, which also leaves the digests of all files of the step."""

    async def async_save(self, directory, *args, **kwargs) -> list[Future]:
        futures = await super().async_save(directory, *args, **kwargs)
        folder = Path(getattr(directory, "path", directory))
        return [ChainedFuture(futures, partial(digest_own_arrays, folder))]

    def finalize(self, directory) -> None:
        """Orbax calls it in the first process, when all have written."""
        super().finalize(directory)  # merges what the processes wrote
        step = Path(directory).parent
        known: dict[str, digest.FileDigest] = {}
        for part in sorted(step.glob(_list_of_process("*"))):
            known |= digest.read_list(part)
            part.unlink()
        digest.write_digests(step, known)

    @classmethod
    def typestr(cls) -> str:
        """Plain orbax reads what this handler wrote."""
        return ocp.StandardCheckpointHandler.typestr()


def digest_own_arrays(state: Path) -> None:
    """Leave digests of the array files that this process wrote, for the first process to find."""
    own = state / DATA_OF_PROCESS.format(jax.process_index()) / "d"
    files = sorted(own.iterdir()) if own.is_dir() else []
    names = [f"state/{file.relative_to(state).as_posix()}" for file in files]
    digests = dict(zip(names, digest.digest_files(files), strict=True))
    digest.write_list(state.parent / _list_of_process(jax.process_index()), digests)


def _list_of_process(process: object) -> str:
    return f"digests.process_{process}"


class FilesHandler(ocp.CheckpointHandler):
    """Writes small files as they are; the first process does."""

    def save(self, directory, args: "FilesSave") -> None:
        if jax.process_index() == 0:
            write_files(Path(directory), args.files)

    def restore(self, directory, args: object = None) -> None:
        raise NotImplementedError("side files are read where they lie")


@ocp.args.register_with_handler(FilesHandler, for_save=True)
@dataclass
class FilesSave(ocp.args.CheckpointArgs):
    """files: name -> content."""

    files: Mapping[str, bytes]


def save_args(state: dict, kinds: Sequence[str]) -> dict:
    """Chunks of at most `CHUNK` bytes for orbax; those of a large stack hold one layer.

    `kinds` are those of the model's layers.
    """
    stacks = stacks_of(kinds)

    def one(path: tuple, leaf: jax.Array) -> ocp.SaveArgs:
        stacked = any(getattr(key, "key", None) in stacks for key in path)
        layers = (0,) if stacked and leaf.nbytes > CHUNK else ()
        return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=layers)

    return jax.tree_util.tree_map_with_path(one, state)
