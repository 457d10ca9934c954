"""Checkpoints near the devices: each process keeps its part of the state, and that of a peer.

They are the fast tier between those of run.dir (`checkpoint.local_dir`), after Megatron-LM's local
checkpoints. Process P writes `process-P/STEP/own.bin` on its node, and `peer.bin` with the part of
a process of another node, which came over the network between the devices. So a job that loses one
node finds every part on the others. A file holds the bytes of the process's shards, array by array,
each index once; digests lie beside it (`checkpoint/base/digest.py`).

Invariants: a folder named by a step is complete for its process; a step is removed once all
processes have a newer one; a step is restored only if every part of it is intact on some node, by a
job of the same mesh. All methods but `wait` are called by all processes together.
"""

import hashlib
import json
import math
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mjax.checkpoint.base import digest
from mjax.checkpoint.base.companion_files import identify_text
from mjax.checkpoint.base.continuation import keeps_buffers, require_continuation
from mjax.checkpoint.base.digest import DamagedCheckpoint, read_digests, write_digests
from mjax.checkpoint.base.orbax_messages import plain_reason
from mjax.checkpoint.local.peers import (
    devices_by_process,
    gather_numbers,
    in_device_order,
    machine_id,
    send,
)
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.optim.schedule import consumed_samples

OWN, PEER, RECORD = "own.bin", "peer.bin", "record.json"
NONE = -1  # among numbers that processes exchange
MOST_STEPS = 4  # that a node holds: two, and what a failure left


