"""The place of a policy's engine: on the trainer's devices, or on the last ones of the run.

Weights are cut on the trainer's devices as the engine has them, then copied shard by shard.
Invariant: a shard that a device of the engine wants lies whole on a device of the trainer in the
same process, so no weight goes through the host or to another process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mjax.config.rules.mesh_rules import MESH_RULES
from mjax.config.rules.model_rules import MODEL_RULES
from mjax.config.schema.run import Config, MeshConfig
from mjax.errors import UserError
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.train.trainer import Trainer

PLACE_OPTIONS = "devices", "dp", "tp", "pp", "ep"


@dataclass(frozen=True)
class EnginePlace:
    """Meshes of an engine.

    mesh: its own. source: the same axes over the trainer's devices; `mesh`, if they are the same.
    """

    mesh: Mesh
    source: Mesh

    @property
    def is_apart(self) -> bool:
        """Whether the engine has devices of its own."""
        return self.mesh is not self.source

    @property
    def parallel(self) -> Parallel:
        """The static handle of the engine's programs."""
        return replace(parallel_of(self.mesh), cp=1, cuts_sequence=False)


def engine_place_of(trainer: Trainer, options: Mapping[str, Any]) -> EnginePlace:
    """The place of a trainer's engine. Raises `UserError` for devices or sizes that do not fit."""
    sizes = {name: options[name] for name in PLACE_OPTIONS if name in options}
    own = trainer.mesh.devices.flatten().tolist()
    if not sizes:
        return EnginePlace(trainer.mesh, trainer.mesh)
    if sizes.pop("devices", None) is None:
        mesh = _engine_mesh(trainer.cfg, sizes, own)
        return EnginePlace(mesh, mesh)
    if not trainer.role_devices:
        raise UserError(
            "reinforce.engine: devices: the trainer shares none with it; give Trainer no mesh, and "
            "a train.objective with own_devices, such as policy"
        )
    mesh = _engine_mesh(trainer.cfg, sizes, trainer.role_devices)
    cuts = mesh.size // mesh.shape["dp"]
    holders = {(dp, d.process_index) for (_, dp, *_), d in np.ndenumerate(mesh.devices)}
    if own[0].platform == "cpu" and len(holders) > mesh.shape["dp"]:
        raise UserError(
            "reinforce.engine: on CPUs tp, pp and ep of an engine with devices of its own must lie "
            "within a process, as gloo fails beside a trainer; lower them, or leave out devices"
        )
    if len(own) % cuts == 0:
        source = _engine_mesh(trainer.cfg, sizes | {"dp": len(own) // cuts}, own)
        if _cuts_by_process(mesh) <= _cuts_by_process(source):
            return EnginePlace(mesh, source)
    raise UserError(
        f"reinforce.engine: the engine cuts weights over tp x pp x ep = {cuts} devices, which do "
        f"not divide the trainer's {len(own)}, or not so in each process; it gets them from these, "
        "so change either"
    )


def _cuts_by_process(mesh: Mesh) -> set[tuple[int, ...]]:
    """(process, places on all axes but dp) of the parts of weights that a mesh has."""
    places = np.ndenumerate(mesh.devices)
    return {(d.process_index, pp, *inner) for (pp, _, *inner), d in places}


def _engine_mesh(cfg: Config, sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of these sizes. Raises `UserError` where model or devices do not divide."""
    mesh = MeshConfig(**{**sizes, "expert_tp": sizes.get("tp", 1)})
    run = cfg.model_copy(update={"mesh": mesh})
    try:
        for rule in (*MESH_RULES, *MODEL_RULES):
            # A step of the engine has one token a row, which tp does not cut.
            if rule.name != "tp_divides_seq_length" and (line := rule.error(run)):
                raise UserError(line)
        return make_mesh(mesh, devices)
    except UserError as error:
        own = str(error).replace("mesh.", "")  # the engine has them under the same names
        raise UserError(f"reinforce.engine: {own}") from error
