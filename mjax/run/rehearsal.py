"""Faults put into a run on purpose (`run.rehearse`), to see what becomes of it.

The page docs/train/failures.md says what each leads to. Invariant: nan strikes whenever its step is
trained, as bad data does; every other fault strikes a run folder once, also across restarts.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.config.languages.rehearsal import Fault, parse_fault
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.objectives.fields import Batch, HostBatch
from mjax.run.faults.replicas import replicated_leaves
from mjax.run.faults.stopping import say_at_once
from mjax.train.trainer import Trainer

STRUCK = "rehearsed"  # folder within the run's: the faults that have struck each process


class RehearsedTrainer(Trainer):
    """A trainer whose steps are struck by the faults of `run.rehearse`."""

    def step(
        self, batch: HostBatch | Batch, *limits: object, **named_limits: object
    ) -> dict[str, jax.Array]:
        """`Trainer.step`, struck by the faults of its number."""
        number = self.step_number + 1
        named = self.cfg.run.rehearse
        due = [text for text in named if parse_fault(text).step == number]
        for text in due:
            batch = self._struck_before(text, parse_fault(text), batch)
        metrics = super().step(batch, *limits, **named_limits)
        for text in due:
            fault = parse_fault(text)
            if fault.kind == "bit_flip" and self._strikes_now(text):
                first = jax.local_devices(process_index=fault.process)[0]
                self.state = with_flipped_bit(self.state, self._replica(), {first.id})
        return metrics

    def _struck_before(self, text: str, fault: Fault, batch: HostBatch | Batch) -> dict:
        """The batch as a fault leaves it; hang and die do not return in their process."""
        if fault.kind == "nan" or (fault.kind == "nan_once" and self._strikes_now(text)):
            return with_nan(batch)
        is_here = jax.process_index() == fault.process
        if fault.kind not in ("hang", "die") or not is_here or not self._strikes_now(text):
            return batch
        if fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1.0)

    def _strikes_now(self, text: str) -> bool:
        """Whether a fault has not struck this run before; from now on it has."""
        file = Path(self.cfg.run.dir) / STRUCK / str(jax.process_index())
        before = file.read_text().split() if file.exists() else []
        if text in before:
            return False
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join([*before, text]))
        say_at_once(f"rehearsing: run.rehearse strikes with {text}")
        return True

    def _replica(self) -> tuple[str, ...]:
        """The path of an array that several devices hold."""
        leaves = replicated_leaves(self.state_layout)
        if not leaves:
            raise UserError(
                "run.rehearse: bit_flip needs an array that several devices hold; set mesh.zero=0 "
                "and mesh.dp=2 or more"
            )
        return tuple(key.key for key in leaves[0].path)


def with_nan(batch: HostBatch | Batch) -> dict:
    """The batch with a field that is no number anywhere."""
    for name, field in batch.items():
        if np.issubdtype(field.dtype, np.floating):
            return {**batch, name: field * np.float32(np.nan)}
    raise UserError(
        f"run.rehearse: nan needs a field of floating point, and a batch has {', '.join(batch)}"
    )


def with_flipped_bit(state: dict, path: tuple[str, ...], devices: set[int], bit: int = 0) -> dict:
    """The state with a bit flipped in the first entry of the array at `path`.

    It is flipped where `devices` (ids) hold it.
    """
    first, *rest = path
    if rest:
        return {**state, first: with_flipped_bit(state[first], tuple(rest), devices, bit)}
    array, buffers = state[first], []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id in devices:
            data.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        buffers.append(jax.device_put(data, shard.device))
    made = jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)
    return {**state, first: made}


def trainer_of(
    cfg: Config, mesh: Mesh | None, devices: Sequence[jax.Device] | None = None
) -> Trainer:
    """The trainer of a run. Raises `UserError` for faults of processes that do not exist."""
    faults = [parse_fault(text) for text in cfg.run.rehearse]
    if not faults:
        return Trainer(cfg, mesh, devices)
    most, count = max(fault.process for fault in faults), jax.process_count()
    if most >= count:
        raise UserError(
            f"run.rehearse={cfg.run.rehearse}: process {most} is not one of {count}, from 0 on"
        )
    return RehearsedTrainer(cfg, mesh, devices)
