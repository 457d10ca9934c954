"""Schedules against Megatron's formulas written out longhand; batch ramp-up against a loop."""

import math

import pytest

from mjax.config.schema.run import OptimizerConfig, ScheduleConfig, TrainConfig
from mjax.optim.schedule import (
    batch_range,
    batch_size,
    consumed_samples,
    learning_rate,
    weight_decay,
)

GBS, STEPS, WARMUP, LR, MIN, INIT = 4, 100, 10, 1e-3, 1e-4, 1e-5
TRAIN = TrainConfig(steps=STEPS, global_batch_size=GBS)


def lr_at(step: float, decay: str, **kw) -> float:
    kw = {"lr": LR, "min_lr": MIN, "warmup_steps": WARMUP, "warmup_init_lr": INIT, **kw}
    return learning_rate(ScheduleConfig(decay=decay, **kw), TRAIN, int(step * GBS))


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_warmup_is_linear_and_inclusive(decay):
    for step, expected in [(0, INIT), (5, (INIT + LR) / 2), (10, LR)]:
        assert lr_at(step, decay, wsd_decay_steps=20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "decay, step, expected",
    [
        ("constant", 1000, LR),
        ("linear", 55, 0.00055),  # halfway from 1e-3 to 1e-4
        ("linear", 100, MIN),
        ("linear", 101, MIN),
        ("cosine", 40, MIN + 0.75 * (LR - MIN)),  # r = 1/3: (1 + cos 60 deg) / 2
        ("cosine", 55, 0.00055),
        ("cosine", 5000, MIN),
        ("inverse_sqrt", 40, LR / 2),  # sqrt(10 / 40)
        ("inverse_sqrt", 100, LR / math.sqrt(10)),
        ("inverse_sqrt", 101, MIN),
    ],
)
def test_decay(decay, step, expected):
    assert lr_at(step, decay) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "style, quarter, half",
    [
        ("linear", 0.75, 0.5),
        ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5),
        ("exponential", 2 * 0.5**0.25 - 1, math.sqrt(2) - 1),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_holds_then_falls(style, quarter, half):
    def at(step):
        return lr_at(step, "wsd", wsd_decay_steps=20, wsd_style=style)

    assert at(11) == at(80) == LR
    for step, share in [(85, quarter), (90, half), (100, 0.0), (200, 0.0)]:
        assert at(step) == pytest.approx(MIN + share * (LR - MIN), rel=1e-12)


def test_inverse_sqrt_without_warmup_starts_at_lr_and_is_floored():
    assert lr_at(0, "inverse_sqrt", warmup_steps=0) == LR
    assert lr_at(90, "inverse_sqrt", warmup_steps=0) == MIN  # 1/sqrt(360) of lr is below the floor


def test_decay_steps_default_to_the_run():
    assert lr_at(50, "linear", decay_steps=50) == MIN
    assert lr_at(50, "linear", decay_steps=None) > MIN


@pytest.mark.parametrize("style, share", [("linear", 0.25), ("cosine", 0.5 - math.sqrt(0.125))])
def test_weight_decay_rises_over_the_run(style, share):
    cfg = OptimizerConfig(weight_decay=0.1, weight_decay_end=0.5, weight_decay_style=style)
    at = [weight_decay(cfg, TRAIN, step * GBS) for step in (0, 25, 100, 101)]
    assert at == pytest.approx([0.1, 0.1 + share * 0.4, 0.5, 0.5], rel=1e-12)
    assert weight_decay(OptimizerConfig(weight_decay=0.1), TRAIN, 77) == 0.1


@pytest.mark.parametrize("ramp", [[2, 2, 100], [8, 8, 1], [16, 24, 999], [32, 96, 10_000]])
def test_batch_range_equals_stepping_through_the_ramp(ramp):
    train = TrainConfig(global_batch_size=128, rampup_batch_size=ramp)
    start, increment, length = ramp
    consumed = 0
    for step in range(400):
        per_rise = length / ((128 - start) // increment)
        size = 128 if consumed > length else start + increment * int(consumed / per_rise)
        assert batch_range(train, step) == (consumed, size), step
        assert batch_size(train, consumed) == size
        consumed += size
    assert size == 128


def test_batch_range_is_pure_and_fast_far_out():
    train = TrainConfig(global_batch_size=128, rampup_batch_size=[8, 8, 10_000])
    far = batch_range(train, 10**6)
    assert batch_range(train, 10**6 - 1)[0] + 128 == far[0] == consumed_samples(train, 10**6)
    assert batch_range(train, 0) == (0, 8) and batch_range(train, 10**6) == far
    assert batch_range(TRAIN, 7) == (28, 4)
