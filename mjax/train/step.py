"""The training step: one function of local shards, run inside one `shard_map` over all five axes.

Read it top to bottom: load the weights from the masters, differentiate this device's share of the
loss over the micro-batches, store the gradients reduced (`models/layers.py`), clip by the global
norm, update. Invariant: shares of the loss sum over all devices to (sum of masked nll) / (number of
unmasked tokens) + (sum of auxiliary losses) / (number of sequences) of the global batch. So the
result does not depend on the mesh, on the number of micro-batches, or on where the masked tokens
lie. A loss, norm or maximum of FP8 that is not finite leaves the state as it was.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.quantize import remember, step_scales, weight_amax
from mjax.models.execution import Execution
from mjax.models.layers import (
    load_weights,
    matmul_leaves,
    scatter_micro_batch,
    store_gradients,
    zero_sums,
)
from mjax.models.local import Batch, LocalModel
from mjax.models.weight import add_gradients, with_sums
from mjax.optim.build import Optimizer
from mjax.pipeline.layout import Layout
from mjax.pipeline.run import pipeline_gradients, pipeline_nll
from mjax.sharding.collectives import AXES, DATA_AXES, Parallel, global_norm
from mjax.sharding.rules import Placement

# {"params": nested dict, "opt": nested dict, "step": int32 scalar} and with delayed scaling "fp8":
# {stack: {matmul: maxima [L, 2, H] of the last steps}} (kernels/quantize.py)
State = dict

Losses = dict[str, jax.Array]  # loss, aux_loss


@dataclass(frozen=True)
class Program:
    """All that is static in a step.

    evaluation: how a forward pass without gradients runs.
    layout: of the pipeline, or None.
    """

    model: LocalModel
    evaluation: Execution
    optimizer: Optimizer
    seed: int
    clip_grad_norm: float
    layout: Layout | None = None

    @property
    def placement(self) -> Placement:
        return self.model.placement

    @property
    def parallel(self) -> Parallel:
        return self.model.placement.parallel

    @property
    def execution(self) -> Execution:
        return self.model.execution


class Gradients(NamedTuple):
    """The loss of a batch and its gradients.

    losses: {loss: nll per token, aux_loss: the term that is added to it before differentiation}.
    norm: the global L2 norm of the gradients. tokens: unmasked tokens of the global batch.
    gradients: local shards of the reduced gradients, a tree like the parameters.
    maxima: the largest magnitudes in FP8's matmuls on this device, for delayed scaling.
    """

    losses: Losses
    norm: jax.Array
    tokens: jax.Array
    gradients: dict
    maxima: dict


def train_step(
    program: Program, state: State, batch: Batch, lr: jax.Array, weight_decay: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """(new state, {loss, aux_loss, grad_norm, tokens, finite}) of local shards."""
    computed = gradients(program, state, batch)
    with jax.named_scope("optimizer"):
        clip = program.clip_grad_norm
        scale = jnp.minimum(1.0, clip / (computed.norm + 1e-6)) if clip > 0 else 1.0
        finite = jnp.isfinite(computed.losses["loss"]) & jnp.isfinite(computed.norm)
        rest = {name: part for name, part in state.items() if name not in ("params", "opt")}
        new = {"step": state["step"] + 1}
        if "fp8" in state:
            new["fp8"], all_finite = remember(state["fp8"], computed.maxima, program.parallel)
            finite &= all_finite
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, rest)
        new["params"], new["opt"] = program.optimizer.update(
            computed.gradients,
            state["opt"],
            state["params"],
            lr=lr,
            weight_decay=weight_decay,
            scale=scale,
            keep=finite,
        )
    metrics = {"grad_norm": computed.norm, "tokens": computed.tokens, "finite": finite}
    return new, computed.losses | metrics


def gradients(program: Program, state: State, batch: Batch) -> Gradients:
    """Loss, gradients and their norm for a batch. `state` may lack the moments."""
    model, placement, execution = program.model, program.placement, program.execution
    parallel = program.parallel
    tokens = token_count(batch, parallel)
    sequences = len(batch["tokens"]) * parallel.size(*DATA_AXES)
    # One key for all micro-batches and devices: dropout adds the token's place in the global batch.
    key = jax.random.fold_in(jax.random.key(program.seed), state["step"])
    micro_batches = split_batch(batch, execution.micro_batches)
    weights = load_weights(
        state["params"], fp8_scales(program, state, tokens), placement, execution
    )

    def share(weights: dict, micro_batch: Batch) -> tuple[jax.Array, Losses]:
        nll, aux = model.loss(weights, micro_batch, key)  # the latter is a share already
        nll = nll / jnp.maximum(tokens, 1) / parallel.tp  # it is computed on each tp device
        aux = aux / sequences
        return nll + aux, {"loss": nll, "aux_loss": aux}

    # The bits of 8-bit weights are integers; their cotangents are not read.
    differentiate = jax.value_and_grad(share, has_aux=True, allow_int=True)

    def accumulate(carry: tuple[Losses, dict], micro_batch: Batch) -> tuple[tuple, None]:
        """One micro-batch. A matmul that is given its running sum returns the next one."""
        losses, sums = carry
        (_, added), cotangents = differentiate(with_sums(weights, sums), micro_batch)
        cotangents = scatter_micro_batch(cotangents, placement, execution)
        with jax.named_scope("accumulate"):
            losses = jax.tree.map(jnp.add, losses, added)
            return (losses, add_gradients(sums, cotangents)), None

    if program.layout is not None:
        losses, cotangents = pipeline_gradients(
            model, program.layout, weights, micro_batches, key, tokens, sequences
        )
    elif execution.micro_batches == 1:
        only = jax.tree.map(lambda field: field[0], micro_batches)
        (_, losses), cotangents = differentiate(weights, only)
    else:
        start = {"loss": jnp.float32(0), "aux_loss": jnp.float32(0)}
        start = start, zero_sums(weights, placement, execution)
        (losses, cotangents), _ = jax.lax.scan(accumulate, start, micro_batches)
    reduced, maxima = store_gradients(cotangents, placement, execution)
    with jax.named_scope("reduce"):
        norm = global_norm(reduced, placement.stored, parallel)
    losses = {name: parallel.psum(loss, *AXES) for name, loss in losses.items()}
    return Gradients(losses, norm, tokens, reduced, maxima if "fp8" in state else {})


def batch_nll(program: Program, state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(sum of masked nll, unmasked tokens) of the global batch, without dropout."""
    model = program.model.for_evaluation(program.evaluation)
    placement, execution, parallel = program.placement, program.evaluation, program.parallel
    weights = load_weights(state["params"], fp8_scales(program, state), placement, execution)
    micro_batches = split_batch(batch, execution.micro_batches)

    def add(total: jax.Array, micro_batch: Batch) -> tuple[jax.Array, None]:
        return total + model.loss(weights, micro_batch, None)[0], None

    if program.layout is not None:
        total = pipeline_nll(model, program.layout, weights, micro_batches)
    else:
        total, _ = jax.lax.scan(add, jnp.float32(0), micro_batches)
    return parallel.psum(total / parallel.tp, *AXES), token_count(batch, parallel)


def fp8_scales(program: Program, state: State, tokens: jax.Array | int = 1) -> dict:
    """The scales of a step, {stack: {matmul: [L, 3]}}; empty without FP8."""
    execution = program.execution
    if execution.recipe is None:
        return {}
    masters = matmul_leaves(state["params"], program.placement.specs)
    amax = weight_amax(masters, execution.compute, program.parallel)
    return step_scales(amax, state.get("fp8", {}), tokens)


def token_count(batch: Batch, parallel: Parallel) -> jax.Array:
    """Unmasked tokens of the global batch, fp32: the one denominator of the loss."""
    return parallel.psum(jnp.sum(batch["loss_mask"].astype(jnp.float32)), "dp", "ep", "cp")


def split_batch(batch: Batch, micro_batches: int) -> Batch:
    """Local rows [b, ...] -> [micro_batches, b / micro_batches, ...]; columns repeat."""

    def split(name: str, field: jax.Array) -> jax.Array:
        if name == "columns":
            return jnp.broadcast_to(field, (micro_batches, *field.shape))
        return field.reshape(micro_batches, -1, *field.shape[1:])

    return {name: split(name, field) for name, field in batch.items()}
