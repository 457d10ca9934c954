"""The norms of every parameter, its gradient and its update, by layer: a program of its own.

The program repeats the forward and backward pass and the update of a step, and keeps the norms
only. So the step's own program stays as it is, bit for bit. Invariant: the norms are equal on every
mesh, because each entry counts once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.models.runtime.stacks import stacked
from mjax.objectives.fields import Batch
from mjax.sharding.collectives import Parallel, mesh_axes
from mjax.sharding.spec import ParamSpec, is_spec, trained_only
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State, clip_factor, compute_gradients


class Norms(NamedTuple):
    """L2 norms, fp32 and whole on every device.

    They are trees like the parameters, [L] for stacks of L layers in the order of storage, else [].

    params: before the step. gradients: before clipping, of what is trained. updates: of what the
    step adds to what is trained. total: of all gradients together. tokens: the count of the loss.
    """

    params: dict
    gradients: dict
    updates: dict
    total: jax.Array
    tokens: jax.Array


def step_norms(
    program: Program, state: State, batch: Batch, lr: jax.Array, weight_decay: jax.Array
) -> Norms:
    """The norms of a step on local shards; the state stays."""
    placement, params = program.placement, state["params"]
    computed, _ = compute_gradients(program, state, batch)
    new, _ = program.optimizer.update(
        computed.gradients,
        state["opt"],
        params,
        lr=lr,
        weight_decay=weight_decay,
        scale=clip_factor(program, computed.norm),
    )

    gradients = stacked(computed.gradients, program.execution.accumulate)

    def change(after: jax.Array, before: jax.Array) -> jax.Array:
        return after.astype(jnp.float32) - before.astype(jnp.float32)

    specs = placement.specs
    updates = jax.tree.map(change, trained_only(new, specs), trained_only(params, specs))
    trained = trained_only(specs, specs)
    return Norms(
        _norms(params, placement.stored, specs, placement.parallel),
        _norms(gradients, placement.of_gradients, trained, placement.parallel),
        _norms(updates, placement.of_gradients, trained, placement.parallel),
        computed.norm,
        computed.tokens,
    )


def _norms(tree: dict, partitions: dict, specs: dict, parallel: Parallel) -> dict:
    def norm(spec: ParamSpec, partition: P, x: jax.Array) -> jax.Array:
        first = 1 if spec.is_stacked else 0
        within_layer = tuple(range(first, x.ndim))
        squares = jnp.square(x.astype(jnp.float32))
        local = jnp.sum(squares, axis=within_layer)
        total = parallel.psum(local, *mesh_axes(partition[first:]))
        norms = jnp.sqrt(total)
        if not spec.is_stacked:
            return norms
        over_layers = mesh_axes(partition[:1])
        return parallel.all_gather(norms, over_layers, 0)

    return jax.tree.map(norm, specs, partitions, tree, is_leaf=is_spec)


NORMS = ProgramKind(
    step_norms,
    inputs=lambda on: (on.state, on.batch, P(), P()),
    outputs=lambda on: P(),
)
