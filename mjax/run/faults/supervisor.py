"""`python -m mjax.train --restarts N`: a parent that starts training again when a fault ended it.

It runs the same command as a child, forwards signals to it and ends with its last exit code.
Invariants: an error that a person has to mend, a finished run and a run that was asked to stop are
not started again. N restarts in a row without a new complete checkpoint are the last, so only a
fault that recurs ends the job. The parent never imports jax, so it takes no device and little
memory. Each of several processes has a supervisor, and they meet before each start
(`rendezvous.py`). The count follows NVIDIA's resiliency extension (restarts without progress), not
torchrun, whose `--max-restarts` counts over the whole life of a job.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from mjax.checkpoint.base.steps import newest_step
from mjax.config.schema.run import Config
from mjax.errors import INTERRUPTED, START_AGAIN, UserError, at_least
from mjax.run.faults.rendezvous import LOOK, Rendezvous, Round
from mjax.run.monitor.log_writer import warn
from mjax.sharding.processes.launcher import Processes, find_processes, launcher_variables

RESTART_NOTE = "MJAX_RESTART_NOTE"  # environment variable: set in children, kept as an event
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds before a restart; they double from one to the next
ASKS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
FORWARDED = (*ASKS_TO_STOP, signal.SIGUSR2)
SET_DEATH_SIGNAL = 1  # option of Linux's prctl


@dataclass
class Supervisor:
    """Runs `command` until it ends for good; `restarts`: of them in a row without a checkpoint.

    folder: the run's. make_arguments: what a round adds to the command.
    """

    command: list[str]
    restarts: int
    folder: Path
    peers: Rendezvous | None = None
    make_arguments: Callable[[Round], list[str]] = lambda round: []
    is_asked: bool = False  # to stop
    _child: subprocess.Popen | None = None
    _pending: list[int] = field(default_factory=list)  # signals that came without a child

    def run(self) -> int:
        """Start the command, and again while that may help; returns its last exit code."""
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does with SIGHUP
                signal.signal(number, self._forward)
        code, note = None, ""  # of the last child
        total = in_a_row = 0
        newest = self._newest_step()
        while True:
            arguments: list[str] = []
            if self.peers is not None:
                found = self.peers.meet(lambda: self.is_asked)
                if found is None:
                    other = self.peers.ended()
                    alone = INTERRUPTED if self.is_asked else START_AGAIN
                    return self._end(other[1] if other else alone if code is None else code)
                arguments = self.make_arguments(found)
            code, why = self._attempt(arguments, note)
            other = self.peers.ended() if self.peers else None
            if other and other[1]:
                warn(f"process {other[0]} has ended with exit code {other[1]}: so does this one")
                return self._end(other[1])
            if other or self.is_asked or not is_recoverable(code):
                return self._end(code)
            before, newest = newest, max(newest, self._newest_step())
            in_a_row = 1 if newest > before else in_a_row + 1
            if in_a_row > self.restarts:
                rest = f"{self.restarts} restarts in a row have brought no new checkpoint"
                warn(f"training {why}; {rest}: mend what ends it, then start again")
                return self._end(code)
            total += 1
            pause = min(FIRST_PAUSE * 2 ** (in_a_row - 1), LONGEST_PAUSE)
            count = f"{in_a_row} of {self.restarts} without a new checkpoint"
            note = f"restart {total} ({count}): training {why}"
            warn(f"{note}; starting again in {pause:g} s")
            self._pause(pause)
            if self.is_asked:
                return self._end(code)

    def _attempt(self, arguments: list[str], note: str) -> tuple[int, str]:
        """Run the child once; (its exit code, what became of it)."""
        env = os.environ | {RESTART_NOTE: note}
        self._child = subprocess.Popen(
            [*self.command, *arguments],
            env=env,
            process_group=0,  # a terminal's SIGINT reaches it once, from here
            preexec_fn=_end_with_parent,
        )
        for number in self._pending:
            self._child.send_signal(number)
        self._pending.clear()
        why = "" if self.peers is None else self._watch_peers()
        if why:
            self._child.kill()
        code = self._child.wait()
        self._child = None
        return code, f"was ended because {why}" if why else what_became(code)

    def _watch_peers(self) -> str:
        """Return when the child has ended, or why it has to."""
        waiting_since = None
        while self._child.poll() is None:
            if why := self.peers.why_broken():
                return why
            if (other := self.peers.ended()) and other[1]:
                return f"process {other[0]} has ended"
            if self.peers.index == 0 and self.peers.could_grow():
                newest = self._newest_step()
                if waiting_since is not None and newest > waiting_since:  # little is lost now
                    return "more processes have come"
                waiting_since = newest if waiting_since is None else waiting_since
            time.sleep(LOOK)
        return ""

    def _end(self, code: int) -> int:
        if self.peers is not None:
            self.peers.end(code)
        return code if code >= 0 else 128 - code  # as shells say it

    def _newest_step(self) -> int:
        """The step of the newest complete checkpoint, or -1."""
        try:
            newest = newest_step(self.folder / "checkpoints")
        except OSError:  # a step that is removed just now
            newest = None
        return -1 if newest is None else int(newest.name)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_asked:
            time.sleep(0.1)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked = self.is_asked or number in ASKS_TO_STOP
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.send_signal(number)


def add_restart_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--restarts N [--min-processes M] [--patience MINUTES]` to a command line."""
    group = parser.add_argument_group("starting again after a fault (docs/train/failures.md)")
    text = "start again after a fault; N times in a row without a new checkpoint"
    group.add_argument("--restarts", type=int, metavar="N", help=text)
    text = "go on with so many if others stay away (default: all are needed)"
    group.add_argument("--min-processes", type=at_least(1), metavar="M", help=text)
    text = "minutes to wait for processes that stay away (default: %(default)g)"
    group.add_argument("--patience", type=float, default=10.0, metavar="MINUTES", help=text)


