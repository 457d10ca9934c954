"""Records of norms, activations, experts and gradient noise, layer by layer, every k steps.

`train/norms.py` computes the norms. The noise is the simple noise scale of McCandlish et al. 2018
(arXiv:1812.06162, appendix A): the batch size at which the noise of the gradient is as large as the
gradient. It follows from the gradients of two halves of the batch. Invariant: a run with these
records ends with the same bits as one without.
"""

import time
from dataclasses import dataclass, field

import jax
import numpy as np

from mjax.config.languages.layer_pattern import stack_of
from mjax.objectives.fields import HostBatch
from mjax.objectives.next_token import NextToken
from mjax.run.monitor.metrics import Log, Record
from mjax.train.layer_statistics import LAYER_STATISTICS, layer_record
from mjax.train.norms import Norms
from mjax.train.trainer import Trainer


@dataclass
class Diagnostics:
    """Writes a record every `interval` steps; None: never."""

    trainer: Trainer
    log: Log
    interval: int | None
    # Asked for, by step: the norms of its batch, then those of the halves.
    _asked: dict[int, list[Norms]] = field(default_factory=dict)
    _seen: dict[int, dict] = field(default_factory=dict)

    def ask_if_due(self, step: int, batch: HostBatch) -> None:
        """Let the devices compute the norms of the step that comes next; they are not awaited."""
        if self.interval is None or step % self.interval:
            return
        batches = batch, *(halves(batch) if has_noise_scale(self.trainer, batch) else ())
        self._asked[step] = [self.trainer.norms(one) for one in batches]
        self._seen[step] = self.trainer.run_program(LAYER_STATISTICS, batch)

    def write(self, step: int) -> None:
        """Log what was asked for at this step, if anything was."""
        if step in self._asked:
            found = jax.device_get(self._asked.pop(step))
            record = {"step": step} | norm_record(self.trainer, found[0])
            if len(found) > 1:
                record |= noise_record(*found)
            seen = jax.device_get(self._seen.pop(step))
            record |= layer_record(self.trainer.cfg.model, seen)
            self.log.keep_figures(record | {"time": time.time()})


def has_noise_scale(trainer: Trainer, batch: HostBatch) -> bool:
    """Whether the noise scale is defined: the loss is a mean over tokens, and rows make pairs.

    Terms besides it (experts' balance) are not such means. Every process needs an even number of
    rows; all have as many.
    """
    by_token = trainer.cfg.train.loss_divisor == "tokens"
    is_mean = isinstance(trainer.objective, NextToken) and not trainer.definition.statistics
    is_mean = is_mean and by_token
    return is_mean and len(batch["positions"]) % 2 == 0


def halves(batch: HostBatch) -> tuple[HostBatch, HostBatch]:
    """Two batches of the same size: every other row of `batch`, twice each."""
    rows = np.arange(len(batch["positions"]))
    even = rows - rows % 2
    return _rows_of(batch, even), _rows_of(batch, even + 1)


def _rows_of(batch: HostBatch, rows: np.ndarray) -> HostBatch:
    return {name: np.asarray(values)[rows] for name, values in batch.items()}


def norm_record(trainer: Trainer, norms: Norms) -> Record:
    """{"grad_norm/layers.3.attention.q": ..}: a number for each layer and parameter.

    Likewise `param_norm/` and `update_norm/`.
    """
    numbers: dict[str, list[int]] = {}  # of the layers of each stack
    for number, kind in enumerate(trainer.cfg.model.layer_kinds):
        numbers.setdefault(stack_of(kind), []).append(number)
    parts = {
        "param_norm": norms.params,
        "grad_norm": norms.gradients,
        "update_norm": norms.updates,
    }
    record: Record = {}
    for part, tree in parts.items():
        for path, values in jax.tree_util.tree_flatten_with_path(tree)[0]:
            stack, *names = (key.key for key in path)
            name = ".".join(names)
            if values.ndim == 0:
                whole_name = f"{stack}.{name}" if name else stack
                record[f"{part}/{whole_name}"] = float(values)
                continue
            rows = trainer.storage.form(path).rows or range(len(values))
            for row, value in zip(rows, values, strict=True):
                if row >= 0:  # no padding
                    record[f"{part}/layers.{numbers[stack][row]}.{name}"] = float(value)
    return record


def noise_record(whole: Norms, even: Norms, odd: Norms) -> Record:
    """The gradient's noise: variance a token, squared norm without noise, their ratio in tokens.

    With g the gradient of a mean over c tokens, E|g|^2 = |G|^2 + variance / c. The half batches of
    c1 and c2 tokens differ by |g1 - g2|^2, whose mean is variance * (1/c1 + 1/c2). Single records
    are noisy: average variance and signal over many, then divide. Empty where a half has no token.
    """
    first, second = float(even.tokens), float(odd.tokens)
    if min(first, second) == 0:
        return {}
    tokens = first + second
    squared_first = float(even.total) ** 2
    squared_second = float(odd.total) ** 2
    squared = float(whole.total) ** 2
    # whole = (first * even + second * odd) / tokens, which tells the product of the two.
    alone = (first**2 * squared_first + second**2 * squared_second) / tokens**2
    product = (squared - alone) * tokens**2 / (2 * first * second)
    difference = squared_first + squared_second - 2 * product
    variance = difference / (1 / first + 1 / second)
    signal = squared - variance / tokens
    return {
        "grad_noise/variance": variance,
        "grad_noise/signal": signal,
        "grad_noise/scale_tokens": variance / signal if signal > 0 else None,
    }
