"""The rates of a step, which the host dispatches before it knows what became of the last one.

A step that overflowed fp16 does not advance the schedule (`loss_scale.py`). The host computes the
schedule in float64, once for either outcome of the last step, and the device picks. Invariant: the
rates are those that a host would give that waited for the last step.
"""

from collections import deque
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.run import Config
from mjax.optim.schedule import rates_of_step

Pair = tuple[jax.Array | np.float32, jax.Array | np.float32]  # learning rate, weight decay


@dataclass
class StepRates:
    """The rates of the steps that a trainer dispatches.

    skipped_samples: of the skipped steps that are not in `under_way`.
    under_way: of the last steps, whether each was skipped, bool [] on the devices, and its number
        of samples. It is empty outside of fp16, else it holds an entry at least.
    """

    cfg: Config
    skipped_samples: int = 0
    under_way: deque[tuple[jax.Array, int]] = field(default_factory=deque)

    def of_step(self, step: int) -> Pair:
        """The rates of `step`, fp32 [], which comes next; in fp16 it waits for the last but one."""
        while len(self.under_way) > 1:
            was_skipped, samples = self.under_way.popleft()
            self.skipped_samples += samples * bool(was_skipped)
        usual = self._rates(step, 0)
        if not self.under_way:
            return usual
        was_skipped, samples = self.under_way[0]
        return _pick(was_skipped, self._rates(step, samples), usual)

    def dispatched(self, metrics: dict[str, jax.Array], samples: int) -> None:
        """Take note of a step of so many samples, by its metrics, which are not awaited."""
        if "skipped" in metrics:
            self.under_way.append((metrics["skipped"], samples))

    def _rates(self, step: int, skipped: int) -> Pair:
        rates = rates_of_step(self.cfg, step, self.skipped_samples + skipped)
        return np.float32(rates.learning_rate), np.float32(rates.weight_decay)


@jax.jit
def _pick(was_skipped: jax.Array, after_skip: Pair, usual: Pair) -> Pair:
    return jax.tree.map(lambda a, b: jnp.where(was_skipped, a, b), after_skip, usual)
