"""The likeliest tokens of a teacher for each sample of a run, in files: a shard a file.

A shard holds consecutive samples in the order of the run's data, which no mesh and no batch size
changes. Invariant: a row of a batch gets what was written for its own tokens; a checksum of them
lies beside it. The folder's `teacher.json` says by which teacher and temperature it was written.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mjax.errors import UserError, or_user_error
from mjax.files import replace_text
from mjax.json_file import read_json
from mjax.models.base.context import Documents
from mjax.objectives.fields import HostBatch
from mjax.run.batches import BatchStream, DatasetStream, RowsOf, RunBatches
from mjax.sharding.processes.agreement import on_process_0

TEACHER_RECORD = "teacher.json"
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"


@dataclass(frozen=True)
class TeacherStore:
    """A folder of shards."""

    folder: Path

    @cached_property
    def record(self) -> dict:
        """{"top": K, "temperature", "vocab_size", "teacher"}."""
        found = read_json(self.folder / TEACHER_RECORD, missing={})
        if not {"top", "temperature", "vocab_size"} <= found.keys():
            raise UserError(
                f"{self.folder}: there is no {TEACHER_RECORD} of a teacher; write the folder with "
                "mjax distill --write"
            )
        return found

    def shard(self, part: str, first: int) -> Path:
        """The file of the samples from `first` on; `part` is "train" or "held_out"."""
        return self.folder / f"{part}-{first:010d}.npz"

    @cached_property
    def firsts(self) -> dict[str, np.ndarray]:
        """The first samples of the shards of each part, in order."""
        found = {}
        for part in ("train", "held_out"):
            names = [path.stem for path in self.folder.glob(f"{part}-*.npz")]
            found[part] = np.array(sorted(int(name.rpartition("-")[2]) for name in names))
        return found

    def read(self, part: str, samples: range, tokens: np.ndarray) -> HostBatch:
        """The fields of samples with these tokens int32 [B, S]."""
        shards: dict[int, dict] = {}
        rows = []
        for number, row in zip(samples, tokens, strict=True):
            at = int(np.searchsorted(self.firsts[part], number, side="right")) - 1
            first = int(self.firsts[part][at]) if at >= 0 else -1
            if at >= 0 and first not in shards:
                shards[first] = self._arrays(part, first)
            if at < 0 or number - first >= len(shards[first]["checksums"]):
                raise UserError(
                    f"{self.folder}: sample {number} of {part} is not in it; write it with the "
                    "data and the steps of this run"
                )
            if shards[first]["checksums"][number - first] != zlib.crc32(row.tobytes()):
                raise UserError(
                    f"{self.shard(part, first)}: sample {number} was written for other tokens; "
                    "the data, its order or data.seq_length changed: write the folder anew"
                )
            rows.append((shards[first], number - first))
        return {name: np.stack([shard[name][i] for shard, i in rows]) for name in (IDS, LOG_PROBS)}

    def _arrays(self, part: str, first: int) -> dict:
        path = self.shard(part, first)
        wrong = f"{path}: cannot be read: {{reason}}; delete it and write it anew"
        broken = OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error
        with or_user_error(wrong, broken), np.load(path) as found:
            return {name: found[name] for name in (IDS, LOG_PROBS, "checksums")}

    def write(self, part: str, first: int, tokens: np.ndarray, found: HostBatch) -> None:
        """Write a shard, whole or not at all."""
        sums = np.array([zlib.crc32(row.tobytes()) for row in tokens], np.uint32)
        path = self.shard(part, first)
        new_file = path.with_name(f".{path.name}.tmp")
        with or_user_error(f"{path}: cannot be written: {{reason}}; make room, and start again"):
            try:
                with new_file.open("wb") as file:
                    np.savez(file, checksums=sums, **found)
                os.replace(new_file, path)
            finally:
                new_file.unlink(missing_ok=True)


@dataclass(frozen=True)
class StoredStream:
    """The batches of a stream with what a store holds for their samples."""

    stream: DatasetStream
    store: TeacherStore
    part: str

    @property
    def documents(self) -> Documents:
        return self.stream.documents

    def batches(self, start: int, count: int, rows: RowsOf) -> Iterator[HostBatch]:
        batches = self.stream.batches(start, count, rows)
        try:
            for number, batch in zip(range(start, start + count), batches, strict=True):
                first, size = self.stream.range_of(number)
                samples = range(first, first + size)
                samples = samples if rows is None else samples[rows(size)]
                tokens = np.asarray(batch["tokens"], np.int32)
                yield batch | self.store.read(self.part, samples, tokens)
        finally:
            batches.close()

    def describe(self, start: int, count: int, most: int) -> str:
        return self.stream.describe(start, count, most)


def with_stored_teacher(batches: RunBatches, store: TeacherStore) -> RunBatches:
    """The batches of a run with the fields of a store."""

    def stored(stream: BatchStream | None, part: str) -> StoredStream | None:
        return None if stream is None else StoredStream(stream, store, part)

    training, held_out = stored(batches.training, "train"), stored(batches.held_out, "held_out")
    return replace(batches, training=training, held_out=held_out)


def write_record(folder: Path, record: dict) -> TeacherStore:
    """A store to write to, new or of the same teacher. Raises `UserError` for another one's."""
    store = TeacherStore(folder)

    def write() -> None:
        if (folder / TEACHER_RECORD).exists() and store.record != record:
            line = "was written by another teacher or setting; name a new folder"
            raise UserError(f"{folder} {line}")
        with or_user_error(f"{folder}: cannot be written: {{reason}}"):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / TEACHER_RECORD, json.dumps(record, indent=1))

    on_process_0(write)
    return store
