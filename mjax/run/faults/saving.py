"""When a run saves, and what becomes of it when a save fails.

Invariants: a failed save never ends a step; it is noted where it is seen, told to all processes
with the next step's agreement, and counted by all of them alike. Every failure is one line that
says what would be lost. `checkpoint.max_failed_saves` in a row end the run.
"""

import math
import threading
import time
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mjax.checkpoint.base.orbax_messages import plain_reason
from mjax.checkpoint.store import SaveFailed
from mjax.run.faults.run_lock import RunLock
from mjax.run.faults.stopping import GO_ON, SAVE_FAILED, TAKEN_OVER
from mjax.run.faults.watchdog import Watchdog
from mjax.run.monitor.log_writer import warn
from mjax.run.monitor.metrics import Log
from mjax.sharding.processes.agreement import largest_of_all, wait_for_every_process
from mjax.train.step import State
from mjax.train.trainer import Trainer

LAST_TRIES = 3  # at saving the last step of a run
PAUSE = 10.0  # seconds between them


def reserve_host_memory(state: State) -> threading.Thread | None:
    """Take the pinned memory that saves copy an abstract state to, in a thread; None on CPUs.

    The driver needs half a second for a GB of it, and JAX keeps what it has: so the first step
    compiles meanwhile, and the first save does not wait. It is on no device.
    """
    if jax.default_backend() == "cpu":
        return None

    def reserve() -> None:
        taken = []
        for leaf in jax.tree.leaves(state):
            where = leaf.sharding.devices_indices_map(leaf.shape)
            copies = len(where) // len(set(map(str, where.values())))  # each saves its part
            shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
            empty = np.zeros(-(-shard // copies), leaf.dtype)
            for device in leaf.sharding.addressable_devices:
                pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
                taken.append(jax.device_put(empty, pinned))
        jax.block_until_ready(taken)

    thread = threading.Thread(target=reserve, daemon=True)
    thread.start()
    return thread


@dataclass
class Saver:
    """The saves of a run. `interval`: steps between them, or None."""

    trainer: Trainer
    lock: RunLock
    log: Log
    watchdog: Watchdog
    interval: int | None
    max_failed: int | None
    _error: SaveFailed | None = None  # seen by this process
    _is_told: bool = True  # whether the others know
    _failed: int = 0  # in a row, as all processes count
    _last_failed: int = -1  # step
    _before: dict[int, int] = field(default_factory=dict)  # step saved -> step saved before it
    _latest: int = -2  # step of the last save that was begun
    _local_error: str = ""  # of the local tier's last save

    def save(self, held_out_loss: float | None = None) -> None:
        """Start to save the current step, once the save before has ended.

        `held_out_loss` is that of this step. Raises `NonFiniteLoss` for weights that are not
        finite: storage has not failed, and saving again would not help.
        """
        self._wait()
        if self._failed:
            self._clear_remains()
        step = self.trainer.step_number
        self.watchdog.doing(f"saving step {step}")
        if step != self._latest:
            self._before[step], self._latest = self._latest, step
        try:
            self.trainer.save(held_out_loss)
        except SaveFailed as e:
            if jax.process_count() > 1 and not e.is_agreed:
                raise  # the others wait for this process in the midst of their save
            self._note(e)

    def save_local(self) -> None:
        """Start to save the current step in the local tier; a failure is a line and no more.

        Raises `NonFiniteLoss` as `save` does.
        """
        local = self.trainer.checkpoints.local
        self.watchdog.doing("waiting for the save in the local tier to end")
        error = local.wait()
        self.trainer.save_local()
        if error and error != self._local_error:
            where = local.directory
            line = f"saving in {where} failed: {error}; training goes on with the saves in run.dir"
            warn(line) if jax.process_index() else self.log.event(self.trainer.step_number, line)
        self._local_error = error

    def news(self) -> int:
        """Returns the code that the other processes need: GO_ON, SAVE_FAILED (once), TAKEN_OVER."""
        if self.lock.is_lost:
            return TAKEN_OVER
        try:
            self.trainer.store.poll()
        except SaveFailed as e:
            self._note(e)
        if self._is_told:
            return GO_ON
        self._is_told = True
        return SAVE_FAILED

    def react(self, news: int) -> int:
        """The reason to stop that is left of what all processes agreed on.

        Raises `UserError` if the folder was taken over or too many saves have failed.
        """
        if news == TAKEN_OVER:
            raise self.lock.loss()
        if news != SAVE_FAILED:
            return news
        if self._count():
            if self.max_failed is not None and self._failed >= self.max_failed:
                raise self._end(f"{self._failed} failed in a row (checkpoint.max_failed_saves)")
            again = "at its end" if self.interval is None else f"in {self.interval} steps"
            self._say(f"training goes on and saves again {again}; until then a stop loses")
        self._error = None
        return GO_ON

    def save_last(self, held_out_loss: float | None) -> None:
        """Save the current step and wait for it, in a few tries; raises `UserError`.

        Raises `NonFiniteLoss` as `save` does.
        """
        self._wait()
        for attempt in range(1, LAST_TRIES + 1):
            self._error = None
            self.save(held_out_loss)
            self._wait()
            self.watchdog.beat()
            self._is_told = True
            if self._largest_of_all(int(self._error is not None)) == 0:
                return
            self._count()
            if attempt < LAST_TRIES:
                self._say(f"trying again in {PAUSE:g} s, free space; a stop now loses")
                time.sleep(PAUSE)
        raise self._end(f"{LAST_TRIES} tries failed")

    def last_checkpoint(self) -> str:
        """The path of the newest complete checkpoint, once no save is under way, or 'none'."""
        self._wait()
        return str(self.trainer.store.newest() or "none")

    def _wait(self) -> None:
        self.watchdog.doing("waiting for the save before to end")
        try:
            self.trainer.store.wait()
        except SaveFailed as e:
            self._note(e)

    def _note(self, error: SaveFailed) -> None:
        self._error, self._is_told = error, False

    def _count(self) -> bool:
        """Count a failure, all processes alike; False if it was of a save counted before."""
        step = self._largest_of_all(-1 if self._error is None else self._error.step)
        if step <= self._last_failed:
            return False
        is_in_a_row = self._before.get(step) == self._last_failed
        self._failed = self._failed + 1 if is_in_a_row else 1
        self._last_failed = step
        return True

    def _say(self, rest: str) -> None:
        line = f"{self._failure()}; {rest} the steps after {self._newest()}"
        if jax.process_index() == 0:
            self.log.event(self.trainer.step_number, line)
        elif self._error is not None:
            warn(f"process {jax.process_index()}: {line}")

    def _failure(self) -> str:
        why = "on another process" if self._error is None else plain_reason(self._error.cause)
        return f"saving step {self._last_failed} failed: {why}"

    def _newest(self) -> str:
        newest = self.trainer.store.newest()
        return "step 0" if newest is None else f"step {newest.name}"

    def _end(self, why: str) -> SaveFailed:
        self._wait()
        self._clear_remains()
        cause = self._error.cause if self._error else RuntimeError("another process failed")
        return SaveFailed(
            self._last_failed,
            cause,
            f"{self._failure()}; {why}, so the run ends and the steps after {self._newest()} are "
            "lost; free space or mend the folder, then start again",
        )

    def _clear_remains(self) -> None:
        """Remove what failed saves left, or a full disk stays full."""
        wait_for_every_process("mjax_failed_saves")
        if jax.process_index() == 0:
            self.trainer.store.remove_remains()
        wait_for_every_process("mjax_failed_saves_removed")
        self.trainer.store.forget_steps()

    def _largest_of_all(self, value: int) -> int:
        return int(largest_of_all(value, self.trainer.mesh.devices.flat))
