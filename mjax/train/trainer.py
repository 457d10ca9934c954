"""`Trainer`: a model, its optimizer and their state on a mesh; what the CLI and notebooks drive.

It owns no loop and no data. `step` is asynchronous: it returns device scalars.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.checkpoint.source import Source, arrays
from mjax.checkpoint.store import Store, require_same_model
from mjax.config.schema import Config
from mjax.config.validate import validate
from mjax.kernels.quantize import require_fp8
from mjax.models import definition_of
from mjax.models.objective import HostBatch, objective_of
from mjax.optim.schedule import consumed_samples, learning_rate, weight_decay
from mjax.pipeline.layout import layout_of
from mjax.pipeline.storage import canonical, canonical_abstract, from_canonical
from mjax.plan.auto import resolve_auto
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.sharding.spec import freeze
from mjax.train import step as steps
from mjax.train.batch import BatchPlacer, most_documents
from mjax.train.programs import jit_program, make_program
from mjax.train.state import state_layout, without_moments


class ProgramKey(NamedTuple):
    """The purpose of a program, and the documents and rows of the batches it is compiled for."""

    kind: str
    max_documents: int
    rows: int


class Trainer:
    """Trains the model of `cfg` on `mesh` (default: all devices, sizes from cfg.mesh).

    A batch is a dict of numpy arrays: the fields of the objective, and segment_ids and positions
    [B, S]. Those of the default objective are tokens, labels and loss_mask [B, S].
    Where there are several processes, each passes its `local_rows` of the global batch.
    """

    def __init__(self, cfg: Config, mesh: Mesh | None = None):
        validate(cfg)
        self.definition = definition_of(cfg.model)
        self.specs = freeze(self.definition.specs, cfg.train.freeze)
        self.objective = objective_of(cfg.train.objective)
        devices = jax.devices() if mesh is None else mesh.devices.flatten()
        cfg, self.why = resolve_auto(cfg, devices, self.specs)
        validate(cfg, device_count=len(devices))
        if cfg.precision.fp8 != "none":
            require_fp8(devices[0], cfg.precision.fp8_backend)
        self.cfg = cfg
        self.mesh = make_mesh(cfg.mesh) if mesh is None else mesh
        self.parallel = parallel_of(self.mesh)
        self.layout = layout_of(cfg) if self.parallel.pp > 1 else None
        self.state_layout = state_layout(cfg, self.mesh, self.parallel, self.layout)
        self.placement = self.state_layout.placement
        self.storage = self.state_layout.storage
        size = cfg.train.micro_batch_size
        self.placer = BatchPlacer(self.mesh, self.parallel, self.objective, size)
        self.local_rows = self.placer.local_rows
        self.state: steps.State | None = None
        self.step_number = 0
        self.max_documents = 1 if not cfg.data.document_mask else 0
        self._store: Store | None = None
        self._programs: dict[ProgramKey, jax.stages.Wrapped] = {}
        self._xla_options: dict = {}

    # ---- state -------------------------------------------------------------------------------

    def init(self) -> None:
        """Draw parameters from run.seed and start at step 0. Equal on every mesh."""
        self._start(self.state_layout.draw())

    def load_params(self, source: Source) -> None:
        """Start at step 0 from the weights of `source`; raises `UserError` for another model."""
        require_same_model(self.cfg.model, source.cfg)
        source.check()
        stored = self.abstract_state()["params"]
        params = arrays(source, canonical_abstract(self.storage, stored))
        self._start(from_canonical(self.storage, params, stored))

    def _start(self, params: dict) -> None:
        self.state = self.state_layout.start(params)
        self.step_number = 0

    def abstract_state(self) -> steps.State:
        """The state as `ShapeDtypeStruct`s with shardings."""
        return self.state_layout.abstract()

    def params(self) -> dict:
        """Parameters in `precision.params`, a nested dict of global arrays."""
        return canonical(self.storage, self._live()["params"])

    def save(self) -> None:
        """Start an asynchronous checkpoint of the current step under run.dir/checkpoints."""
        self.store.save(self.step_number, canonical(self.storage, self._live()))

    def restore(self, step: int | None = None) -> int:
        """Load checkpoint `step` (default: the newest), onto any mesh; returns its step."""
        abstract = self.abstract_state()
        saved = canonical_abstract(self.storage, abstract)
        state = self.store.restore(saved, step)
        self.state = from_canonical(self.storage, state, abstract)
        self.step_number = int(self.state["step"])
        return self.step_number

    @property
    def store(self) -> Store:
        if self._store is None:
            cfg = self.cfg.checkpoint
            self._store = Store(
                Path(self.cfg.run.dir) / "checkpoints",
                self.cfg,
                keep=cfg.keep,
                keep_every=cfg.keep_every,
                async_save=cfg.async_save,
            )
        return self._store

    def _live(self) -> steps.State:
        if self.state is None:
            raise RuntimeError("Trainer holds no state: call init() or restore() first")
        return self.state

    # ---- computation -------------------------------------------------------------------------

    def step(self, batch: HostBatch) -> dict[str, jax.Array]:
        """One optimizer step on a global batch; device scalars, as `train_step` says."""
        placed = self._place(batch)
        state, self.state = self._live(), None  # donated: gone if the step fails
        cfg = self.cfg
        samples = consumed_samples(cfg.train, self.step_number)
        lr = np.float32(learning_rate(cfg.schedule, cfg.train, samples))
        decay = np.float32(weight_decay(cfg.optimizer, cfg.train, samples))
        step = self._program("train", placed)
        self.state, metrics = step(state, placed, lr, decay)
        self.step_number += 1
        return metrics

    def grads(self, batch: HostBatch) -> tuple[jax.Array, jax.Array, dict]:
        """(loss, gradient norm, gradients of the trained parameters) of a global batch.

        Gradients are global arrays in a nested dict.
        """
        placed = self._place(batch)
        state = without_moments(self._live())
        found = self._program("grads", placed)(state, placed)
        gradients = canonical(self.storage, found.gradients)
        return found.losses["loss"], found.norm, gradients

    def evaluate(self, batch: HostBatch) -> tuple[jax.Array, jax.Array]:
        """(sum, count) of the loss of a global batch, without dropout.

        They are those of the loss called "loss": by default nll and unmasked tokens.
        """
        placed = self._place(batch)
        state = without_moments(self._live())
        sums, counts = self._program("eval", placed)(state, placed)
        return sums["loss"], counts["loss"]

    def lower(self, batch_size: int | None = None) -> jax.stages.Lowered:
        """The train step lowered for this mesh and an abstract batch, nothing allocated."""
        rows = batch_size or self.cfg.train.global_batch_size
        batch = self.placer.abstract(rows, self.cfg.data.seq_length)
        scalar = jax.ShapeDtypeStruct((), np.float32)
        return self._program("train", batch).lower(self.abstract_state(), batch, scalar, scalar)

    def recompile(self, xla_options: dict) -> None:
        """Compile programs anew when next needed, with these XLA options besides the usual."""
        self._xla_options = xla_options
        self._programs.clear()

    def bound_documents(self, most: int) -> None:
        """Promise that no sequence holds more than `most` documents; rounded up to a power of two.

        Only cuDNN's packed attention needs a static bound. The loop gives the dataset's, so that
        nothing compiles twice and all processes agree.
        """
        attention = self.cfg.train.attention
        if attention == "auto" and jax.default_backend() == "cpu":
            attention = "xla"
        if self.cfg.data.document_mask and attention != "xla":
            power_of_two = 1 << (most - 1).bit_length()
            self.max_documents = max(self.max_documents, power_of_two)

    def _place(self, batch: HostBatch) -> dict[str, jax.Array]:
        placed = self.placer.place(batch)
        self.bound_documents(most_documents(np.asarray(batch["segment_ids"])))
        return placed

    # ---- programs ----------------------------------------------------------------------------

    def _program(self, kind: str, batch: dict) -> jax.stages.Wrapped:
        """The jitted program `kind` for batches like `batch`."""
        key = ProgramKey(kind, self.max_documents, batch["rows"].shape[0])
        if key not in self._programs:
            program = self.program(key.rows, key.max_documents)
            self._programs[key] = jit_program(kind, program, self.state_layout, self._xla_options)
        return self._programs[key]

    def program(self, rows: int, max_documents: int) -> steps.Program:
        """All that is static in a step of `rows` sequences of at most `max_documents` each."""
        return make_program(
            self.cfg,
            self.definition,
            self.objective,
            self.state_layout,
            self.layout,
            rows,
            max_documents,
        )
