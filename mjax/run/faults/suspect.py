"""Steps whose result is suspect: repeated to see whose fault it is, then skipped or undone.

A step with a loss that is not finite or that is a spike is not accepted: the device leaves the
state as it was, and holds back the steps that were queued behind (`step.py: Gate`). So the very
state that a suspect step began with is there to repeat it on, though its buffers are donated.
Invariants: every process sees the same numbers and decides alike; the batch of a step stays a pure
function of its number, whatever is skipped. After Megatron-LM's rerun state machine; skipping ahead
from an earlier state follows PaLM (arXiv:2204.02311, section 5.1).
"""

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from mjax.checkpoint.store import SaveFailed
from mjax.config.schema.run import TrainConfig
from mjax.errors import NonFiniteLoss, ReplicasDiffer, UserError
from mjax.objectives.fields import HostBatch
from mjax.optim.schedule import batch_range
from mjax.run.faults.replicas import ReplicaCheck
from mjax.run.faults.saving import Saver
from mjax.run.faults.watchdog import Watchdog
from mjax.run.monitor.metrics import Log
from mjax.train.trainer import Trainer

RECENT = 64  # accepted losses that a spike is measured against
FEWEST_LOSSES = 16  # of them, before any loss is called a spike
WINDOW = 100  # steps in which suspect ones are counted
SAME = 1e-3  # relative; a repeated step may sum in another order
NAMED_SAMPLES = 16  # of a suspect step
ALIVE = 2.0  # times its loss before a step: the most that its batch may have behind it

Figures = dict[str, float]


@dataclass
class Judge:
    """Tells whose fault a suspect step is, from its figures and those of the steps before."""

    cfg: TrainConfig
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _steps: deque[int] = field(default_factory=deque)

    def accepted(self, loss: float) -> None:
        """Remember the loss of a step that was accepted."""
        self._losses.append(loss)

    def most_loss(self) -> float:
        """The largest loss that is no spike."""
        if self.cfg.spike_factor is None or len(self._losses) < FEWEST_LOSSES:
            return math.inf
        median = statistics.median(self._losses)
        return median * self.cfg.spike_factor if median > 0 else math.inf

    def verdict(self, step: int, first: Figures, again: Figures) -> str:
        """ "transient" if the second result is good, else the policy that applies.

        Raises `NonFiniteLoss` where the run must end.
        """
        if again["finite"] and again["loss"] <= self.most_loss():
            return "transient"
        if not is_same(first, again):
            raise NonFiniteLoss(
                f"step {step} gave loss {first['loss']}, norm {first['grad_norm']}, and repeated "
                f"on the same state loss {again['loss']}, norm {again['grad_norm']}: a device "
                "computes wrongly; start again without it"
            )
        self._steps.append(step)
        while self._steps[0] <= step - WINDOW:
            self._steps.popleft()
        if self.cfg.on_suspect == "stop" or len(self._steps) > self.cfg.max_suspects:
            count = f", number {len(self._steps)} in {WINDOW} steps" if len(self._steps) > 1 else ""
            raise NonFiniteLoss(
                f"step {step}: loss {first['loss']}, norm {first['grad_norm']}, twice the "
                f"same{count}: its data or the model, or a device that always errs"
            )
        return self.cfg.on_suspect


