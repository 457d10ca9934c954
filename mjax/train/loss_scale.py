"""Dynamic loss scaling: what keeps small gradients above the least number of fp16.

A cotangent below 6e-8 is zero in fp16. So the loss is multiplied by a scale before the backward,
and the scale is divided out of the summed gradients. A step whose gradients hold inf or NaN is
skipped. Invariant: the scale is a function of the steps before, equal on every device and mesh; the
rules and names are those of Megatron-LM's `DynamicGradScaler`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.config.schema.run import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5  # factors on the scale; Megatron-LM's

# The part "loss_scale" of a run's state, all []: "scale" fp32, and int32 "growth_tracker",
# "hysteresis_tracker" and "skipped_samples", the sequences of all skipped steps.
LossScaleState = dict[str, jax.Array]


@dataclass(frozen=True)
class LossScaler:
    """The rules of a scale.

    Each overflow uses up one of `hysteresis`. Once none is left, it halves the scale, down to
    `min_loss_scale`. `loss_scale_window` steps in a row without one double the scale, and give back
    the hysteresis.
    """

    precision: PrecisionConfig

    def first_values(self) -> dict[str, float]:
        """The state before the first step."""
        return {
            "scale": self.precision.initial_loss_scale,
            "growth_tracker": 0,
            "hysteresis_tracker": self.precision.hysteresis,
            "skipped_samples": 0,
        }

    def start(self) -> LossScaleState:
        """The state before the first step, as arrays."""
        values = self.first_values()
        scale = jnp.float32(values.pop("scale"))
        return {"scale": scale} | {name: jnp.int32(value) for name, value in values.items()}

    def can_shrink(self, state: LossScaleState) -> jax.Array:
        """Whether a further overflow may lead to a smaller scale."""
        return state["scale"] > self.precision.min_loss_scale

    def update(self, state: LossScaleState, overflowed: jax.Array) -> LossScaleState:
        """The state after a step, `overflowed` or not; skipped samples are the caller's."""
        scale, rules = state["scale"], self.precision
        left = state["hysteresis_tracker"] - 1
        smaller = jnp.maximum(scale * BACKOFF, rules.min_loss_scale)
        clean = state["growth_tracker"] + 1
        grows = clean == rules.loss_scale_window
        on_overflow = {
            "scale": jnp.where(left <= 0, smaller, scale),
            "growth_tracker": jnp.int32(0),
            "hysteresis_tracker": left,
        }
        on_clean = {
            "scale": jnp.where(grows, scale * GROWTH, scale),
            "growth_tracker": jnp.where(grows, 0, clean),
            "hysteresis_tracker": jnp.where(grows, rules.hysteresis, left + 1),
        }
        new = jax.tree.map(lambda a, b: jnp.where(overflowed, a, b), on_overflow, on_clean)
        return new | {"skipped_samples": state["skipped_samples"]}


def loss_scaler(precision: PrecisionConfig) -> LossScaler | None:
    """The scaler of a run; None unless it computes in fp16."""
    return LossScaler(precision) if precision.compute == "float16" else None


def skipped_samples(state: dict) -> int:
    """The samples that the schedule of a run leaves out; in fp16 this waits for the last step."""
    scale = state.get("loss_scale")
    return 0 if scale is None else int(scale["skipped_samples"])
