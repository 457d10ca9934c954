"""The batches of a distillation: those of the config, with fields that the teacher computes."""

from mjax.post.distillation.objective import Distillation
from mjax.post.distillation.teacher import teacher_field, teacher_of
from mjax.post.roles import RoleFields
from mjax.run.batches import RunBatches, from_config
from mjax.train.trainer import Trainer


def distillation_batches(trainer: Trainer, record: dict) -> RunBatches:
    """The batches of `from_config`, after the teacher is loaded.

    Raises `UserError` for a mesh with pipeline.
    """
    if isinstance(trainer.objective, Distillation):
        trainer.role_fields = RoleFields((teacher_field(teacher_of(trainer)),))
    return from_config(trainer, record)
