"""The place of a policy's engine: on the trainer's devices, or on the last ones of the run.

Weights are cut on the trainer's devices as the engine has them, then copied shard by shard.
Invariant: a shard that a device of the engine wants lies whole on a device of the trainer, so no
weight goes through the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from mjax.config.rules.mesh_rules import MESH_RULES
from mjax.config.rules.model_rules import MODEL_RULES
from mjax.config.schema.run import Config, MeshConfig
from mjax.errors import UserError
from mjax.post.base.own_devices import split_devices
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.train.trainer import Trainer

PLACE_OPTIONS = "devices", "dp", "tp", "pp", "ep"
_DEVICES = "reinforce.engine: devices"


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


def training_devices(cfg: Config, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of a run that its engine leaves to the trainer."""
    sizes = _numbers_of_devices(cfg.reinforce.engine)
    count = sizes.get("devices")
    if count is None:
        return list(devices)
    if jax.process_count() > 1:
        raise UserError(f"{_DEVICES}={count} is built for one process; start it without a launcher")
    own, apart = split_devices(devices, count, _DEVICES)
    sizes = {name: size for name, size in sizes.items() if name != "devices"}
    _engine_mesh(cfg, sizes, apart)  # a plan, too, says what does not fit
    return own


def engine_place_of(trainer: Trainer, options: Mapping[str, Any]) -> EnginePlace:
    """The place of a trainer's engine. Raises `UserError` for devices or sizes that do not fit."""
    sizes, own = _numbers_of_devices(options), trainer.mesh.devices.flatten().tolist()
    if not sizes:
        return EnginePlace(trainer.mesh, trainer.mesh)
    count = sizes.pop("devices", None)
    if count is None:
        mesh = _engine_mesh(trainer.cfg, sizes, own)
        return EnginePlace(mesh, mesh)
    apart = split_devices(jax.devices(), count, _DEVICES)[1]
    if not set(apart).isdisjoint(own):
        raise UserError(
            f"{_DEVICES}={count}: the trainer has some of the last {count} devices; give it "
            "others, as mjax reinforce does"
        )
    mesh = _engine_mesh(trainer.cfg, sizes, apart)
    cuts = mesh.size // mesh.shape["dp"]
    if len(own) % cuts:
        raise UserError(
            f"reinforce.engine: the engine cuts weights over tp x pp x ep = {cuts} devices, which "
            f"do not divide the trainer's {len(own)}, from which it gets them; change either"
        )
    source = _engine_mesh(trainer.cfg, sizes | {"dp": len(own) // cuts}, own)
    return EnginePlace(mesh, source)


def _numbers_of_devices(options: Mapping[str, Any]) -> dict[str, int]:
    """The options that are numbers of devices."""
    sizes = {name: options[name] for name in PLACE_OPTIONS if name in options}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise UserError(f"reinforce.engine: {name}={size!r}: give a whole number of 1 or more")
    return sizes


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
        raise UserError(f"reinforce.engine: {error}") from error