def supervise(cfg: Config, args: argparse.Namespace) -> int:
    """Run this very command under a supervisor; returns the exit code of its last child."""
    if args.restarts < 0:
        raise UserError(f"--restarts {args.restarts} must be at least 0")
    if cfg.checkpoint.resume == "never":
        raise UserError(
            "checkpoint.resume=never starts over, so --restarts would at each restart; leave one "
            "of them out, or choose a new run.dir"
        )
    given = (args.coordinator, args.num_processes, args.process_id)
    processes = find_processes(launcher_variables(os.environ, *given))
    command = [sys.executable, *sys.orig_argv[1:]]
    supervisor = Supervisor(command, args.restarts, Path(cfg.run.dir))
    if processes is None:
        return supervisor.run()
    smallest = args.min_processes or processes.count
    if smallest > processes.count or (smallest < processes.count and processes.local_count > 1):
        raise UserError(
            f"--min-processes {smallest} of {processes.count} processes, {processes.local_count} "
            "on this node: it must be at most all of them, and one process a node"
        )
    supervisor.make_arguments = partial(arguments_of, processes)
    supervisor.peers = Rendezvous(
        folder=Path(cfg.run.dir) / "restarts",
        index=processes.index,
        count=processes.count,
        patience=60 * args.patience,
        smallest=smallest,
        fits=lambda size: cfg.train.global_batch_size % size == 0,
    )
    return supervisor.run()


def arguments_of(processes: Processes, found: Round) -> list[str]:
    """Arguments that tell a child its place in a round without all processes; else none."""
    if len(found.members) == processes.count:
        return []  # as the launcher says
    index = found.members.index(processes.index)
    here = ["--num-processes", str(len(found.members)), "--process-id", str(index)]
    return ["--coordinator", processes.coordinator, *here]


def is_recoverable(code: int) -> bool:
    """Whether a child that ended so may be started again: a fault, not an end or a mistake."""
    return code == START_AGAIN or (code < 0 and -code not in ASKS_TO_STOP)


def what_became(code: int) -> str:
    """Words for an exit code."""
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent dies."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
