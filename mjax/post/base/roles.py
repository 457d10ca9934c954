"""Roles: named sets of weights beside those that are trained, and what they give to a batch.

A role is the policy, a reference, a teacher, a reward model or a critic. It has its own weights,
frozen flag and dtype. Its trainer has the mesh and the programs: that of the policy, or one of its
own, perhaps on devices of its own (`DeviceSharer`). Its results are fields of the batch
(`BatchField.is_computed`), and no gradient flows through a field. They come from a forward pass of
the same step (`RoleFields`, which the policy's trainer calls for each batch), or from files
(`post/base/stored_scores.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from mjax.errors import UserError
from mjax.interop.sources import source_of
from mjax.objectives.fields import Batch, HostBatch
from mjax.sharding.spec import trained_only
from mjax.train.batch import promises_of
from mjax.train.program_kind import ProgramKind
from mjax.train.trainer import Trainer

RoleName = Literal["policy", "reference", "teacher", "reward", "critic"]


@dataclass(frozen=True)
class Role:
    """A named set of weights.

    trainer: its mesh, programs and state.
    held: parameters of its own as stored, a part of a tree like the trainer's. The rest are the
        trainer's, live. None: all are.
    frozen: whether no step changes it.
    """

    name: RoleName
    trainer: Trainer
    held: dict | None = None
    frozen: bool = True

    def weights(self) -> dict:
        """The state that a program reads."""
        if self.trainer.state is None:  # all are its own
            return {"params": self.held, "step": jnp.int32(0)}
        live = self.trainer.weights()
        if self.held is None:
            return live
        params = flatten_dict(live["params"]) | flatten_dict(self.held)
        return live | {"params": unflatten_dict(params)}

    def compute(self, kind: ProgramKind, placed: Batch) -> object:
        """The result of a program on a placed batch, on the devices."""
        return self.trainer.run_placed(kind, placed, self.weights())


# Returns fields to add to a placed batch. It sees those of the functions before it.
RoleField = Callable[[Batch], Batch]


@dataclass(frozen=True)
class RoleFields:
    """The fields that roles on the trainer's mesh compute for each batch, one after the other."""

    fields: tuple[RoleField, ...]

    def __call__(self, placed: Batch, given: HostBatch | None = None) -> Batch:
        found: Batch = {}
        for field in self.fields:
            found |= field(placed | found)
        return found


def reference_of(trainer: Trainer, folder: str | None) -> Role:
    """The reference of a run: the weights in `folder`, or those that its training starts from.

    From that start it holds the parameters that are trained; the frozen ones are the policy's.
    Adapters that begin without effect are left off instead (`LoraConfig.begins_at_base`).
    Parameters are in precision.compute, but those that FP8 rounds stay as the masters are.
    """
    if folder is not None:
        held = trainer.checkpoints.load_weights(source_of(folder))[0]
    elif trainer.cfg.lora.begins_at_base:
        return Role("reference", trainer)
    else:
        held = trained_only(_start_params(trainer), trainer.state_layout.placement.specs)
    return Role("reference", trainer, in_compute_dtype(trainer, held))


def _start_params(trainer: Trainer) -> dict:
    """The stored parameters that the run of a trainer started from."""
    if trainer.state is None:
        trainer.init()
    if trainer.step_number == 0:
        return trainer.weights()["params"]
    checkpoints = trainer.checkpoints
    return checkpoints.with_given_adapters(checkpoints.start_params()[0])


def in_compute_dtype(trainer: Trainer, params: dict) -> dict:
    """A copy of stored parameters, which no step takes over, as the role reads them."""
    precision = trainer.cfg.precision
    specs = flatten_dict(trainer.state_layout.placement.specs)
    copies = {}
    for path, array in flatten_dict(params).items():
        dtype = array.dtype
        if precision.fp8 == "none" and jnp.issubdtype(dtype, jnp.floating):
            dtype = specs[path].dtype(precision.compute)
        copies[path] = jnp.array(array, dtype, copy=True)
    return unflatten_dict(copies)


def rows_of_process(trainer: Trainer, batch: HostBatch) -> HostBatch:
    """The rows of a batch that this process places, of those that all processes have.

    They promise their programs the same of it.
    """
    if jax.process_count() == 1:
        return batch
    trainer.programs.bound_documents(promises_of(batch))
    rows = trainer.local_rows(len(batch["positions"]))
    return {name: field[rows] for name, field in batch.items()}


def on_host(arrays: Any) -> Any:
    """Numpy arrays of a tree of global ones, whole in each process; every process must call."""
    return multihost_utils.process_allgather(arrays, tiled=True)


def values_in_order(placed: Batch, values: Any) -> np.ndarray:
    """Values of the places of a placed batch, [B, S], on the host in the order of its columns."""
    values, columns = on_host((values, placed["columns"]))
    found = np.empty_like(values)
    found[:, columns] = values
    return found


def require_no_pipeline(trainer: Trainer, what: str) -> None:
    """Raise `UserError` for a role that has no program for a pipeline."""
    if trainer.layout is not None:
        raise UserError(f"{what} needs a mesh without pipeline; set mesh.pp=1")
