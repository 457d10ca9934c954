"""The programs of a trainer: what is static in them, and how they are mapped and jitted.

Each is a function of local shards (`train/step.py`) under one `shard_map` that is manual over all
axes of the mesh.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from mjax.config.schema import Config
from mjax.models.context import Context
from mjax.models.local import LocalModel
from mjax.models.objective import Objective
from mjax.models.params import ModelDefinition
from mjax.pipeline.layout import Layout
from mjax.plan.execution import decide_evaluation, decide_execution, tp_overlap_rows
from mjax.plan.xla_options import compiler_options, device_facts
from mjax.sharding.ordered import in_program_order
from mjax.train import step as steps
from mjax.train.batch import batch_partitions
from mjax.train.state import StateLayout, without_moments


def make_program(
    cfg: Config,
    definition: ModelDefinition,
    objective: Objective,
    state_layout: StateLayout,
    layout: Layout | None,
    rows: int,
    max_documents: int,
) -> steps.Program:
    """All that is static in a step of `rows` sequences of at most `max_documents` documents.

    `layout` is that of the pipeline. 0 documents: the number is unknown.
    """
    mesh, placement = state_layout.mesh, state_layout.placement
    sizes, facts = dict(mesh.shape), device_facts(list(mesh.devices.flat))
    uniform = layout is None or layout.uniform
    ctx = Context(
        parallel=placement.parallel,
        attention=cfg.train.attention,
        cp_type=cfg.mesh.cp_type,
        cp_a2a=cfg.mesh.cp_a2a,
        permute=uniform,
        max_documents=max_documents,
        overlap_rows=tp_overlap_rows(cfg.mesh, facts, uniform),
        dropout=True,
        label_smoothing=cfg.train.label_smoothing,
        z_loss=cfg.train.z_loss,
    )
    model = LocalModel(
        definition,
        placement,
        decide_execution(cfg, sizes, facts, rows),
        ctx,
        objective,
        packed=cfg.data.document_mask and max_documents != 1,
        loss_chunk=cfg.train.loss_chunk,
    )
    return steps.Program(
        model,
        decide_evaluation(cfg, sizes, rows),
        state_layout.optimizer,
        state_layout.buffers,
        seed=cfg.run.seed,
        clip_grad_norm=cfg.optimizer.clip_grad_norm,
        layout=layout,
    )


def jit_program(
    kind: str, program: steps.Program, state_layout: StateLayout, xla_options: dict
) -> jax.stages.Wrapped:
    """The function `kind` (train, grads or eval) of `train/step.py`, on the whole mesh.

    It takes and returns global arrays. "train" takes over the memory of the state it is given.
    `xla_options` come on top of those that `plan/xla_options.py` picks.
    """
    mesh = state_layout.mesh
    devices = list(mesh.devices.flat)
    state = state_layout.partitions()
    batch = batch_partitions(program.model.objective, program.parallel)
    inputs = without_moments(state), batch
    gradients = steps.Gradients(P(), P(), P(), program.placement.of_gradients)
    function, inputs, outputs = {
        "train": (steps.train_step, (state, batch, P(), P()), (state, P())),
        "grads": (steps.gradients, inputs, gradients),
        "eval": (steps.batch_losses, inputs, P()),
    }[kind]
    body = functools.partial(function, program)
    if devices[0].platform == "cpu" and len(devices) > 1:
        body = in_program_order(body)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    tp_overlaps = program.model.ctx.overlap_rows is not None
    options = compiler_options(program.execution, tp_overlaps, devices) | xla_options
    donate = 0 if kind == "train" else None
    return jax.jit(mapped, donate_argnums=donate, compiler_options=options or None)