class NodeStore:
    """The steps in `directory`, which every process sees on its own node."""

    def __init__(self, directory: Path, cfg: Config) -> None:
        self.directory = directory
        self.cfg = cfg
        self._mine = directory / f"process-{jax.process_index()}"
        self._writer: threading.Thread | None = None
        self._error = ""  # why this process's last save failed

    # ---- saving ------------------------------------------------------------------------------

    def save(self, step: int, state: dict, further: dict) -> None:
        """Copy the state to this host and its peer; the writing goes on behind.

        `further`: entries of the record beyond those of all runs, as JSON.
        The arrays of `state` may be donated as soon as this returns.
        """
        self.wait()
        newest = max(steps_of(self._mine), default=NONE)
        newest_of, nodes = gather_numbers([newest, self._node()]).T
        leaves, me, processes = jax.tree.leaves(state), jax.process_index(), jax.process_count()
        shards = [[shard.data for shard in in_device_order(leaf)] for leaf in leaves]
        parts = {OWN: (me, [_to_host(of_leaf) for of_leaf in shards])}
        if distance := _distance_to_peer(nodes):
            devices = devices_by_process(leaves[0])
            pairs = [(process, (process + distance) % processes) for process in range(processes)]
            # One array after the other, so that the devices hold one of a peer's at a time.
            sent = [jax.block_until_ready(_to_host(send(x, devices, pairs))) for x in shards]
            parts[PEER] = ((me - distance) % processes, sent)
        record = {
            "step": step,
            "consumed_samples": consumed_samples(self.cfg.train, step),
            "config": self.cfg.model_dump(mode="json"),
            "layout": _layout(state),
            "text_digests": self._text_digests,
            **further,
        }
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        arguments = step, record, abstract, parts, newest_of.min()
        self._writer = threading.Thread(target=self._write, args=arguments)
        self._writer.start()

    def wait(self) -> str:
        """Return when this process is not writing; why its last save failed, or ""."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        return self._error

    def _write(self, step: int, record: dict, leaves: list, parts: dict, newest: int) -> None:
        """Write the parts of a step, in a thread, and remove the steps before `newest`."""
        self._error = ""
        temporary = self._mine / f"{step}{digest.TEMPORARY}"
        try:
            for old in [s for s in steps_of(self._mine) if s < newest]:
                shutil.rmtree(self._mine / str(old))
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, (origin, shards) in parts.items():
                _write_part(temporary / name, leaves, origin, shards)
            origins = {name: origin for name, (origin, _) in parts.items()}
            (temporary / RECORD).write_text(json.dumps(record | {"origins": origins}))
            write_digests(temporary)
            temporary.rename(self._mine / str(step))
        except Exception as e:
            self._error = plain_reason(e)
            shutil.rmtree(temporary, ignore_errors=True)

    # ---- restoring ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that any process sees on its node, newest first."""
        folders = self.directory.glob("process-*")
        seen = {step for folder in folders for step in steps_of(folder)}
        newest = sorted(seen, reverse=True)[:MOST_STEPS]
        padding = [NONE] * (MOST_STEPS - len(newest))
        gathered = gather_numbers([*newest, *padding])
        found = set(gathered.flatten().tolist()) - {NONE}
        return sorted(found, reverse=True)

    def newest(self) -> Path | None:
        """The newest step of this process, for messages."""
        step = max(steps_of(self._mine), default=None)
        return None if step is None else self._mine / str(step)

    def restore(self, abstract: dict, step: int) -> dict:
        """The state of `step`, laid out as `abstract` says.

        Raises `DamagedCheckpoint`, in all processes, unless every part is intact on some node and
        was saved by a job of the same mesh.
        """
        leaves, tree = jax.tree.flatten(abstract)
        files, reason = self._intact(step, _layout(abstract))
        origins = range(jax.process_count())
        table = gather_numbers([origin in files for origin in origins])
        holders = [_holder(table[:, origin], origin) for origin in origins]
        if NONE in holders:
            raise DamagedCheckpoint(
                f"checkpoint {self.directory}, step {step}: the part of process "
                f"{holders.index(NONE)} is on no node that is left{reason}"
            )
        shards = self._collect(holders, files, leaves)
        arrays = [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, of_leaf)
            for leaf, of_leaf in zip(leaves, shards, strict=True)
        ]
        self._remove_strange(step)
        return jax.tree.unflatten(tree, arrays)

    def _remove_strange(self, step: int) -> None:
        """Remove steps newer than the one that all go on from, and files of absent processes.

        To be called once all have read the files that they need.
        """
        nodes = gather_numbers([self._node()])[:, 0]
        here = {
            f"process-{p}" for p, node in enumerate(nodes) if node == nodes[jax.process_index()]
        }
        for folder in self.directory.glob("process-*"):
            if folder.name not in here:
                shutil.rmtree(folder, ignore_errors=True)
        for newer in [s for s in steps_of(self._mine) if s > step]:
            shutil.rmtree(self._mine / str(newer), ignore_errors=True)

    def _node(self) -> int:
        """A number that processes share which see the same folder."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            found = os.stat(self.directory)
        except OSError:  # the write will say so
            return NONE - 1 - jax.process_index()
        return zlib.crc32(f"{machine_id()} {found.st_dev} {found.st_ino}".encode())

    def _collect(
        self, holders: list[int], files: dict[int, Path], leaves: list[jax.ShapeDtypeStruct]
    ) -> list[list[jax.Array]]:
        """The shards of this process of each array; `holders` are processes that can read them."""
        me, devices, found = jax.process_index(), devices_by_process(leaves[0]), []
        for origin_of in _rounds(holders):
            origin = origin_of.get(me)
            is_receiver = me in origin_of.values()
            travels = any(holder != origin for holder, origin in origin_of.items())
            if not travels and not is_receiver:
                continue
            file = None if origin is None else files[origin]
            for of_leaf in _read_part(file, leaves, me if origin is None else origin):
                if travels:
                    of_leaf = send(of_leaf, devices, list(origin_of.items()))
                if is_receiver:
                    found.append(of_leaf)
        return found

    @cached_property
    def _text_digests(self) -> dict[str, str]:
        return identify_text(self.cfg)

    def read_meta(self, step: int) -> dict:
        """The record of a step; this run's own where this node holds no part of it."""
        for folder in self.directory.glob(f"process-*/{step}"):
            return json.loads((folder / RECORD).read_text())
        return {"config": self.cfg.model_dump(mode="json")}

    def _intact(self, step: int, layout: str) -> tuple[dict[int, Path], str]:
        """The files of a step on this node that can be read, by the process whose part it is.

        The second says why a part cannot be, or is "".
        """
        files, reason = {}, ""
        for folder in sorted(self.directory.glob(f"process-*/{step}")):
            try:
                digests = read_digests(folder)
                if digests is None:
                    raise DamagedCheckpoint(f"{folder} has no digests")
                digests.verify()
                record = json.loads((folder / RECORD).read_text())
                require_continuation(self.cfg, record, folder)
                if not keeps_buffers(self.cfg, record):
                    raise DamagedCheckpoint("another recipe of 8 bits has saved it")
                if record["layout"] != layout:
                    raise DamagedCheckpoint("another mesh has saved it")
                files |= {origin: folder / name for name, origin in record["origins"].items()}
            except UserError as e:  # told by all, since others may hold no part of the step
                reason = f" ({e})"
        return files, reason

    def remove_remains(self) -> None:
        """Remove what killed saves left on this node."""
        for torso in self.directory.glob(f"process-*/*{digest.TEMPORARY}*"):
            shutil.rmtree(torso, ignore_errors=True)


