"""The keys of distillation."""

from pydantic import Field

from mjax.config.languages.paths import PathText
from mjax.config.schema.base import Group


class DistillConfig(Group):
    """The loss of a student that learns from a teacher (docs/train/distillation.md)."""

    teacher: PathText | None = None
    """A folder of the teacher's weights, a run or org/name of the hub; its vocabulary is the
    student's.
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
    label_weight: float = Field(0.0, ge=0, lt=1)
    """Share of the cross-entropy of labels in the loss; the divergence has the rest."""
