"""The declaration of a parameter: everything the rest of mjax needs to know about it.

A module declares each weight once, with `declare`: global shape, logical axis names, initialiser,
role. Sharding (`sharding/rules.py`) reads the axes, the optimiser reads the role and the matrix
view, checkpoints and Hugging Face conversion read the name. Nothing is ever inferred from a
parameter's rank, because stacking layers changes ranks (DESIGN section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.sharding.spec import ParamSpec, is_spec

Init = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def normal(std: float) -> Init:
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def constant(value: float) -> Init:
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def declare(rngs: nnx.Rngs, spec: ParamSpec, init: Init) -> nnx.Param:
    """An fp32 parameter that carries its declaration as metadata `spec`."""
    return nnx.Param(init(rngs.params(), spec.shape, jnp.float32), spec=spec)


def stack(make: Callable[[nnx.Rngs], nnx.Module], n: int, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose every parameter holds those of `n` independent layers, stacked."""

    def values(key):
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), nnx.Param))

    definition, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    stacked = jax.vmap(values)(jax.random.split(rngs.params(), n))
    specs = jax.tree.map(lambda spec: spec.stacked(n), specs_of(state), is_leaf=is_spec)
    return nnx.merge(definition, state_from(stacked, specs))


def specs_of(state: nnx.State | nnx.Module) -> dict:
    """Nested dict of `ParamSpec`, one per parameter."""
    state = nnx.state(state, nnx.Param) if isinstance(state, nnx.Module) else state
    flat = {path: var.get_metadata("spec") for path, var in nnx.to_flat_state(state)}
    return nnx.traversals.unflatten_mapping(flat)


def state_from(values: dict, specs: dict) -> nnx.State:
    """Nested dicts of values and declarations -> the NNX state that `nnx.merge` takes."""
    flat = jax.tree.map(lambda s, v: nnx.Param(v, spec=s), specs, values, is_leaf=is_spec)
    return nnx.State(flat)


@dataclass(frozen=True)
class Definition:
    """A model without its weights. `bind` gives the module back; use it while tracing only."""

    graph: nnx.GraphDef
    specs: dict

    def bind(self, params: dict) -> nnx.Module:
        return nnx.merge(self.graph, state_from(params, self.specs))


def split(model: nnx.Module) -> tuple[Definition, dict]:
    """Module -> (definition, nested dict of arrays)."""
    graph, state = nnx.split(model)
    return Definition(graph, specs_of(state)), nnx.to_pure_dict(state)