@dataclass
class Suspects:
    """Repeats the suspect steps of a run and does with them what its judge says.

    describe: returns words for the samples of batches (`BatchStream.describe`).
    """

    trainer: Trainer
    judge: Judge
    saver: Saver
    replicas: ReplicaCheck
    log: Log
    watchdog: Watchdog
    describe: Callable[[int, int, int], str]
    _accepted: tuple[int, HostBatch, float] | None = None  # the last step, its batch and loss

    def settle(
        self, step: int, batch: HostBatch, metrics: dict[str, jax.Array]
    ) -> tuple[Figures, bool]:
        """(the figures of the step, whether it was not accepted at once); waits for the device.

        A suspect step is repeated and judged; the state is then the one after it. A step that
        overflowed fp16 is left out with no more than a line. Raises `NonFiniteLoss` where the run
        must end, and `UserError` for a step in which nothing counts; the state is saved then.
        """
        first = read_figures(metrics)
        if first["accepted"]:
            self._accepted = step, batch, first["loss"]
            return first, False
        if first["tokens"] == 0:
            self._save(step)
            raise UserError(
                f"data: step {step} has nothing to learn from: nothing counts of its "
                f"{self._samples(step, 3)}; mend the data, or leave them out"
            )
        if first.get("skipped"):
            self.trainer.set_step(step)
            self.log.event(step, skip_line(step, first["loss_scale"]))
            return first, True
        verdict = self._verdict(step, first, self._repeat(step, batch))
        said = f"step {step}: loss {first['loss']:g}, norm {first['grad_norm']:g}"
        if verdict == "transient":
            self.log.event(step, f"{said}; good when repeated: a device erred, or memory did")
            return read_figures(self.trainer.step(batch, self.judge.most_loss())), True
        said += ", twice the same; its batch is left out"
        if verdict == "roll_back":
            said += self._roll_back()
        self.trainer.set_step(step)
        self.log.event(step, said)
        return first, True

    def _repeat(self, step: int, batch: HostBatch) -> Figures:
        """The figures of a step that was not accepted, computed once more; the state stays."""
        self.trainer.set_step(step - 1)
        figures = read_figures(self.trainer.step(batch, math.inf, False))
        self.trainer.set_step(step - 1)
        self.watchdog.beat()
        return figures

    def _verdict(self, step: int, first: Figures, again: Figures) -> str:
        """Returns the judge's verdict; if that ends the run, the error says how to go on."""
        try:
            return self.judge.verdict(step, first, again)
        except NonFiniteLoss as e:
            if is_same(first, again):  # or a device errs, and may have before
                self._save(step)
            raise NonFiniteLoss(
                f"{e}; {self._samples(step, NAMED_SAMPLES)}; last good checkpoint: "
                f"{self.saver.last_checkpoint()}; start again to resume there, with a "
                "lower schedule.lr or train.on_suspect=skip if it recurs"
            ) from None

    def _samples(self, step: int, most: int) -> str:
        """Words for the samples of a step, and what they are made of."""
        first, count = batch_range(self.trainer.cfg.train, step - 1)
        names = self.describe(step - 1, 1, most)
        return f"samples {first} to {first + count - 1} of the data order: {names}"

    def _save(self, step: int) -> None:
        """Save the state that a step began with, if it has been trained and is not the fault.

        It is not, if the step before still has about the loss that it had, and gradients.
        """
        if self._accepted is None:
            return
        before, batch, loss = self._accepted
        again = self._repeat(before, batch)
        self.trainer.set_step(step - 1)
        has_gradients = again["finite"] or "loss_scale" in again  # fp16's may overflow
        if has_gradients and again["loss"] <= ALIVE * max(loss, 1.0):
            with contextlib.suppress(NonFiniteLoss, ReplicasDiffer, SaveFailed):
                self.replicas.require_equal(step - 1)
                self.saver.save_last(None)

    def _roll_back(self) -> str:
        """Restore the newest checkpoint, if there is one; returns the words that say so."""
        self.saver.last_checkpoint()  # no save is under way now
        checkpoints = self.trainer.checkpoints
        if checkpoints.latest_step() is None:
            return ""
        self.trainer.state = None  # its memory is needed
        step = self.trainer.restore()
        return f", and the weights are those of {checkpoints.source.directory / str(step)}"


def skip_line(step: int, scale: float) -> str:
    """The line on a step whose gradients overflowed fp16 under this loss scale."""
    return f"step {step}: gradients overflowed at loss scale {scale:g}; its batch is left out"


def read_figures(metrics: dict[str, jax.Array]) -> Figures:
    """The metrics of a step on the host; waits for the device."""
    return {name: value.item() for name, value in jax.device_get(metrics).items()}


def is_same(first: Figures, again: Figures) -> bool:
    """Whether two results of one step agree; numbers that are not finite agree as such."""
    return all(_agree(first[name], again[name]) for name in ("loss", "grad_norm"))


def _agree(a: float, b: float) -> bool:
    if math.isfinite(a) and math.isfinite(b):
        return math.isclose(a, b, rel_tol=SAME)
    return math.isfinite(a) == math.isfinite(b)
