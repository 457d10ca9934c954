"""The settings that each policy loss was published with: what its keys are where they are None."""

from typing import Any

from mjax.config.schema.reinforce import PolicyLoss, ReinforceConfig

SEQUENCE_RATIOS = "gspo", "rloo"  # losses whose ratio is one of a whole answer

_OF_MOST_LOSSES = {
    "advantage_scale": "group",
    "loss_divisor": "tokens",
    "clip_low": 0.2,
    "clip_high": 0.2,
}
_OF_LOSSES: dict[PolicyLoss, dict[str, Any]] = {
    "grpo": {"loss_divisor": "sequences"},
    "dr_grpo": {"advantage_scale": "none", "loss_divisor": "constant"},
    "dapo": {"clip_high": 0.28},
    "gspo": {"loss_divisor": "sequences", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_high": 4.0},
    "sapo": {"loss_divisor": "sequences"},
    "rloo": {"advantage_scale": "none", "loss_divisor": "sequences"},
    "reinforce_pp": {"advantage_scale": "batch"},
    "ppo": {"advantage_scale": "batch"},
}


def with_published(settings: ReinforceConfig) -> ReinforceConfig:
    """The settings with a value for each key that may be None for that of the loss."""
    wanted = _OF_MOST_LOSSES | _OF_LOSSES[settings.loss_type]
    missing = {name: value for name, value in wanted.items() if getattr(settings, name) is None}
    return settings.model_copy(update=missing)
