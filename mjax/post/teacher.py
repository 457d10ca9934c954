"""The teacher of a distillation: a role with a trainer of its own.

Its programs leave activations where the student's batch has its tokens, so they are fields of it.
It lies on the mesh of the student, or on devices of its own (`distill.teacher_mesh`). From those
the activations are copied, and its head once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mjax.config.rules.data_rules import data_sources
from mjax.config.rules.distill_rules import mesh_of_teacher
from mjax.config.rules.reinforce_rules import draws_answers
from mjax.config.schema.checkpoint import CheckpointConfig
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.preference import DistillConfig
from mjax.config.schema.reinforce import ReinforceConfig
from mjax.config.schema.run import Config, OptimizerConfig, PrecisionConfig
from mjax.errors import UserError
from mjax.interop.sources import source_of
from mjax.kernels.loss.log_probs import TopLogProbs
from mjax.models.base.streams import decoder_of
from mjax.models.decoder import Decoder
from mjax.objectives.fields import Batch, HostBatch
from mjax.optim.schedule import final_step
from mjax.post.base.device_copies import columns_of_copy, copied_field
from mjax.post.base.role_programs import kind_of_tokens
from mjax.post.base.roles import (
    Role,
    in_compute_dtype,
    on_host,
    require_no_pipeline,
    rows_of_process,
)
from mjax.post.distillation.stored_teacher import (
    IDS,
    LOG_PROBS,
    TeacherStore,
    with_stored_teacher,
    write_record,
)
from mjax.post.distillation.teacher_divergence import (
    BIAS,
    HEAD,
    HIDDEN,
    OF_LAYERS,
    Distillation,
    StoredDistillation,
    teacher_config,
)
from mjax.post.reinforce_batches import RolloutSetup
from mjax.post.rollouts.student_answers import StudentStream, conversation_prompts
from mjax.run.batches import RunBatches, from_config
from mjax.run.out_of_memory import owned_by
from mjax.sharding.mesh import global_array
from mjax.sharding.processes.agreement import on_process_0, said_by_all
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State, split_batch
from mjax.train.trainer import Trainer

WAYS_OF_TEACHER = (
    "to mend it, give distill.teacher_mesh more devices or tp; lower train.micro_batch_size"
)


def distillation_batches(trainer: Trainer, record: dict) -> RunBatches:
    """The batches of `from_config` or of the student's answers, which the teacher rates.

    Raises `UserError` for a mesh with pipeline.
    """
    own = None  # what refuses a teacher comes before data is written in the run's folder
    if isinstance(trainer.objective, Distillation):
        own = teacher_trainer(trainer)
    if draws_answers(trainer.cfg):
        return _with_answers(trainer, own, record)
    batches = from_config(trainer, record)
    if own is not None:
        trainer.role_fields = teacher_fields(trainer, own)
    elif isinstance(trainer.objective, StoredDistillation):
        store = TeacherStore(Path(trainer.cfg.distill.stored))
        return with_stored_teacher(batches, store)
    return batches


def _with_answers(trainer: Trainer, own: Trainer | None, record: dict) -> RunBatches:
    """The batches of a run of which the student draws a share, or all."""
    cfg, setup = trainer.cfg, RolloutSetup(trainer)
    data = from_config(trainer, record) if data_sources(cfg) else None
    collector = setup.collector()
    if cfg.data.conversations.path is not None:
        prompts = conversation_prompts(cfg, setup.tokenizer)
        collector.open_environments = lambda: prompts
    stream = StudentStream(
        trainer=trainer,
        collector=collector,
        tokenizer=setup.tokenizer,
        score=lambda batch: {},
        data=data.training if data and cfg.distill.student_share < 1 else None,
        has_rewards=cfg.data.conversations.path is None,
    )
    stream.go_on(record.get("batches", {}))
    trainer.role_fields = teacher_fields(trainer, own)
    live = {"is_live": True, "figures_at": stream.figures_at, "line_at": stream.line_at}
    if data is None:
        measure = setup.held_out_reward if cfg.train.eval_interval else None
        return RunBatches(stream, record_at=stream.record_at, measure=measure, **live)

    def record_at(step: int) -> dict:
        return data.record_at(step) | stream.record_at(step)

    return replace(data, training=stream, record_at=record_at, **live)


def teacher_fields(
    trainer: Trainer, own: Trainer | None = None
) -> Callable[[Batch, HostBatch], Batch]:
    """The fields that the teacher of a run computes for each batch; its head is computed once.

    `own`: of `teacher_trainer`, if it is there.
    """
    teacher = teacher_of(trainer, own)
    kind = kind_of_tokens(placed_hidden_states, outputs=trainer.objective.pairs.teacher)
    own, shardings = teacher.trainer, trainer.placer.shardings()
    head: Batch = {}  # from the first batch on

    def on_same_mesh(placed: Batch, given: HostBatch) -> Batch:
        own.programs.share_bound(trainer.programs)
        batch = {name: placed[name] for name in own.placer.names}
        head.update(head or teacher.compute(HEADS, batch))
        return teacher.compute(kind, batch) | head

    def from_own_devices(placed: Batch, given: HostBatch) -> Batch:
        with owned_by(" of the teacher", WAYS_OF_TEACHER):
            batch = own.place(given)
            tables = {} if head else teacher.compute(HEADS, batch)
            fields = teacher.compute(kind, batch)
        for name, table in on_host(tables).items():
            head[name] = global_array(table, shardings[name], len(table), 0)
        columns = columns_of_copy(batch["columns"].size, own.parallel.cp, trainer.parallel.cp)
        copies = {}
        for name, field in fields.items():
            copies[name] = copied_field(field, columns, shardings[name], own.mesh)
        return copies | head

    return from_own_devices if trainer.role_devices else on_same_mesh


def write_teacher(cfg: Config, folder: Path, most: int) -> int:
    """Write the teacher's `most` likeliest tokens for all samples that a run reads; their number.

    Shards that are there already stay. Raises `UserError` for a folder of another teacher.
    """
    trainer = Trainer(cfg)
    trainer.init()
    if not 1 <= most < cfg.model.vocab_size:
        raise UserError(f"--top {most}: give 1 to {cfg.model.vocab_size - 1}")
    settings = cfg.distill
    record = {"top": most, "temperature": settings.temperature, "teacher": settings.teacher}
    teacher, batches = teacher_of(trainer), from_config(trainer, {})
    store = write_record(folder, record | {"vocab_size": cfg.model.vocab_size})
    kind = kind_of_tokens(placed_top_log_probs, most=most, temperature=settings.temperature)
    written = 0
    steps = {"train": final_step(cfg), "held_out": cfg.train.eval_steps}
    for part, stream in (("train", batches.training), ("held_out", batches.held_out)):
        if stream is None:
            continue
        for number in range(steps[part]):
            first, count = stream.range_of(number)
            written += count
            is_there = store.shard(part, first).exists()
            if not said_by_all(b"1" if is_there else b"")[0]:
                (batch,) = stream.batches(number, 1, None)
                found = _top_of(teacher, kind, batch)
                on_process_0(partial(store.write, part, first, batch["tokens"], found))
    return written


def _top_of(teacher: Role, kind: ProgramKind, batch: HostBatch) -> HostBatch:
    """The stored fields of a batch, columns in its order."""
    placed = teacher.trainer.place(rows_of_process(teacher.trainer, batch))
    found, columns = on_host((teacher.compute(kind, placed), placed["columns"]))
    order = np.argsort(columns)
    return {IDS: found.ids[:, order], LOG_PROBS: found.log_p[:, order]}


def teacher_trainer(trainer: Trainer) -> Trainer:
    """The trainer of `distill.teacher`, without weights. Raises `UserError` for a mesh of it."""
    cfg = trainer.cfg
    if not cfg.distill.teacher_mesh:
        require_no_pipeline(trainer, "a teacher without distill.teacher_mesh")
        return Trainer(teacher_run(cfg), trainer.mesh)
    if not trainer.role_devices:
        raise UserError("distill.teacher_mesh needs a trainer of devices; give it no mesh")
    key = f"distill.teacher_mesh={cfg.distill.teacher_mesh}"
    try:
        own = Trainer(teacher_run(cfg), devices=trainer.role_devices)
    except UserError as e:
        raise UserError(f"{key}: {e}") from None
    require_same_rows(trainer, own, key)
    return own


def require_same_rows(student: Trainer, teacher: Trainer, key: str) -> None:
    """Raise `UserError` unless each process copies fields from its own devices to its own.

    So all must have all rows of both, or each its equal share of them.
    """
    size, count, me = student.cfg.train.global_batch_size, jax.process_count(), jax.process_index()
    shares = {"all": slice(0, size), "own": slice(me * size // count, (me + 1) * size // count)}
    rows = student.local_rows(size), teacher.local_rows(size)
    found = [name for name, share in shares.items() if rows == (share, share)]
    said = set(said_by_all(" ".join(found).encode()))  # so all raise alike
    if len(said) > 1 or not found:
        raise UserError(
            f"{key}: student and teacher need the same rows of a batch in each process; let dp or "
            "ep of both, or of neither, be the number of processes or a multiple"
        )


def teacher_of(trainer: Trainer, own: Trainer | None = None) -> Role:
    """The role of `distill.teacher`, whose weights are loaded in precision.compute."""
    own = own or teacher_trainer(trainer)
    owner = " of the teacher" if trainer.role_devices else ""
    with owned_by(owner, WAYS_OF_TEACHER):
        params, _ = own.checkpoints.load_weights(source_of(trainer.cfg.distill.teacher))
        return Role("teacher", own, in_compute_dtype(own, params))


def teacher_run(cfg: Config) -> Config:
    """The config whose programs are the teacher's."""
    changes: dict[str, object] = {
        "model": teacher_config(cfg),
        "mesh": mesh_of_teacher(cfg),
        "train": cfg.train.model_copy(update={"objective": "next_token", "freeze": []}),
        "precision": PrecisionConfig(compute=cfg.precision.compute),
        "optimizer": OptimizerConfig(),
        "distill": DistillConfig(),
        "reinforce": ReinforceConfig(),
        "lora": LoraConfig(),
        "checkpoint": CheckpointConfig(init_changes=["vocab_size"]),  # may be cut
    }
    if not data_sources(cfg):  # it reads what the student draws
        changes["data"] = cfg.data.model_copy(update={"mock": True})
    return cfg.model_copy(update=changes)


