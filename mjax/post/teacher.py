"""The teacher of a distillation: a role with a trainer of its own, on the mesh of the student.

Its programs leave activations where the student's batch has its tokens, so they are fields of it.
"""

import jax
from jax.sharding import PartitionSpec as P

from mjax.config.schema.distill import DistillConfig
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.run import CheckpointConfig, Config
from mjax.interop.sources import source_of
from mjax.models.base.streams import decoder_of
from mjax.objectives.fields import Batch
from mjax.post.roles import Role, RoleField, RoleFields, in_compute_dtype, require_no_pipeline
from mjax.post.teacher_divergence import BIAS, HEAD, HIDDEN, Distillation, teacher_config
from mjax.run.batches import RunBatches, from_config
from mjax.sharding.collectives import DATA_AXES
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State, split_batch
from mjax.train.trainer import Trainer


def distillation_batches(trainer: Trainer, record: dict) -> RunBatches:
    """The batches of `from_config`, with fields that the teacher computes.

    Raises `UserError` for a mesh with pipeline.
    """
    if isinstance(trainer.objective, Distillation):
        trainer.role_fields = RoleFields((teacher_field(teacher_of(trainer)),))
    return from_config(trainer, record)


def teacher_of(trainer: Trainer) -> Role:
    """The role of `distill.teacher`, whose weights are loaded in precision.compute."""
    require_no_pipeline(trainer, "distillation")
    cfg = trainer.cfg
    own = Trainer(teacher_run(cfg), trainer.mesh)
    params, _ = own.checkpoints.load_weights(source_of(cfg.distill.teacher))
    return Role("teacher", own, in_compute_dtype(own, params))


def teacher_run(cfg: Config) -> Config:
    """The config whose programs are the teacher's."""
    changes = {
        "model": teacher_config(cfg),
        "train": cfg.train.model_copy(update={"objective": "next_token", "freeze": []}),
        "precision": cfg.precision.model_copy(update={"fp8": "none"}),
        "distill": DistillConfig(),
        "lora": LoraConfig(),
        "checkpoint": CheckpointConfig(),
    }
    return cfg.model_copy(update=changes)


def teacher_field(teacher: Role) -> RoleField:
    """The fields that the teacher adds to a batch of the student; its head is computed once."""
    fields = teacher.trainer.placer.names
    whole = {}

    def compute(placed: Batch) -> Batch:
        batch = {name: placed[name] for name in fields}
        if not whole:
            whole.update(teacher.compute(HEADS, batch))
        return {HIDDEN: teacher.compute(HIDDEN_STATES, batch)} | whole

    return compute


def placed_hidden_states(program: Program, state: State, batch: Batch) -> jax.Array:
    """The activations that the head multiplies, [b, S/cp, D], of a batch, without dropout."""
    model = program.model.for_evaluation(program.evaluation)
    batch = model.with_derived_fields(batch)
    weights = model.load(state["params"], state.get("buffers", {}))
    edges = model.edges(weights)

    def hidden(micro_batch: Batch) -> jax.Array:
        tokens = model.tokens(micro_batch, None)
        x = model.embed(weights, micro_batch, tokens)
        x, _, _ = model.layers.run(weights, x, model.layer_inputs(weights, tokens))
        return program.parallel.gather_seq(edges.head_input(edges.normed(decoder_of(x))))

    found = jax.lax.map(hidden, split_batch(batch, program.evaluation.micro_batches))
    return found.reshape(-1, *found.shape[2:])


def heads(program: Program, state: State, batch: Batch) -> dict[str, jax.Array]:
    """The table of the head [V/tp, D], and its bias [V/tp] if it has one."""
    model = program.model.for_evaluation(program.evaluation)
    edges = model.edges(model.load(state["params"], state.get("buffers", {})))
    found = {HEAD: edges.head_table(), BIAS: edges.head_bias()}
    return {name: array for name, array in found.items() if array is not None}


HIDDEN_STATES = ProgramKind(
    placed_hidden_states,
    inputs=lambda on: (on.weights, on.batch),
    outputs=lambda on: P(DATA_AXES, "cp"),
)
HEADS = ProgramKind(
    heads,
    inputs=lambda on: (on.weights, on.batch),
    outputs=lambda on: P("tp"),
)
