"""`Trainer`: a model, its optimizer and their state on a mesh; what the CLI and notebooks drive.

It owns no loop and no data. `step` is asynchronous: it returns device scalars.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.checkpoint.base.source import Source
from mjax.checkpoint.store import Store
from mjax.config.schema.run import Config
from mjax.config.validate import validate
from mjax.errors import NonFiniteLoss, UserError
from mjax.kernels.fp8.block_parameters import require_blocks_of_recipes
from mjax.kernels.fp8.recipe import recipe_of
from mjax.kernels.loss.token_functions import TokenScores
from mjax.kernels.nf4.parameters import require_whole_blocks
from mjax.models import definition_of
from mjax.models.base.adapted import specs_of_run
from mjax.models.base.params import with_specs
from mjax.models.towers.tower_mesh import with_whole_towers
from mjax.objectives.fields import Batch, HostBatch, further_lengths
from mjax.objectives.objective import Objective, OwnAxes, objective_of, own_specs, share_devices
from mjax.optim.build import patterns_of
from mjax.pipeline.layout import layout_of
from mjax.pipeline.storage import canonical
from mjax.plan.auto import resolve_auto
from mjax.plan.xla_options import fix_reduction_order
from mjax.sharding.mesh import make_mesh, parallel_of_run, replicated
from mjax.sharding.spec import freeze, require_named, rounded_specs
from mjax.train import step as steps
from mjax.train.batch import BatchPlacer, promises_of
from mjax.train.checkpoints import Checkpoints
from mjax.train.loss_scale import skipped_samples
from mjax.train.norms import NORMS, Norms
from mjax.train.program_kind import ProgramKind, without_moments
from mjax.train.programs import Programs
from mjax.train.rates import StepRates
from mjax.train.state import state_layout
from mjax.train.token_scores import SCORES


def no_fields(placed: Batch, given: HostBatch | None = None) -> Batch:
    """The fields of no roles."""
    return {}


class Trainer:
    """Trains the model of `cfg` on `mesh`.

    The default mesh has the sizes in cfg.mesh over `devices`, which are all unless given. The
    default objective is the one that cfg.train.objective names.
    A batch is a dict of numpy arrays: the fields of the objective, and segment_ids and positions
    [B, S]. Next-token prediction has the fields tokens, labels and loss_mask [B, S].
    Each of several processes passes its `local_rows` of the global batch.
    """

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh | None = None,
        devices: Sequence[jax.Device] | None = None,
        objective: Objective | None = None,
    ):
        validate(cfg)
        self.definition = definition_of(cfg.model)
        if cfg.lora.rank:
            adapted = specs_of_run(self.definition.specs, cfg.lora, cfg.precision.compute)
            self.definition = with_specs(self.definition, adapted)
        specs = rounded_specs(self.definition.specs, cfg.precision)
        specs = with_whole_towers(specs, cfg)
        self.objective = objective_of(cfg) if objective is None else objective
        self.specs = freeze(specs, cfg.train.freeze) | own_specs(self.objective)
        multiplied = patterns_of(cfg.optimizer.lr_multipliers)
        require_named("optimizer.lr_multipliers", multiplied, specs)
        require_named("precision.fp8_rules", [of for of, _ in cfg.precision.fp8_rules], specs)
        if devices is None:
            devices = jax.devices() if mesh is None else mesh.devices.flatten().tolist()
        self.role_devices: list[jax.Device] = []  # those of a role, where it has its own
        if mesh is None:
            devices, self.role_devices = share_devices(self.objective, devices)
        cfg, self.why = resolve_auto(cfg, devices, self.specs)
        validate(cfg, device_count=len(devices))
        for name in cfg.precision.fp8_recipes:
            if recipe := recipe_of(cfg.precision, name):
                recipe.require(devices[0], cfg.precision.fp8_experts)
        if cfg.run.deterministic:
            fix_reduction_order()
        self.cfg = cfg
        self.mesh = make_mesh(cfg.mesh, devices) if mesh is None else mesh
        self.parallel = parallel_of_run(cfg, self.mesh.shape)
        require_whole_blocks(self.specs, self.parallel)
        require_blocks_of_recipes(self.specs, self.parallel, cfg.precision)
        self.layout = layout_of(cfg) if self.parallel.pp > 1 else None
        self.state_layout = state_layout(cfg, self.specs, self.mesh, self.parallel, self.layout)
        self.storage = self.state_layout.storage
        self.programs = Programs(
            cfg, self.definition, self.objective, self.state_layout, self.layout
        )
        lengths = further_lengths(cfg)
        if isinstance(self.objective, OwnAxes):
            lengths |= self.objective.lengths
        sizes = int(cfg.train.micro_batch_size), cfg.model.vocab_size, lengths
        types = cfg.model.bert.type_vocab_size
        self.placer = BatchPlacer(self.mesh, self.parallel, self.objective, *sizes, types)
        self.local_rows = self.placer.local_rows
        # Compute fields that a batch was given without (`post/base/roles.py`): those of frozen
        # roles when it is placed, maybe steps ahead; those of live weights when it is used. The
        # former see the batch as it was given, too.
        self.role_fields: Callable[[Batch, HostBatch], Batch] = no_fields
        self.live_role_fields: Callable[[Batch], Batch] = no_fields
        self.state: steps.State | None = None
        self.step_number = 0
        self.rates = StepRates(cfg)
        self.checkpoints = Checkpoints(cfg, self.state_layout)

    # ---- state -------------------------------------------------------------------------------

    def init(self) -> None:
        """Draw parameters from run.seed and start at step 0. Equal on every mesh."""
        self.start(self.checkpoints.draw())

    def load_params(self, *sources: Source) -> str:
        """Start at step 0 from the weights of `sources`; returns what was and was not loaded.

        Raises `UserError` for a model that differs in more than `checkpoint.init_changes`.
        """
        params, summary = self.checkpoints.load_weights(*sources)
        self.start(self.checkpoints.with_given_adapters(params))
        return summary

    def start(self, params: dict) -> None:
        """Start at step 0 from parameters as stored (`state_layout`)."""
        self.go_on_from(self.state_layout.start(params), 0)

    def go_on_from(self, state: steps.State, step: int) -> None:
        """Go on from a state, behind `step`."""
        self.state, self.step_number = state, step
        self.rates = StepRates(self.cfg, skipped_samples(state))
        if self.state_layout.scaler is not None:
            self.rates.under_way.append((replicated(self.mesh, False), 0))

    def abstract_state(self) -> steps.State:
        """The state as `ShapeDtypeStruct`s with shardings."""
        return self.state_layout.abstract()

    def params(self) -> dict:
        """Parameters in `precision.params`, a nested dict of global arrays."""
        return canonical(self.storage, self._live()["params"])

    def save(self, held_out_loss: float | None = None) -> None:
        """Start an asynchronous checkpoint of the current step under run.dir/checkpoints.

        `held_out_loss` is that of this step, for `checkpoint.keep_best`. Raises `NonFiniteLoss` if
        a parameter holds a number that is not finite; nothing is saved then.
        """
        self._count_rejected()
        self.checkpoints.save(self.step_number, self._live(), held_out_loss)

    def save_local(self) -> None:
        """Start to save the current step in the local tier; it raises as `save` does."""
        self._count_rejected()
        self.checkpoints.save_local(self.step_number, self._live())

    def stored_state(self) -> steps.State:
        """The state as checkpoints hold it; raises `NonFiniteLoss` as `save` does."""
        self._count_rejected()
        return self.checkpoints.stored(self.step_number, self._live())

    def _count_rejected(self) -> None:
        """Number the state by `step_number`, which counts steps that were not accepted, too."""
        if int(self._live()["step"]) != self.step_number:
            self.set_step(self.step_number)

    def restore(self, step: int | None = None) -> int:
        """Load checkpoint `step` (default: the newest), onto any mesh; returns its step."""
        state = self.checkpoints.restore(step)
        self.go_on_from(state, int(state["step"]))
        return self.step_number

    @property
    def skipped_samples(self) -> int:
        """The samples that the schedule leaves out; in fp16 this waits for the last step."""
        return skipped_samples(self._live())

    @property
    def store(self) -> Store:
        """The checkpoints on disk."""
        return self.checkpoints.store

    def _live(self) -> steps.State:
        if self.state is None:
            raise RuntimeError("Trainer holds no state: call init() or restore() first")
        return self.state

    # ---- computation -------------------------------------------------------------------------

    def step(
        self,
        batch: HostBatch | Batch,
        most_loss: float = math.inf,
        is_open: jax.Array | bool = True,
    ) -> dict[str, jax.Array]:
        """One optimizer step on a global batch, or on one that `place` returned; device scalars, as
        `train_step` says.

        The state changes only if a token counts, the numbers are finite, the loss is at most
        `most_loss` and `is_open` holds (`step.py: Gate`). `step_number` counts the step in any
        case; the state's own number follows when it is saved.
        """
        given: Any = batch
        placed = given if isinstance(given.get("rows"), jax.Array) else self.place(given)
        placed = placed | self.live_role_fields(placed)
        state, self.state = self._live(), None  # donated: gone if the step fails
        step = self._program(steps.TRAIN, placed)
        if not isinstance(is_open, jax.Array):
            is_open = replicated(self.mesh, is_open)
        most: Any = np.float32(most_loss)
        gate = steps.Gate(most, is_open)
        rates = self.rates.of_step(self.step_number)
        self.state, metrics = step(state, placed, *rates, gate)
        self.rates.dispatched(metrics, placed["rows"].shape[0])
        self.step_number += 1
        return metrics

    def apply_gradients(
        self, gradients: dict, lr: float | None = None, weight_decay: float | None = None
    ) -> dict[str, float]:
        """The update of `step` alone, by gradients as the program GRADIENTS gives them.

        The default rates are those of the schedule. Raises `NonFiniteLoss` for gradients that are
        no numbers, and the weights stay.
        """
        due = self.rates.of_step(self.step_number)
        rate = due[0] if lr is None else np.float32(lr)
        decay = due[1] if weight_decay is None else np.float32(weight_decay)
        update = self.programs.jitted(steps.APPLY, self.cfg.train.global_batch_size)
        self.state, norm = update(self._live(), gradients, rate, decay)
        self.require_finite("gradient norm", norm)
        self.step_number += 1
        return {"grad_norm": float(norm), "lr": float(rate)}

    def require_finite(self, name: str, value: jax.Array | np.ndarray) -> None:
        """Raise `NonFiniteLoss` for a figure of the next step that is no number."""
        if not np.isfinite(value):
            raise NonFiniteLoss(
                f"step {self.step_number + 1}: the {name} is {value}, so the weights stay as "
                "they are; look at the data that the gradient is of, or lower the rate"
            )

    def require_plain_update(self, name: str) -> None:
        """Raise `UserError` for what `step` updates beside parameters, which `name` does not."""
        layout, moe = self.state_layout, self.cfg.model.moe
        kept = {
            "precision.compute=float16": layout.scaler is not None,
            "precision.fp8 with scales of past steps": bool(layout.buffers),
            "model.moe.expert_bias with an update rate": (
                moe.expert_bias and moe.expert_bias_update_rate > 0
            ),
        }
        for what, is_there in kept.items():
            if is_there:
                raise UserError(f"{name}: {what} is not built; leave it out, or run mjax train")

    def norms(self, batch: HostBatch) -> Norms:
        """The norms of the step that `step` would do on this batch; the state stays."""
        placed = self._place_for_use(batch)
        rates = self.rates.of_step(self.step_number)
        return self._program(NORMS, placed)(self._live(), placed, *rates)

    def set_step(self, number: int) -> None:
        """Count `number` steps from here on, with the weights as they are."""
        state = {**self._live(), "step": replicated(self.mesh, np.int32(number))}
        self.go_on_from(state, number)

    def grads(self, batch: HostBatch) -> tuple[jax.Array, jax.Array, dict]:
        """(loss, gradient norm, gradients of the trained parameters) of a global batch.

        Gradients are global arrays in a nested dict.
        """
        found = self.run_program(steps.GRADIENTS, batch)
        gradients = canonical(self.storage, found.gradients)
        return found.losses["loss"], found.norm, gradients

    def evaluate(self, batch: HostBatch) -> tuple[jax.Array, jax.Array]:
        """(sum, count) of the loss called "loss" of a global batch, without dropout."""
        sums, counts = self.run_program(steps.LOSSES, batch)
        return sums["loss"], counts["loss"]

    def token_scores(self, batch: HostBatch) -> TokenScores:
        """(log_p, entropy) of each label of a global batch, global fp32 arrays [B, S].

        They are without dropout, in the order of the batch. Labels need not count in the loss:
        multiply by a mask.
        """
        return self.run_program(SCORES, batch)

    def run_program(self, kind: ProgramKind, batch: HostBatch, *more: object) -> Any:
        """The result of a program whose inputs are the weights, a global batch and `more`.

        The weights are the state without moments (`Partitions.weights`).
        """
        return self.run_placed(kind, self._place_for_use(batch), self.weights(), *more)

    def run_placed(self, kind: ProgramKind, placed: Batch, weights: dict, *more: object) -> object:
        """`run_program` on a placed batch, with weights of whatever role."""
        return self._program(kind, placed)(weights, placed, *more)

    def weights(self) -> dict:
        """The live state without moments, what `run_placed` takes."""
        return without_moments(self._live())

    def lower(self, batch_size: int | None = None) -> jax.stages.Lowered:
        """The train step lowered for this mesh and an abstract batch, nothing allocated."""
        rows = batch_size or self.cfg.train.global_batch_size
        return self.programs.lower(self.placer.abstract(rows, self.cfg.data.seq_length))

    def place(self, batch: HostBatch) -> Batch:
        """The batch on the devices, for `step`; `placed_ahead` says when it is best called."""
        placed = self.placer.place(batch)
        self.programs.bound_documents(promises_of(batch))
        awaited = [n for n in self.objective.fields if self.placer.is_left_to_roles(n, batch)]
        if not awaited:
            return placed
        if self.role_fields is no_fields and self.live_role_fields is no_fields:
            raise UserError(
                f"batch: {', '.join(awaited)} is computed by a role, which this command has none "
                "of; mjax preference, distill and reinforce have theirs"
            )
        return placed | self.role_fields(placed, batch)

    def _place_for_use(self, batch: HostBatch) -> Batch:
        """The batch on the devices, for a program that reads the weights as they are now."""
        placed = self.place(batch)
        return placed | self.live_role_fields(placed)

    def _program(self, kind: ProgramKind, batch: Batch) -> jax.stages.Wrapped:
        """The program of this kind for batches like `batch`."""
        return self.programs.jitted(kind, batch["rows"].shape[0])