def steps_of(folder: Path) -> list[int]:
    """The steps in the folder of a process."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def _holder(can_read: np.ndarray, origin: int) -> int:
    """The process to read the part of `origin`: itself if it can, else the first, or NONE."""
    if can_read[origin]:
        return origin
    return int(np.argmax(can_read)) if can_read.any() else NONE


def _rounds(holders: list[int]) -> Iterator[dict[int, int]]:
    """{holder: the process whose part it reads}, until all have theirs."""
    left = list(enumerate(holders))
    while left:
        taken: dict[int, int] = {}
        for origin, holder in left:
            taken.setdefault(holder, origin)
        yield taken
        left = [(origin, holder) for origin, holder in left if taken[holder] != origin]


def _distance_to_peer(nodes: np.ndarray) -> int:
    """How many processes further each one's peer is, so that it is on another node; 0: nowhere."""
    processes = len(nodes)
    others = [np.count_nonzero(nodes != np.roll(nodes, -d)) for d in range(processes)]
    return int(np.argmax(others))


# ---- parts of the state --------------------------------------------------------------------------


def _layout(state: dict) -> str:
    """A digest of which device holds which part of each array."""
    text = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        where = leaf.sharding.devices_indices_map(leaf.shape)
        devices = [device for of_process in devices_by_process(leaf) for device in of_process]
        indices = [str(where[device]) for device in devices]
        text.update(f"{path} {leaf.shape} {leaf.dtype} {indices}\n".encode())
    return text.hexdigest()


def _first_slots(leaf: jax.ShapeDtypeStruct, process: int) -> list[int]:
    """For each device of a process, the first one there that holds the same part of an array."""
    where = leaf.sharding.devices_indices_map(leaf.shape)
    seen: dict[str, int] = {}
    devices = devices_by_process(leaf)[process]
    return [seen.setdefault(str(where[device]), slot) for slot, device in enumerate(devices)]


def _to_host(shards: list[jax.Array]) -> list:
    """Copies on the host; from GPUs they are on their way when this returns."""
    if jax.default_backend() == "cpu":
        return [np.array(shard) for shard in shards]
    pinned = {"memory_kind": "pinned_host"}
    return [jax.device_put(x, SingleDeviceSharding(x.device, **pinned)) for x in shards]


def _write_part(file: Path, leaves: list, origin: int, shards: list[list]) -> None:
    """The bytes of each array's shards, those that several devices hold once."""
    with open(file, "wb") as f:
        for leaf, of_leaf in zip(leaves, shards, strict=True):
            for slot, first in enumerate(_first_slots(leaf, origin)):
                if slot != first:
                    continue
                values = np.asarray(of_leaf[slot])
                f.write(values.reshape(-1).view(np.uint8))


def _read_part(
    file: Path | None, leaves: list[jax.ShapeDtypeStruct], origin: int
) -> Iterator[list[jax.Array]]:
    """The shards of `origin` in a file, on this process's devices; zeros without a file."""
    offset = 0
    for leaf in leaves:
        shape, parts = leaf.sharding.shard_shape(leaf.shape), {}
        size = math.prod(shape) * leaf.dtype.itemsize
        slots = _first_slots(leaf, origin)
        for slot in sorted(set(slots)):
            if file is None:
                parts[slot] = np.zeros(shape, leaf.dtype)
            else:
                found = np.fromfile(file, np.uint8, size, offset=offset)
                parts[slot] = found.view(leaf.dtype).reshape(shape)
            offset += size
        here = devices_by_process(leaf)[jax.process_index()]
        yield [jax.device_put(parts[slot], d) for slot, d in zip(slots, here, strict=True)]
