"""The keys of training on preferences, of reward models and of distillation."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from mjax.config.languages.paths import PathText
from mjax.config.schema.base import Group
from mjax.config.schema.sizes import StepKey, UpTo20

PairLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]
FreeLoss = Literal["cpo", "simpo", "orpo"]  # of pairs, without a reference
UnpairedLoss = Literal["kto", "apo_zero_unpaired"]
PreferenceLoss = Literal[PairLoss, FreeLoss, UnpairedLoss, "sft"]


class PreferenceConfig(Group):
    """Losses of preferences, and their reference (docs/train/preferences.md)."""

    loss_type: PreferenceLoss | list[PreferenceLoss] = "sigmoid"
    """One loss, or several that are added: pairs with a reference (sigmoid is DPO), pairs without
    one (cpo, simpo, orpo), single answers (kto, apo_zero_unpaired); sft: chosen answers' tokens.
    """
    loss_weights: list[float] | None = None
    """One weight for each loss; None: 1."""
    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference; ipo: its tau, orpo: the weight of the odds ratio."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Chance that a pair is labelled the wrong way; sigmoid, robust, exo_pair, cpo, simpo."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    """Divergence from the reference (arXiv 2309.16240)."""
    f_alpha_divergence_coef: float = Field(0.5, gt=0)
    """Alpha of alpha_divergence."""
    discopop_tau: float = Field(0.05, gt=0)
    simpo_gamma: float = Field(0.5, ge=0)
    """Margin that simpo asks for."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of good answers in kto; undesirable_weight: of bad ones."""
    undesirable_weight: float = Field(1.0, ge=0)
    loss_divisor: Literal["pairs", "sequences", "tokens"] = "pairs"
    """The divisor of a sum, counted in the global batch: pairs, answers, or their tokens. A single
    answer is a pair of its own.
    """
    reference_free: bool = False
    """The reference gives each answer the log-probability 0."""
    reference: PathText | None = None
    """A folder of the reference's weights; None: those that training starts from."""
    precompute_ref_log_probs: bool = False
    """Compute the reference once, before the first step, and keep it in files."""

    @property
    def losses(self) -> dict[str, float]:
        """The weight of each loss by its name."""
        names = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        return dict(zip(names, self.loss_weights or [1.0] * len(names), strict=True))

    @property
    def is_unpaired(self) -> bool:
        """Whether records are single answers."""
        return not set(self.losses).isdisjoint(get_args(UnpairedLoss))

    @property
    def needs_reference(self) -> bool:
        referenced = {*get_args(PairLoss), *get_args(UnpairedLoss)}
        return not self.reference_free and not referenced.isdisjoint(self.losses)

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the reference of its batch."""
        return self.needs_reference and not self.precompute_ref_log_probs


HiddenLoss = Literal["cosine", "mse"]


class RewardConfig(Group):
    """The loss of a reward model (docs/train/preferences.md)."""

    loss_type: Literal["bradley_terry", "steps"] = "bradley_terry"
    """Pairs of answers, or steps of answers that are right or wrong."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean of (chosen + rejected)^2, which keeps rewards around 0."""


class DistillConfig(Group):
    """The loss of a student that learns from a teacher (docs/train/distillation.md)."""

    teacher: PathText | None = None
    """A folder of the teacher's weights, a run or org/name of the hub; its vocabulary is the
    student's.
    """
    teacher_mesh: dict[Literal["devices", "cp", "ep", "tp"], Annotated[UpTo20, Field(ge=1)]] = {}
    """The teacher's own devices, the last of the run, and the sizes of their mesh: {devices: 4,
    tp: 2}, say; dp is the rest. {}: it lies on the mesh of the student.
    """
    stored: PathText | None = None
    """A folder of the teacher's likeliest tokens, which `mjax distill --write FOLDER` makes; the
    teacher then need not be there.
    """
    beta: float = Field(0.0, ge=0, le=1)
    """0: KL(teacher || student), 1: KL(student || teacher); between them the generalized
    Jensen-Shannon divergence (arXiv 2306.13649).
    """
    temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions; the divergence is multiplied by its square."""
    hidden_layers: dict[StepKey, StepKey] = {}
    """Layers whose outputs the student learns from the teacher's, {its layer: the teacher's}."""
    hidden_losses: dict[HiddenLoss, Annotated[float, Field(gt=0)]] = {"cosine": 1.0}
    """The weight of each loss of `hidden_layers`: cosine (1 - cosine), mse (mean square error)."""
    student_share: float = Field(0.0, ge=0, le=1)
    """Share of steps on answers that the student draws, to prompts of data.conversations or of
    reinforce.environment; the others are on data. 1: on-policy distillation.
    """
    label_weight: float = Field(0.0, ge=0, lt=1)
    """Share of the cross-entropy of labels in the loss; the divergence has the rest."""