def from_each_token(
    program: Program,
    state: State,
    batch: Batch,
    read: Callable[[Decoder, jax.Array, jax.Array | None], Any],
    outputs: tuple[int, ...] = (),
) -> Any:
    """Arrays [b, S/cp, ...] of a batch, from `read(edges, x, kept)` of each micro-batch.

    x [b', S/tp, D] are activations after the final norm, kept [N, b', S/tp, D] the `outputs` of
    layers of these numbers. Without dropout.
    """
    model = program.model.for_evaluation(program.evaluation)
    batch = model.with_derived_fields(batch)
    weights = model.load(state["params"], state.get("buffers", {}))
    edges = model.edges(weights)

    def of_micro_batch(micro_batch: Batch) -> Any:
        tokens = model.tokens(micro_batch, None)
        x = model.embed(weights, micro_batch, tokens)
        x, _, kept = model.run_layers(weights, x, tokens, outputs)
        return read(edges, edges.normed(decoder_of(x)), kept)

    found = jax.lax.map(of_micro_batch, split_batch(batch, program.evaluation.micro_batches))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)


def placed_hidden_states(
    program: Program, state: State, batch: Batch, outputs: tuple[int, ...]
) -> Batch:
    """The activations that the head multiplies, [b, S/cp, D], and outputs of layers if any."""

    def read(edges: Decoder, x: jax.Array, kept: jax.Array | None) -> Batch:
        found = {HIDDEN: edges.head_input(x)}
        if kept is not None:
            found[OF_LAYERS] = jnp.moveaxis(kept, 0, 2)
        return jax.tree.map(program.parallel.gather_seq, found)

    return from_each_token(program, state, batch, read, outputs)


def placed_top_log_probs(
    program: Program, state: State, batch: Batch, most: int, temperature: float
) -> TopLogProbs:
    """The `most` likeliest next tokens of each token, [b, S/cp, most]."""
    ctx = program.model.ctx.in_training(temperature=temperature)

    def read(edges: Decoder, x: jax.Array, _: jax.Array | None) -> TopLogProbs:
        return edges.top_log_probs(x, most, ctx)

    return from_each_token(program, state, batch, read)


def heads(program: Program, state: State, batch: Batch) -> dict[str, jax.Array]:
    """The table of the head [V/tp, D], and its bias [V/tp] if it has one."""
    model = program.model.for_evaluation(program.evaluation)
    edges = model.edges(model.load(state["params"], state.get("buffers", {})))
    found = {HEAD: edges.head_table(), BIAS: edges.head_bias()}
    return {name: array for name, array in found.items() if array is not None}


HEADS = ProgramKind(
    heads,
    outputs=lambda on: P("tp"),
)
