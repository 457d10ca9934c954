"""The loss scale against tables that were written out by hand, and the keys that set it."""

import jax.numpy as jnp
import pytest

from mjax.config import load
from mjax.config.schema.run import PrecisionConfig
from mjax.config.validate import validate
from mjax.errors import UserError
from mjax.train.loss_scale import LossScaler, loss_scaler

OVER, CLEAN = True, False

# Window 3, hysteresis 2, minimum 1. After each step: (overflow, scale, growth tracker, hysteresis).
TABLE = [
    (CLEAN, 16, 1, 2),
    (OVER, 16, 0, 1),
    (CLEAN, 16, 1, 1),  # clean steps give no hysteresis back
    (OVER, 8, 0, 0),
    (OVER, 4, 0, -1),  # none left: every overflow counts
    (CLEAN, 4, 1, -1),
    (CLEAN, 4, 2, -1),
    (CLEAN, 8, 0, 2),  # a whole window does
    (OVER, 8, 0, 1),
    (CLEAN, 8, 1, 1),
    (CLEAN, 8, 2, 1),
    (CLEAN, 16, 0, 2),
    (CLEAN, 16, 1, 2),
    (CLEAN, 16, 2, 2),
    (CLEAN, 32, 0, 2),
    (OVER, 32, 0, 1),
    (OVER, 16, 0, 0),
    (OVER, 8, 0, -1),
    (OVER, 4, 0, -2),
    (OVER, 2, 0, -3),
    (OVER, 1, 0, -4),
    (OVER, 1, 0, -5),  # the minimum
    (CLEAN, 1, 1, -5),
    (CLEAN, 1, 2, -5),
    (CLEAN, 2, 0, 2),
]


def scaler_of(initial: float, minimum: float, window: int, hysteresis: int) -> LossScaler:
    precision = PrecisionConfig(
        compute="float16",
        initial_loss_scale=initial,
        min_loss_scale=minimum,
        loss_scale_window=window,
        hysteresis=hysteresis,
    )
    return LossScaler(precision)


def test_the_scale_follows_the_table():
    scaler = scaler_of(16.0, 1.0, 3, 2)
    state = scaler.start()
    for row, (overflowed, *want) in enumerate(TABLE):
        state = scaler.update(state, jnp.bool_(overflowed))
        names = "scale", "growth_tracker", "hysteresis_tracker"
        assert [state[name].item() for name in names] == want, row
    assert state["skipped_samples"] == 0


def test_hysteresis_of_one_halves_at_once_down_to_a_minimum_between_powers():
    scaler, scales = scaler_of(20.0, 6.0, 2, 1), []
    state = scaler.start()
    for overflowed in (OVER, OVER, OVER, CLEAN, CLEAN):
        state = scaler.update(state, jnp.bool_(overflowed))
        scales.append(state["scale"].item())
    assert scales == [10, 6, 6, 6, 12]


def test_the_defaults_are_those_of_megatron():
    cfg = load(None, ["precision.compute=float16", "data.mock=true"])
    want = scaler_of(2.0**32, 1.0, 1000, 2)
    assert loss_scaler(cfg.precision).first_values() == want.first_values()
    rules = "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    assert all(getattr(cfg.precision, n) == getattr(want.precision, n) for n in rules)
    assert loss_scaler(load(None, ["data.mock=true"]).precision) is None


@pytest.mark.parametrize(
    "keys, message",
    [
        (["precision.compute=float16", "precision.fp8=delayed"], "set precision.compute=bfloat16"),
        (
            ["precision.compute=float16", "precision.params=bfloat16"]
            + ["optimizer.stochastic_rounding=true"],
            "precision.compute='float16' needs fp32 masters",
        ),
        (["precision.hysteresis=1"], "precision.hysteresis=1 has no effect with precision.compute"),
        (["precision.initial_loss_scale=8"], "initial_loss_scale=8.0 has no effect"),
        (
            ["precision.compute=float16", "precision.min_loss_scale=8"]
            + ["precision.initial_loss_scale=4"],
            "is below precision.min_loss_scale=8.0",
        ),
        (["precision.compute=float16", "precision.initial_loss_scale=1e39"], "beyond fp32"),
        (["precision.compute=float16", "precision.initial_loss_scale=0"], "greater than 0"),
        (["precision.compute=float16", "precision.hysteresis=0"], "greater than or equal to 1"),
        (["precision.compute=float16", "precision.loss_scale_window=0"], "greater than or equal"),
        (["precision.compute=fp16"], "precision.compute"),
        (["precision.compute=float16", "precision.params=float16"], "precision.params"),
        (["precision.compute=float16", "precision.initial_loss_scale=.inf"], "initial_loss_scale"),
        (["precision.compute=float16", "precision.initial_loss_scale=.nan"], "initial_loss_scale"),
    ],
)
def test_bad_keys_are_refused_in_a_line(keys, message):
    with pytest.raises(UserError) as e:
        validate(load(None, [*keys, "data.mock=true"]))
    assert message in str(e.value)
