"""Learning rate, weight decay and batch size as pure functions, on the host in float64.

Megatron-LM's clock is the number of samples consumed before a step (`optimizer_param_scheduler.py`,
`num_microbatches_calculator.py`): lengths given in steps count `global_batch_size` samples each,
also while the batch size still ramps up, and the first step runs at n = 0. Invariant: everything is
a function of the config and the step alone, so a resumed run sees the same numbers.
"""

import math
from bisect import bisect_left, bisect_right
from functools import lru_cache, partial
from typing import NamedTuple

from mjax.config.schema.run import Config, OptimizerConfig, ScheduleConfig, TrainConfig


class Rates(NamedTuple):
    """Factors of a step's update and of its decay."""

    learning_rate: float
    weight_decay: float


def rates_of_step(cfg: Config, step: int, skipped_samples: int = 0) -> Rates:
    """The rates of `step`, counted from 0; `skipped_samples` do not advance the schedule."""
    samples = consumed_samples(cfg.train, step) - skipped_samples
    return Rates(
        learning_rate(cfg.schedule, cfg.train, samples),
        weight_decay(cfg.optimizer, cfg.train, samples),
    )


def learning_rate(schedule: ScheduleConfig, train: TrainConfig, samples: int) -> float:
    """Learning rate of the step before which `samples` sequences were consumed."""
    s = schedule
    warmup = s.warmup_steps * train.global_batch_size
    end = (s.decay_steps or train.steps) * train.global_batch_size
    if warmup and samples <= warmup:
        return s.warmup_init_lr + (s.lr - s.warmup_init_lr) * samples / warmup
    if s.decay == "constant":
        return s.lr
    if samples > end:
        return s.min_lr
    if s.decay == "inverse_sqrt":
        return max(s.min_lr, s.lr * math.sqrt(max(warmup, 1) / max(samples, 1)))
    if s.decay == "wsd":
        length = s.wsd_decay_steps * train.global_batch_size
        share = _fall(s.wsd_style, max(0, samples - (end - length)) / length)
    else:
        share = _fall(s.decay, (samples - warmup) / (end - warmup))
    return s.min_lr + share * (s.lr - s.min_lr)


def _fall(style: str, x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1."""
    if style == "linear":
        return 1 - x
    if style == "cosine":
        return 0.5 * (1 + math.cos(math.pi * x))
    if style == "exponential":
        return 2 * 0.5**x - 1
    assert style == "minus_sqrt", style
    return 1 - math.sqrt(x)


def weight_decay(optimizer: OptimizerConfig, train: TrainConfig, samples: int) -> float:
    """Weight decay of the step: constant, or rising to `weight_decay_end` over the whole run."""
    start, end = optimizer.weight_decay, optimizer.weight_decay_end
    total = train.steps * train.global_batch_size
    if end is None:
        return start
    if samples > total:
        return end
    return end - _fall(optimizer.weight_decay_style, samples / total) * (end - start)


def batch_size(train: TrainConfig, samples: int) -> int:
    """Sequences in the step before which `samples` were consumed."""
    if train.rampup_batch_size is None:
        return train.global_batch_size
    start, increment, length = train.rampup_batch_size
    if samples > length:
        return train.global_batch_size
    rises = (train.global_batch_size - start) // increment
    # Megatron's own float expression: the exact quotient can differ at a boundary.
    return start + increment * int(samples / (length / rises))


def batch_range(train: TrainConfig, step: int) -> tuple[int, int]:
    """(first sample, count) of the global batch of `step`, counted from 0."""
    levels = _levels(train.global_batch_size, tuple(train.rampup_batch_size or ()))
    first_step, first_sample, size = levels[bisect_right(levels, step, key=lambda x: x[0]) - 1]
    return first_sample + (step - first_step) * size, size


def consumed_samples(train: TrainConfig, step: int) -> int:
    """Sequences consumed by the `step` steps before this one."""
    return batch_range(train, step)[0]


def final_step(cfg: Config) -> int:
    """train.steps, or the first step at which train.max_tokens tokens have been consumed."""
    if cfg.train.max_tokens is None:
        return cfg.train.steps
    samples = -(-cfg.train.max_tokens // cfg.data.seq_length)
    consumed = partial(consumed_samples, cfg.train)
    return bisect_left(range(cfg.train.steps), samples, key=consumed)


def held_out_samples(cfg: Config) -> int:
    """The number of sequences that one evaluation reads."""
    if cfg.train.eval_interval is None:
        return 0
    return cfg.train.eval_steps * cfg.train.global_batch_size


@lru_cache(maxsize=16)
def _levels(size: int, rampup: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first step, first sample, batch size) wherever the batch size changes."""
    if not rampup:
        return [(0, 0, size)]
    train = TrainConfig(global_batch_size=size, rampup_batch_size=list(rampup))
    levels = []
    step = sample = 0
    while True:
        now = batch_size(train, sample)
        levels.append((step, sample, now))
        if now == size:
            return levels
        # Steps until the size rises: the first k with batch_size(sample + k * now) > now.
        steps = range((rampup[2] - sample) // now + 2)
        stay = bisect_right(steps, now, key=lambda k: batch_size(train, sample + k * now))  # noqa: B023
        step, sample = step + stay, sample + stay * now
