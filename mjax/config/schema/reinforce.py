"""The keys of reinforcement learning (docs/train/reinforcement.md)."""

from typing import Any, Literal

from pydantic import Field

from mjax.config.languages.paths import PathText
from mjax.config.schema.base import Group

PolicyLoss = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "ppo"
]


class ReinforceConfig(Group):
    """Rollouts, their rewards, and the loss of a policy."""

    # ---- rollouts ----
    environment: str = "arithmetic"
    """Source of prompts and rewards: a built-in name (docs/train/environments.md), or
    module.path:Name of a class.
    """
    environment_args: dict[str, Any] = {}
    """Arguments of the environment."""
    eval_environment_args: dict[str, Any] | None = None
    """Arguments for held-out prompts, counted by train.eval_interval and eval_steps; None: the
    same with another seed.
    """
    workers: int = Field(0, ge=0)
    """Processes that compute rewards; 0: the run's own process, without a limit on time."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds that a call of the environment may take; then the reward is 0."""
    prompts_per_step: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1)
    """Answers to a prompt; the advantages of a group are compared among them."""
    max_new_tokens: int = Field(256, ge=1)
    """Tokens of an answer; of one with several turns together."""
    sampling: dict[str, float] = {}
    """temperature, top_k, top_p, min_p; default: temperature 1 and no limit."""
    engine: dict[str, Any] = {}
    """Options of the engine: rows, chunk, pages, weight_dtype, cache_dtype, batch_invariant; and
    devices of its own, dp, tp, pp, ep (docs/train/reinforcement.md).
    """
    max_staleness: int = Field(0, ge=0)
    """Updates of the weights between the drawing of an answer and its use. 0: synchronous."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer steps that the rollouts of a step are split into."""
    drops_equal_groups: bool = False
    """Draw further prompts in place of groups whose rewards are equal (DAPO's dynamic sampling)."""

    # ---- loss ----
    loss_type: PolicyLoss = "grpo"
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Standard deviation that divides rewards less their mean; None: that of the loss
    (docs/train/policy-losses.md).
    """
    clip_low: float | None = Field(None, ge=0)
    """Ratios are clipped below at 1 - clip_low; None: 0.2, in gspo 0.0003."""
    clip_high: float | None = Field(None, ge=0)
    """Ratios are clipped above at 1 + clip_high; None: 0.2, in dapo 0.28, in gspo 0.0004, in cispo
    4.
    """
    loss_divisor: Literal["tokens", "sequences", "constant"] | None = None
    """The divisor of a sum over the global batch. sequences: each answer counts as the mean of its
    tokens; constant: answers times max_new_tokens. None: that of the loss.
    """
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in_reward: bool = False
    """Take the divergence off the rewards, not into the loss."""
    reference: PathText | None = None
    """A folder of the reference's weights; None: those that training starts from."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of sampled tokens, which the loss rewards."""
    correction: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    """Weights for tokens that sampler and trainer rate differently, p_trainer / p_sampler: truncate
    bounds them by correction_high (TIS), mask takes 0 outside of both bounds (IcePop). sequence_:
    the same with the product over an answer.
    """
    correction_low: float = Field(0.5, ge=0)
    correction_high: float = Field(2.0, gt=0)
    router_replay: bool = False
    """Send each token to the experts that the sampler chose for it (R3, arXiv 2510.11370)."""
    overlong_tokens: int = Field(0, ge=0)
    """Rewards fall by up to 1 over so many last tokens before max_new_tokens (DAPO)."""

    # ---- critic of ppo ----
    critic: PathText | None = None
    """A folder of weights that the critic starts from, as mjax reward leaves them; None: those that
    the policy starts from, with a head of zeros.
    """
    gamma: float = Field(1.0, ge=0, le=1)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    critic_lr: float = Field(1e-5, gt=0)
    value_clip: float = Field(0.2, gt=0)

    @property
    def temperature(self) -> float:
        """The temperature of the distribution that answers are drawn from."""
        return self.sampling.get("temperature", 1.0)

    @property
    def reads_old(self) -> bool:
        """Whether the loss reads log-probabilities from before the first update on a rollout."""
        return self.updates_per_rollout > 1 or self.correction != "none"
