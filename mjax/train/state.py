"""The state of a training run on a mesh: parameters, moments, buffers, step number, loss scale.

Invariant: no device ever holds more than its part. State is initialized under jit with output
shardings, equal on every mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.schema.run import Config
from mjax.interop.adapters_of_run import joined_trees, start_adapters
from mjax.kernels.nf4.parameters import round_base
from mjax.models import build, split
from mjax.models.runtime.buffers import Buffer, buffers_of
from mjax.objectives.objective import OWN_WEIGHTS
from mjax.optim.build import Optimizer, moment_trees
from mjax.optim.shards import muon_resharders
from mjax.pipeline.layout import Layout
from mjax.pipeline.storage import (
    Storage,
    entry_of_parameter,
    global_indices,
    storage_specs,
    to_storage,
)
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import Padding, Placement, padding, partition, place
from mjax.sharding.spec import ParamSpec, is_spec, trained_only
from mjax.train.loss_scale import LossScaler, LossScaleState, loss_scaler

OWN_SALT = 3 << 24  # of the draws of an objective's weights


@dataclass(frozen=True)
class StateLayout:
    """The parts of the state of a run, and where they lie on the mesh.

    specs: the parameters, in canonical form. placement: of what is stored of them.
    storage: how they are moved and padded for the mesh.
    buffers: by name. scaler: of the loss, in fp16.
    """

    cfg: Config
    mesh: Mesh
    specs: dict
    placement: Placement
    storage: Storage
    optimizer: Optimizer
    buffers: dict[str, Buffer]
    scaler: LossScaler | None

    def initial_params(self) -> dict:
        """Parameters drawn from run.seed, in the order of storage; to be jitted."""
        model = build(self.cfg.model, nnx.Rngs(self.cfg.run.seed))
        _, params = split(model)
        if self.cfg.lora.rank:
            params = round_base(params, self.specs, self.cfg.precision.compute)
            params = joined_trees(params, self.start_adapters(params))
        params |= self.own_params()
        stored = to_storage(self.storage, params)

        def cast(spec: ParamSpec, a: jax.Array) -> jax.Array:
            dtype = spec.dtype(self.cfg.precision.params)
            return a.astype(dtype)

        return jax.tree.map(cast, self.placement.specs, stored, is_leaf=is_spec)

    def own_params(self) -> dict:
        """The weights of the objective, drawn from run.seed; to be traced.

        Each is normal with deviation 1/sqrt(inputs), so what it maps keeps its size.
        """
        own = self.specs.get(OWN_WEIGHTS, {})
        key = jax.random.fold_in(jax.random.key(self.cfg.run.seed), OWN_SALT)
        drawn = {}
        for number, name in enumerate(sorted(own)):
            shape = own[name].shape
            values = jax.random.normal(jax.random.fold_in(key, number), shape)
            drawn[name] = values * shape[0] ** -0.5
        return {OWN_WEIGHTS: drawn} if drawn else {}

    def start_adapters(self, base: dict) -> dict:
        """Adapters drawn from run.seed beside canonical parameters; to be traced."""
        key = jax.random.key(self.cfg.run.seed)
        return start_adapters(base, self.specs, key, self.cfg.lora.init)

    def initial_state(self) -> dict:
        """The state at step 0; to be traced only."""
        params = self.initial_params()
        trained = trained_only(params, self.placement.specs)
        state = {"params": params, "opt": self.optimizer.init(trained), "step": jnp.int32(0)}
        if self.buffers:
            state["buffers"] = self.initial_buffers(params)
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.start()
        return state

    def initial_buffers(self, params: dict) -> dict:
        """The buffers before the first step of a run with these parameters; to be traced."""
        return {name: buffer.initial(params) for name, buffer in self.buffers.items()}

    def partitions(self) -> dict:
        """The partition of every leaf of the state.

        A leaf of the optimizer follows the parameter whose path ends its own. Buffers say their
        logical axes. The rest is replicated.
        """
        paths = jax.tree_util.tree_flatten_with_path(self.placement.stored)[0]
        by_path = {jax.tree_util.keystr(path): cut for path, cut in paths}
        shapes = jax.eval_shape(self.initial_state)
        buffers = shapes.pop("buffers", {})
        partitions = jax.tree_util.tree_map_with_path(
            lambda path, _: entry_of_parameter(by_path, path) or PartitionSpec(), shapes
        )
        cuts = {}
        for name, arrays in buffers.items():
            cut = partition(self.buffers[name].axes, self.placement.parallel)
            cuts[name] = jax.tree.map(lambda _: cut, arrays)  # noqa: B023
        return partitions | {"buffers": cuts} if cuts else partitions

    def shardings(self, partitions: dict) -> dict:
        return jax.tree.map(lambda cut: NamedSharding(self.mesh, cut), partitions)

    def abstract(self) -> dict:
        """The state as `ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self.initial_state)
        shardings = self.shardings(self.partitions())
        if self.cfg.optimizer.offload is True:
            moments = moment_trees(shardings["opt"])
            shardings["opt"] |= jax.tree.map(
                lambda sharding: sharding.with_memory_kind("pinned_host"), moments
            )
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
        )

    def abstract_loss_scale(self) -> LossScaleState:
        """The state of a loss scale as `ShapeDtypeStruct`s, whether or not the run has one."""
        scaler = self.scaler or LossScaler(self.cfg.precision)
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            jax.eval_shape(scaler.start),
        )

    def start_loss_scale(self) -> LossScaleState:
        """The state of the loss scale before the first step, on the mesh."""
        return jax.jit(self.scaler.start, out_shardings=NamedSharding(self.mesh, PartitionSpec()))()

    def draw(self) -> dict:
        """Parameters drawn from run.seed, on the mesh."""
        shardings = self.shardings(self.placement.stored)
        return jax.jit(self.initial_params, out_shardings=shardings)()

    def start(self, params: dict) -> dict:
        """The state at step 0 with these parameters; all else is zero, or as the optimizer and the
        buffers start.

        Moments that live on the host are made there.
        """
        rest = self.abstract()
        rest.pop("params")
        abstract_buffers = rest.pop("buffers", {})
        values = jax.tree.map(lambda _: 0, rest)
        values["opt"] = self.optimizer.first_values()
        if self.scaler is not None:
            values["loss_scale"] = self.scaler.first_values()
        leaves, tree = jax.tree.flatten(rest)
        values = jax.tree.leaves(values)
        pairs = list(zip(leaves, values, strict=True))
        on_device = [(a, value) for a, value in pairs if not _is_on_host(a)]
        shardings = [a.sharding for a, _ in on_device]

        def make() -> list[jax.Array]:
            return [jnp.full(a.shape, value, a.dtype) for a, value in on_device]

        next_made = iter(jax.jit(make, out_shardings=shardings)())
        started = []
        for a, value in pairs:
            started.append(_host_full(a, value) if _is_on_host(a) else next(next_made))
        state = {"params": params} | jax.tree.unflatten(tree, started)
        return state | self.start_buffers(params, abstract_buffers)

    def start_buffers(self, params: dict, abstract: dict) -> dict:
        """The entry of a state for its buffers before the first step; {} if there are none."""
        if not abstract:
            return {}
        shardings = jax.tree.map(lambda a: a.sharding, abstract)
        make_buffers = jax.jit(self.initial_buffers, out_shardings=shardings)
        return {"buffers": make_buffers(params)}


def state_layout(
    cfg: Config, specs: dict, mesh: Mesh, parallel: Parallel, layout: Layout | None
) -> StateLayout:
    """The layout of the state of a run.

    `specs` declare the parameters. `layout` is that of the pipeline.
    """
    canonical_specs, specs = specs, storage_specs(layout, specs)
    placement = place(specs, parallel, cfg.mesh.zero_stage, cfg.mesh.zero_group)
    storage = Storage(layout, paddings(placement))
    optimizer = Optimizer(
        cfg.optimizer,
        trained_only(specs, specs),
        *muon_resharders(placement),
        seed=cfg.run.seed,
        global_indices=_global_indices(placement, storage),
    )
    buffers = buffers_of(cfg.precision, placement.specs)
    scaler = loss_scaler(cfg.precision)
    return StateLayout(cfg, mesh, canonical_specs, placement, storage, optimizer, buffers, scaler)


def paddings(placement: Placement) -> dict[str, Padding | None]:
    """Key path of every parameter -> how its stored shards are padded."""
    paths = jax.tree_util.tree_flatten_with_path(placement.specs)[0]
    cuts = jax.tree.leaves(placement.weights), jax.tree.leaves(placement.stored)
    return {
        jax.tree_util.keystr(path): padding(spec, weight, stored, placement.parallel)
        for (path, spec), weight, stored in zip(paths, *cuts, strict=True)
    }


def _global_indices(placement: Placement, storage: Storage) -> Callable:
    """name of a parameter -> canonical indices of its local entries (for `Optimizer`)."""
    specs, stored = flatten_dict(placement.specs), flatten_dict(placement.stored)

    def of_name(name: tuple[str, ...]) -> tuple[jax.Array, ...]:
        path = tuple(map(jax.tree_util.DictKey, name))
        return global_indices(storage, path, specs[name], stored[name], placement.parallel)

    return of_name


def _is_on_host(a: jax.ShapeDtypeStruct) -> bool:
    return a.sharding.memory_kind == "pinned_host"


def _host_full(a: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    """Made on the devices, which write to the host beside each other; numpy would fill shard after
    shard in memory of its own first."""
    on_device = NamedSharding(a.sharding.mesh, a.sharding.spec)
    made = jax.jit(lambda: jnp.full(a.shape, value, a.dtype), out_shardings=on_device)()
    return jax.block_until_ready(jax.device_put(made, a.sharding))  # one at a time: it is large
