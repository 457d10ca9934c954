"""How a Flax module declares its parameters, and how it is split from them and bound to them again.

NNX modules declare parameters and compose the model. The step works on plain pytrees: a module is
split once into a `Definition` and a nested dict of arrays, and bound again while tracing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.models.base.adapted import join_adapters, with_slots
from mjax.models.base.adapter import TokenPlaces
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.spec import ParamSpec, is_spec

# (key, shape, dtype) -> initial values
Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def normal(std: float) -> Initializer:
    """Draws from a normal distribution with mean 0."""

    def draw(key, shape, dtype):
        return std * jax.random.normal(key, shape, dtype)

    return draw


def constant(value: float) -> Initializer:
    """Fills with one value."""

    def fill(key, shape, dtype):
        return jnp.full(shape, value, dtype)

    return fill


def declare(rngs: nnx.Rngs, spec: ParamSpec, init: Initializer) -> nnx.Param:
    """An fp32 parameter that carries its declaration as metadata `spec`."""
    key = rngs.params()
    value = init(key, spec.shape, jnp.float32)
    return nnx.Param(value, spec=spec)


def declare_bias(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *hf: str,
    counts: bool = False,
) -> nnx.Param:
    """A bias, which begins at zero; the arguments are as in `ParamSpec`."""
    return declare(rngs, ParamSpec(shape, axes, "bias", hf=hf, counts=counts), constant(0.0))


def matrix(
    shape: tuple[int, ...], axes: tuple[str | None, ...], hf: str, **more: object
) -> ParamSpec:
    """The declaration of a matrix; the arguments are as in `ParamSpec`, with one name in `hf`."""
    return ParamSpec(shape, axes, "matrix", hf=(hf,), **more)


def table(rows: int, width: int, axis: str | None, of: str) -> ParamSpec:
    """The declaration of a table of embeddings."""
    return ParamSpec(
        shape=(rows, width),
        axes=(axis, "embed"),
        role="embedding",
        hf=(f"model.embed_{of}.weight",),
    )


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose every parameter holds those of that many independent layers, stacked."""

    def abstract() -> nnx.Module:
        return make(nnx.Rngs(params=0))

    def initial_values(key: jax.Array) -> dict:
        layer = make(nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    graph, state = nnx.split(nnx.eval_shape(abstract))
    keys = jax.random.split(rngs.params(), layers)
    values = jax.vmap(initial_values)(keys)
    specs = specs_of(state)
    specs = jax.tree.map(lambda spec: spec.stacked(layers), specs, is_leaf=is_spec)
    return nnx.merge(graph, state_from(values, specs))


def specs_of(state: nnx.State | nnx.Module) -> dict:
    """A nested dict of `ParamSpec`, one for each parameter."""
    if isinstance(state, nnx.Module):
        state = nnx.state(state, nnx.Param)
    flat = {}
    for path, param in nnx.to_flat_state(state):
        flat[path] = param.get_metadata("spec")
    return nnx.traversals.unflatten_mapping(flat)


def state_from(values: dict, specs: dict) -> nnx.State:
    """The NNX state that `nnx.merge` takes, from nested dicts of values and declarations.

    A value is an array or a `Weight` (`models/base/weight.py`).
    """

    def param(spec: ParamSpec, value) -> nnx.Param:
        return nnx.Param(value, spec=spec)

    params = jax.tree.map(param, specs, values, is_leaf=is_spec)
    return nnx.State(params)


# What the sum of a statistic is divided by: sequences of the global batch, or its tokens that count
# in the loss.
StatisticCount = Literal["sequences", "tokens"]


@dataclass(frozen=True)
class Definition:
    """A module without its parameters."""

    graph: nnx.GraphDef
    specs: dict

    @property
    def drops_out(self) -> bool:
        """Whether an adapter of it has dropout."""
        return any(spec.dropout for spec in jax.tree.leaves(self.specs, is_leaf=is_spec))

    def bind(
        self,
        params: dict,
        parallel: Parallel = LOCAL,
        places: TokenPlaces | None = None,
        slots: jax.Array | None = None,
    ) -> Any:
        """The NNX module with these parameters. Use it while tracing only.

        Entries of `params` that `specs` does not declare are left out. Adapters join the weights
        that they are beside. `parallel` is the mesh that both are cut over, `places` those of
        tokens if adapters drop out. `slots` int32 [B, S] or [B] are `Tokens.adapters`.
        """
        declared = {name: params[name] for name in self.specs}
        weights, specs = join_adapters(declared, self.specs, parallel, places)
        if slots is not None:
            weights = with_slots(weights, slots, parallel)
        return nnx.merge(self.graph, state_from(weights, specs))


@dataclass(frozen=True)
class ModelDefinition(Definition):
    """A model without its parameters, complete and in parts.

    edges: the model without its layers: embedding, final norm, head.
    blocks: one layer of each stack; their specs are those of the stack.
    statistics: the names of the statistics that its layers make, and what each is divided by.
    """

    edges: Definition
    blocks: dict[str, Definition]
    statistics: dict[str, StatisticCount]


def split(module: nnx.Module) -> tuple[Definition, dict]:
    """(the definition of a module, its parameters as a nested dict of arrays)."""
    graph, state = nnx.split(module)
    definition = Definition(graph, specs_of(state))
    return definition, nnx.to_pure_dict(state)


def with_specs(definition: ModelDefinition, specs: dict) -> ModelDefinition:
    """The definition with other declarations, which may add adapters beside parameters."""
    blocks = {}
    for name, block in definition.blocks.items():
        blocks[name] = replace(block, specs=specs[name])
    of_edges = {name: specs[name] for name in specs if name not in blocks}
    edges = replace(definition.edges, specs=of_edges)
    return replace(definition, specs=specs, edges=edges, blocks=blocks)


def define(
    model: nnx.Module, stacks: tuple[str, ...], statistics: dict[str, StatisticCount]
) -> ModelDefinition:
    """The definition of a model whose attributes `stacks` hold its layers; `model` loses them."""
    complete, _ = split(model)
    blocks = {}
    for name in stacks:
        blocks[name], _ = split(getattr(model, name))
        delattr(model, name)
    edges, _ = split(model)
    return ModelDefinition(complete.graph, complete.specs, edges, blocks, statistics)
