"""How a Flax module declares its parameters, and how it is taken apart and put together.

NNX modules declare parameters and compose the model. The step works on plain pytrees: a module is
split once into a `Definition` and a nested dict of arrays, and bound again while tracing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.sharding.spec import ParamSpec, is_spec

Init = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def normal(std: float) -> Init:
    """Draws from a normal distribution with mean 0."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def constant(value: float) -> Init:
    """Fills with one value."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def declare(rngs: nnx.Rngs, spec: ParamSpec, init: Init) -> nnx.Param:
    """An fp32 parameter that carries its declaration as metadata `spec`."""
    return nnx.Param(init(rngs.params(), spec.shape, jnp.float32), spec=spec)


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose every parameter holds those of that many independent layers, stacked."""

    def values(key: jax.Array) -> dict:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), nnx.Param))

    definition, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    stacked = jax.vmap(values)(jax.random.split(rngs.params(), layers))
    specs = jax.tree.map(lambda spec: spec.stacked(layers), specs_of(state), is_leaf=is_spec)
    return nnx.merge(definition, state_from(stacked, specs))


def specs_of(state: nnx.State | nnx.Module) -> dict:
    """A nested dict of `ParamSpec`, one per parameter."""
    state = nnx.state(state, nnx.Param) if isinstance(state, nnx.Module) else state
    flat = {path: param.get_metadata("spec") for path, param in nnx.to_flat_state(state)}
    return nnx.traversals.unflatten_mapping(flat)


def state_from(values: dict, specs: dict) -> nnx.State:
    """The NNX state that `nnx.merge` takes, from nested dicts of values and declarations.

    A value is an array or a `Weight` (`models/weight.py`).
    """
    params = jax.tree.map(
        lambda spec, value: nnx.Param(value, spec=spec), specs, values, is_leaf=is_spec
    )
    return nnx.State(params)


@dataclass(frozen=True)
class Definition:
    """A module without its parameters."""

    graph: nnx.GraphDef
    specs: dict

    def bind(self, params: dict) -> nnx.Module:
        """The module with these parameters. Use it while tracing only.

        Entries of `params` that the module does not declare are left out.
        """
        own = {name: params[name] for name in self.specs}
        return nnx.merge(self.graph, state_from(own, self.specs))


@dataclass(frozen=True)
class ModelDefinition(Definition):
    """A model without its parameters, whole and in parts.

    edges: the model without its layers: embedding, final norm, head.
    blocks: one layer of each stack; their specs are those of the stack.
    """

    edges: Definition
    blocks: dict[str, Definition]


def split(module: nnx.Module) -> tuple[Definition, dict]:
    """(definition, nested dict of arrays) of a module."""
    graph, state = nnx.split(module)
    return Definition(graph, specs_of(state)), nnx.to_pure_dict(state)


def define(model: nnx.Module, stacks: tuple[str, ...]) -> ModelDefinition:
    """The definition of a model whose attributes `stacks` hold its layers; `model` loses them."""
    whole = split(model)[0]
    blocks = {name: split(getattr(model, name))[0] for name in stacks}
    for name in stacks:
        delattr(model, name)
    return ModelDefinition(whole.graph, whole.specs, split(model)[0], blocks)
