"""The programs of a trainer: what is static in them, and how they are mapped and jitted.

Each is a `ProgramKind`, a function of local shards, under one `shard_map` that is manual over all
axes of the mesh.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.models.base.context import Documents
from mjax.models.base.params import ModelDefinition
from mjax.objectives.local_model import LocalModel
from mjax.objectives.objective import Objective, WholeBatch
from mjax.pipeline.layout import Layout
from mjax.plan.execution import (
    decide_evaluation,
    decide_execution,
    tp_overlap_rows,
    training_context,
)
from mjax.plan.kernel_lines import reads_pairs
from mjax.plan.xla_options import compiler_options, device_facts
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import on_shards
from mjax.train import step as steps
from mjax.train.batch import batch_partitions, bound_of_documents
from mjax.train.program_kind import ProgramKind, ProgramPartitions
from mjax.train.state import StateLayout


class ProgramKey(NamedTuple):
    """A kind of program, and the rows and documents of the batches it is compiled for."""

    kind: ProgramKind
    rows: int
    documents: Documents


@dataclass
class Programs:
    """The programs of a run, each compiled when it is first needed.

    layout: that of the pipeline. xla_options: options of the compiler on top of those that
    `plan/xla_options.py` picks. documents: the promises so far, bounds in powers of two.
    """

    cfg: Config
    definition: ModelDefinition
    objective: Objective
    state_layout: StateLayout
    layout: Layout | None
    xla_options: dict = field(default_factory=dict)
    documents: Documents = field(init=False)
    _jitted: dict[ProgramKey, jax.stages.Wrapped] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.documents = Documents(0 if self.cfg.data.document_mask else 1)

    def bound_documents(self, promised: Documents) -> None:
        """Compile for batches of which this is promised besides; bounds get powers of two.

        Padding counts as a document. Only cuDNN's attention needs static bounds. The loop gives the
        dataset's, where it has some, so that nothing compiles twice and all processes agree.
        """
        own = self.documents
        most = max(own.most, bound_of_documents(self.cfg, promised.most))
        images = max(own.images, bound_of_documents(self.cfg, promised.images))
        held_one = own.padded or own.most <= 1
        holds_one = promised.padded or promised.most == 1
        self.documents = Documents(most, most == 2 and held_one and holds_one, images)

    def share_bound(self, others: "Programs") -> None:
        """Promise what the programs of another model on the same batches were promised."""
        self.documents = others.documents

    def jitted(self, kind: ProgramKind, rows: int) -> jax.stages.Wrapped:
        """The program of this kind on global arrays with batches of `rows` sequences, jitted."""
        key = ProgramKey(kind, rows, self.documents)
        if key not in self._jitted:
            self._jitted[key] = self._jit(kind, self.program(rows))
        return self._jitted[key]

    def recompile(self, xla_options: dict) -> None:
        """Compile programs anew when next needed, with these XLA options besides the usual."""
        self.xla_options = xla_options
        self._jitted.clear()

    def lower(self, batch: dict) -> jax.stages.Lowered:
        """The train step lowered for an abstract batch."""
        mesh = self.state_layout.mesh
        scalar = jax.ShapeDtypeStruct((), np.float32)
        on_all = NamedSharding(mesh, P())  # as `replicated` lays it out
        gate = steps.Gate(scalar, jax.ShapeDtypeStruct((), np.bool_, sharding=on_all))
        # In fp16 the devices pick the rates (`train/rates.py`).
        in_fp16 = self.state_layout.scaler is not None
        rate = jax.ShapeDtypeStruct((), np.float32, sharding=on_all) if in_fp16 else scalar
        step = self.jitted(steps.TRAIN, batch["rows"].shape[0])
        return step.lower(self.state_layout.abstract(), batch, rate, rate, gate)

    def program(self, rows: int) -> steps.Program:
        """All that is static in a step of `rows` sequences."""
        cfg, mesh, placement = self.cfg, self.state_layout.mesh, self.state_layout.placement
        sizes, facts = dict(mesh.shape), device_facts(list(mesh.devices.flat))
        uniform = self.layout is None or self.layout.uniform
        execution = decide_execution(cfg, sizes, facts, rows)
        if isinstance(self.objective, WholeBatch) and execution.micro_batches > 1:
            raise UserError(
                f"train.objective={cfg.train.objective} compares all rows of a batch, but {rows} "
                f"rows are {execution.micro_batches} micro-batches; raise train.micro_batch_size"
            )
        ctx = training_context(
            cfg,
            placement.parallel,
            self.documents,
            permute=uniform,
            # Dropout of adapters needs to know which tokens a matmul has: all, or a shard.
            overlap_rows=None if cfg.lora.dropout else tp_overlap_rows(cfg.mesh, facts, uniform),
        )
        model = LocalModel(
            self.definition,
            placement,
            execution,
            ctx,
            self.objective,
            packed=cfg.data.document_mask and self.documents.most != 1,
        )
        return steps.Program(
            model,
            decide_evaluation(cfg, sizes, rows),
            self.state_layout.optimizer,
            self.state_layout.buffers,
            seed=cfg.run.seed,
            clip_grad_norm=cfg.optimizer.clip_grad_norm,
            expert_bias_rate=cfg.model.moe.expert_bias_update_rate,
            loss_divisor=_loss_divisor(cfg, self.objective),
            layers=cfg.model.num_hidden_layers,
            experts=cfg.model.moe.num_experts if cfg.model.has_role("experts") else 0,
            layout=self.layout,
            scaler=self.state_layout.scaler,
        )

    def _jit(self, kind: ProgramKind, program: steps.Program) -> jax.stages.Wrapped:
        mesh = self.state_layout.mesh
        devices = list(mesh.devices.flat)
        partitions = ProgramPartitions(
            self.state_layout.partitions(),
            batch_partitions(program.model.objective, program.parallel),
            program.placement.of_gradients,
        )
        body = functools.partial(kind.function, program)
        if devices[0].platform == "cpu" and len(devices) > 1:
            body = in_program_order(body)
        mapped = on_shards(body, mesh, kind.inputs(partitions), kind.outputs(partitions))
        kernels = program.model.ctx.kernels
        overlaps = kernels.overlap_rows is not None
        options = compiler_options(
            program.execution,
            overlaps,
            devices,
            kernels.deterministic,
            reads_pairs=devices[0].platform != "cpu" and reads_pairs(self.cfg, dict(mesh.shape)),
            reads_images="vision" in self.cfg.model.embedded,
        )
        options |= self.xla_options
        return jax.jit(mapped, donate_argnums=kind.donated, compiler_options=options or None)


def _loss_divisor(cfg: Config, objective: Objective) -> str | float:
    """`train.loss_divisor`; raises `UserError` if the objective has no loss mask to weigh."""
    found = cfg.train.loss_divisor
    if found == "sequences" and "loss_mask" not in objective.fields:
        raise UserError(
            f"train.loss_divisor=sequences weighs the field loss_mask, which {cfg.train.objective} "
            "does not have; set train.loss_divisor=tokens"
        )
    return found
