"""A profile of some steps of a run: those of `log.profile_steps`, or the next ones on SIGUSR2.

Process 0 follows the config; a signal is followed by the process that receives it. The trace is
written by `jax.profiler` into RUN/profile/step_N, with a profile of the memory. Invariant: no
profile is worth the run: one that fails is said in a line.
"""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import jax

from mjax.run.monitor.log_writer import reason, warn

ON_SIGNAL = 3  # steps


class Profiler:
    """A context that traces steps; `begin` is called before each is dispatched, `end` after.

    No step follows `final`. `say(step, text)` logs what has been written.
    """

    def __init__(
        self,
        folder: Path,
        steps: Sequence[int] | None,
        final: int,
        say: Callable[[int, str], None],
    ) -> None:
        self._folder, self._final, self._say = folder, final, say
        self._steps = steps if jax.process_index() == 0 else None
        self._is_signaled = False
        self._target: Path | None = None  # of the trace under way
        self._first = self._last = self._ended = 0
        self._previous: object = None

    def __enter__(self) -> "Profiler":
        self._previous = signal.signal(signal.SIGUSR2, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR2, self._previous)
        if self._target is not None:
            self._stop(self._ended)

    def begin(self, step: int) -> None:
        """Start a trace with this step if one is due."""
        if self._target is not None:
            return
        if self._steps is not None and step >= self._steps[0]:
            last, self._steps = self._steps[1], None
        elif self._is_signaled:
            last, self._is_signaled = step + ON_SIGNAL - 1, False
        else:
            return
        if step <= last:
            self._start(step, last)

    def is_last(self, step: int) -> bool:
        """Whether `end` will write a trace, which takes a while."""
        return self._target is not None and step >= self._last

    def end(self, step: int) -> None:
        """Write the trace if this step, which the device has completed, is its last."""
        self._ended = step
        if self.is_last(step):
            self._stop(step)

    def _start(self, step: int, last: int) -> None:
        name = f"step_{step}"
        if jax.process_index() > 0:
            name += f".process_{jax.process_index()}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows the host down and fills the trace
        try:
            target = self._folder / "profile" / name
            target.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(target), profiler_options=options)
        except Exception as e:
            self._fail(e)
        else:
            self._target, self._first, self._last = target, step, min(last, self._final)

    def _stop(self, step: int) -> None:
        target, self._target = self._target, None
        try:
            jax.profiler.stop_trace()
        except Exception as e:
            self._fail(e)
            return
        save_memory_profile(target)
        text = f"profile of steps {self._first} to {step}: {target}"
        if jax.process_index() > 0:
            warn(text)
        self._say(step, text)

    def _fail(self, error: Exception) -> None:
        warn(f"no profile ({reason(error)}); training goes on")

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signaled = True


def save_memory_profile(folder: Path) -> Path | None:
    """Save what holds the memory of this process's devices now, for pprof; None where it fails."""
    file = folder / f"memory.{jax.process_index()}.prof"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.save_device_memory_profile(str(file))
    except Exception as e:
        warn(f"no profile of the memory ({reason(e)}); training goes on")
        return None
    return file
