"""One live run in one folder: the lock that process 0 of a job holds on `run.lock`.

The kernel's lock (flock) distinguishes the processes of one machine, and of several machines if the
file system carries locks between them. If it does not, the record in the file does: host, process
id and a count that the holder raises every few seconds. Invariants: a lock whose holder
died is taken over, and only then; clocks of different machines are never compared, a record is
stale when its count stands still; a holder that finds another's record in the file never writes
to the folder again. An empty file is a free lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

from mjax.checkpoint.local.peers import machine_id
from mjax.errors import UserError
from mjax.sharding.processes.agreement import on_process_0

LOCK_NAME = "run.lock"
BEAT = 5.0  # seconds between two counts of a holder
PATIENCE = 4 * BEAT  # seconds that a count of another machine stands still before it is stale
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """A context that holds the lock of run folder `folder`; raises `UserError` if a live run does.

    Every process of a job enters it. `note` is a line on a lock that was taken over, or "".
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self.note = ""
        self._file = -1
        self._count = 0
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="run_lock", daemon=True)
        self._new_holder: dict | None = None
        self._record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": machine_id(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": uuid.uuid4().hex,
        }

    def __enter__(self) -> "RunLock":
        on_process_0(self._acquire)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._keeper.is_alive():
            return
        self._keeper.join(BEAT)
        if self._keeper.is_alive() or self._file < 0:  # storage that hangs: the kernel frees it
            return
        with contextlib.suppress(OSError):
            if self._new_holder is None:
                os.ftruncate(self._file, 0)
        self._close()

    @property
    def is_lost(self) -> bool:
        """Whether another run holds the folder now, because this one stood still for too long."""
        return self._new_holder is not None

    def loss(self) -> UserError:
        """The error of a run that has lost its lock."""
        return UserError(
            f"{self.path.parent} was taken over by {_describe(self._new_holder or {})} while this "
            "process stood still; it ends without saving"
        )

    def _acquire(self) -> None:
        try:
            is_exclusive = self._open()
            self._take_over(is_exclusive)
            self._write()
            if not is_exclusive:
                time.sleep(BEAT / 2)  # of two that start at once, the last writer stays
                self._beat()
                if self.is_lost:
                    raise self._held_by(self._new_holder)
        except OSError as e:
            if self._file >= 0:
                self._close()
            raise UserError(
                f"{self.path}: cannot be locked: {e.strerror}; free space or mend the folder, or "
                "choose another run.dir"
            ) from e
        self._keeper.start()

    def _open(self) -> bool:
        """Open and lock the file; whether the kernel vouches for the lock."""
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            is_exclusive = True
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._read()
                self._close()
                raise self._held_by(holder) from None
            except OSError as e:
                if e.errno not in UNSUPPORTED:
                    raise
                is_exclusive = False
            if _is_same_file(self._file, self.path):  # not one that was removed just now
                return is_exclusive
            self._close()

    def _take_over(self, is_exclusive: bool) -> None:
        """Return once the record in the file is known to be no live run's."""
        before = self._read()
        if before is None:
            return
        is_here = is_exclusive and before.get("machine") == self._record["machine"]
        until = time.monotonic()
        if not is_here:
            until += PATIENCE
            line = f"{self.path} is that of {_describe(before)}; is it alive? {PATIENCE:g} s"
            print(f"mjax: {line}", file=sys.stderr, flush=True)
        while time.monotonic() < until:
            time.sleep(BEAT / 5)
            now = self._read()
            if now is None:
                return
            if now != before:
                self._close()
                raise self._held_by(now)
        self.note = f"the lock of {_describe(before)} was stale: that run ended without freeing it"

    def _keep(self) -> None:
        """Raise the count until the end. A full disk or a slow one does not end the run."""
        while not self._over.wait(BEAT):
            try:
                self._beat()
            except OSError:
                continue
            if self.is_lost:
                return

    def _beat(self) -> None:
        found = self._read()
        if found is not None and found.get("token") != self._record["token"]:
            self._new_holder = found
        elif not _is_same_file(self._file, self.path):  # someone has removed it
            previous = self._file
            try:
                self._open()
            except UserError:
                self._new_holder = self._read() or {}
                return
            finally:
                os.close(previous)
            self._write()
        else:
            self._write()

    def _write(self) -> None:
        """Write the record in place; it always has the same length, so it needs no new block."""
        self._count += 1
        text = json.dumps(self._record | {"count": f"{self._count:012d}"}) + "\n"
        os.pwrite(self._file, text.encode(), 0)
        os.ftruncate(self._file, len(text.encode()))

    def _read(self) -> dict | None:
        """The record in the file, opened anew because network file systems then look again."""
        try:
            record = json.loads(self.path.read_bytes() or b"null")
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return record if isinstance(record, dict) else None

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1

    def _held_by(self, holder: dict | None) -> UserError:
        return UserError(
            f"{self.path.parent}: {_describe(holder or {})} trains in this folder; stop that run "
            "or choose another run.dir"
        )


def _describe(record: dict) -> str:
    if not record:
        return "another run"
    host, pid, since = (record.get(name, "?") for name in ("host", "pid", "since"))
    return f"process {pid} on host {host} (since {since})"


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
