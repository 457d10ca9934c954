"""The batches of a run on preferences, and the roles that add fields to them."""

from functools import partial

from mjax.interop.sources import source_of
from mjax.objectives.fields import Batch
from mjax.post.base.role_programs import BASE_LOG_PROBS, LOG_PROBS
from mjax.post.base.roles import Role, RoleFields, reference_of
from mjax.post.base.stored_scores import answer_datasets, attach_stored_scores
from mjax.post.preferences.kto_divergence import KTO_DIVERGENCE
from mjax.post.preferences.objective import Preference
from mjax.run.batches import DatasetStream, RunBatches, from_config
from mjax.train.program_kind import ProgramKind
from mjax.train.trainer import Trainer


def preference_batches(trainer: Trainer, record: dict) -> RunBatches:
    """The batches of `from_config`, with the reference that the objective asks for.

    The reference gives "ref_log_probs", from files or for each batch, and the policy "kl" after it.
    """
    objective, settings = trainer.objective, trainer.cfg.preference
    if isinstance(objective, Preference) and settings.needs_reference and settings.reference:
        trainer.checkpoints.fitted(source_of(settings.reference))  # refused before data is written
    batches = from_config(trainer, record)
    if not isinstance(objective, Preference):  # one of the user's own
        return batches
    if settings.needs_reference and settings.precompute_ref_log_probs:
        reference, kind = _reference_and_kind(trainer)
        for stream in filter(None, (batches.training, batches.held_out)):
            assert isinstance(stream, DatasetStream)
            attach_stored_scores(reference, kind, list(answer_datasets(stream.data)))
    add_roles(trainer)
    return batches


def add_roles(trainer: Trainer) -> None:
    """Let the roles of a trainer of preferences compute their fields of each batch.

    The reference is what training starts from, so a trainer without a state draws one.
    """
    fields = []
    if trainer.cfg.preference.computes_reference:
        fields.append(partial(_field, "ref_log_probs", *_reference_and_kind(trainer)))
    if trainer.objective.reads_kl:
        policy = Role("policy", trainer, frozen=False)
        trainer.live_role_fields = RoleFields((partial(_field, "kl", policy, KTO_DIVERGENCE),))
    trainer.role_fields = RoleFields(tuple(fields))


def _reference_and_kind(trainer: Trainer) -> tuple[Role, ProgramKind]:
    """The reference, and the program of its log-probabilities."""
    reference = reference_of(trainer, trainer.cfg.preference.reference)
    return reference, LOG_PROBS if reference.held is not None else BASE_LOG_PROBS


def _field(name: str, role: Role, kind: ProgramKind, placed: Batch) -> Batch:
    """A field that a program computes with the weights of a role."""
    return {name: role.compute(kind, placed)}
