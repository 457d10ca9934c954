"""The training step: one function of local shards, run inside one `shard_map` over all five axes.

Read it top to bottom: load the weights from the masters, differentiate this device's share of the
losses over the micro-batches, store the gradients reduced (`models/runtime/store.py`), clip by the
global norm, update. The losses are those of the objective (`objectives/objective.py`) and the
statistics of the layers; the step knows none by name but "loss". Invariant: shares of a loss sum
over all devices to (its sum) / (its count) of the global batch. So the result does not depend on
the mesh, on the number of micro-batches, or on where the tokens that count lie. A loss or norm that
is not finite, a loss above a limit or over no token, or a buffer that says so, leaves the state as
it was.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.kernels.loss.log_probs import of_each_token, sequence_sums
from mjax.models.base.weight import add_gradients, with_sums
from mjax.models.runtime.buffers import (
    Buffer,
    Seen,
    global_counts,
    load_imbalance,
    move_biases,
    update_buffers,
)
from mjax.models.runtime.execution import Execution
from mjax.models.runtime.frozen import join_frozen, split_frozen
from mjax.models.runtime.stacks import stacked
from mjax.models.runtime.store import scatter_micro_batch, store_gradients, zero_sums
from mjax.objectives.fields import FURTHER_COLUMNS, Batch, Scalars
from mjax.objectives.local_model import LocalModel
from mjax.objectives.objective import Denominators, divisor, require_scalars
from mjax.optim.build import Optimizer
from mjax.pipeline.layout import Layout
from mjax.pipeline.run import pipeline_gradients, pipeline_losses
from mjax.sharding.collectives import AXES, DATA_AXES, Parallel, global_norm
from mjax.sharding.rules import Placement
from mjax.train.loss_scale import LossScaler
from mjax.train.program_kind import ProgramKind

# {"params": nested dict, "opt": nested dict, "step": int32 []}, and where a run has buffers
# "buffers": {name: tree} (models/runtime/buffers.py), in fp16 "loss_scale" (train/loss_scale.py)
State = dict


@dataclass(frozen=True)
class Program:
    """All that is static in a step.

    evaluation: how a forward pass without gradients runs.
    buffers: of the state, by name.
    expert_bias_rate: the step of experts' biases.
    loss_divisor: `train.loss_divisor`.
    layers, experts: of the model; the experts are those of a layer.
    layout: of the pipeline, or None.
    scaler: of the loss, in fp16.
    """

    model: LocalModel
    evaluation: Execution
    optimizer: Optimizer
    buffers: dict[str, Buffer]
    seed: int
    clip_grad_norm: float
    expert_bias_rate: float = 0.0
    loss_divisor: str | float = "tokens"
    layers: int = 0
    experts: int = 0
    layout: Layout | None = None
    scaler: LossScaler | None = None

    @property
    def placement(self) -> Placement:
        return self.model.placement

    @property
    def parallel(self) -> Parallel:
        return self.model.placement.parallel

    @property
    def execution(self) -> Execution:
        return self.model.execution


class Gate(NamedTuple):
    """Conditions for accepting a step with finite numbers.

    most_loss: f32 [], the largest loss that is accepted.
    is_open: bool [], False while an earlier rejected step awaits the host's verdict. The state is
        then left unchanged.
    """

    most_loss: jax.Array
    is_open: jax.Array


class Gradients(NamedTuple):
    """The losses of a batch and its gradients.

    losses: of the global batch, by name; their sum is differentiated.
    norm: the global L2 norm of the gradients. tokens: the objective's count of the loss.
    gradients: local shards of the reduced gradients, a tree like the trained parameters; within a
        step lists of layers may take the place of stacks (`store_gradients`).
    """

    losses: Scalars
    norm: jax.Array
    tokens: jax.Array
    gradients: dict


def train_step(
    program: Program,
    state: State,
    batch: Batch,
    lr: jax.Array,
    weight_decay: jax.Array,
    gate: Gate,
) -> tuple[State, dict[str, jax.Array]]:
    """Returns (new state, metrics) of local shards; a step that is not accepted changes no state.

    The metrics are the losses by name and {grad_norm, tokens, finite, accepted}. Experts with a
    bias add `load_imbalance`; fp16 adds the figures of `_with_next_scale`.
    """
    computed, seen = compute_gradients(program, state, batch)
    with jax.named_scope("optimizer"):
        scale = clip_factor(program, computed.norm)
        finite = are_finite(*computed.losses.values(), computed.norm)
        apart = "params", "opt", "loss_scale"
        rest = {name: part for name, part in state.items() if name not in apart}
        new = {"step": state["step"] + 1}
        if "buffers" in state:
            new["buffers"], counts = update_buffers(
                program.buffers, state["buffers"], seen, program.parallel
            )
            finite &= counts
        accepted = finite & (computed.losses["loss"] <= gate.most_loss) & gate.is_open
        accepted &= computed.tokens > 0  # or weight decay alone would move the weights
        new = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, rest)
        new["params"], new["opt"] = program.optimizer.update(
            computed.gradients,
            state["opt"],
            state["params"],
            lr=lr,
            weight_decay=weight_decay,
            scale=scale,
            keep=accepted,
        )
        rate = jnp.where(accepted, program.expert_bias_rate, 0)
        new["params"] = move_biases(new["params"], seen.counts, rate)
    metrics = {"grad_norm": computed.norm, "tokens": computed.tokens}
    metrics |= {"finite": finite, "accepted": accepted}
    if seen.counts:
        metrics["load_imbalance"] = load_imbalance(seen.counts, program.parallel)
    if program.scaler is not None:
        sequences = len(batch["rows"]) * program.parallel.size(*DATA_AXES)
        added = _with_next_scale(program.scaler, state, computed, metrics, gate, sequences)
        new, metrics = new | added[0], metrics | added[1]
    return new, computed.losses | metrics


def _with_next_scale(
    scaler: LossScaler,
    state: State,
    computed: Gradients,
    metrics: dict[str, jax.Array],
    gate: Gate,
    sequences: int,
) -> tuple[State, dict[str, jax.Array]]:
    """(the parts of the state that loss scaling moves, {loss_scale, skipped_samples, skipped}).

    A step is `skipped` if the scale alone was too large: its losses are finite, its gradients are
    not, and the scale can shrink. It is counted, though not accepted. `loss_scale` and
    `skipped_samples` are those that the step began with.
    """
    old, step = state["loss_scale"], state["step"]
    overflowed = ~jnp.isfinite(computed.norm) & gate.is_open
    skipped = overflowed & are_finite(*computed.losses.values()) & scaler.can_shrink(old)
    new = scaler.update(old, overflowed)
    new = jax.tree.map(lambda a, b: jnp.where(metrics["accepted"] | overflowed, a, b), new, old)
    new["skipped_samples"] = old["skipped_samples"] + jnp.where(skipped, sequences, 0)
    is_counted = metrics["accepted"] | skipped
    figures = {"loss_scale": old["scale"], "skipped_samples": old["skipped_samples"]}
    figures["skipped"] = skipped
    return {"loss_scale": new, "step": step + is_counted}, figures


class MeanGradient(NamedTuple):
    """The gradient of a loss: a mean over `count`, of tokens say. gradients: as of `Gradients`."""

    gradients: dict
    count: jax.Array


@jax.jit
def joint_mean(a: MeanGradient, b: MeanGradient) -> MeanGradient:
    """The mean over both counts."""
    count = a.count + b.count
    share = b.count / divisor(count)

    def mean(x: jax.Array, y: jax.Array) -> jax.Array:
        step = share * (y.astype(jnp.float32) - x)
        return (x + step).astype(x.dtype)

    gradients = jax.tree.map(mean, a.gradients, b.gradients)
    return MeanGradient(gradients, count)


def apply_gradients(
    program: Program,
    state: State,
    gradients: dict,
    lr: jax.Array,
    weight_decay: jax.Array,
) -> tuple[State, jax.Array]:
    """(new state, gradient norm) of local shards: the last part of a step, for gradients by hand.

    The state has no buffers and no loss scale. It stays if the norm is not finite.
    """
    norm = global_norm(gradients, program.placement.of_gradients, program.parallel)
    accepted = are_finite(norm)
    params, moments = program.optimizer.update(
        gradients,
        state["opt"],
        state["params"],
        lr=lr,
        weight_decay=weight_decay,
        scale=clip_factor(program, norm),
        keep=accepted,
    )
    return {"params": params, "opt": moments, "step": state["step"] + accepted}, norm


def clip_factor(program: Program, norm: jax.Array) -> jax.Array | float:
    """The factor on gradients of this norm that clips them."""
    clip = program.clip_grad_norm
    return jnp.minimum(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


def are_finite(*values: jax.Array) -> jax.Array:
    """Whether all of these numbers are finite."""
    return functools.reduce(jnp.logical_and, map(jnp.isfinite, values))


def gradients(program: Program, state: State, batch: Batch) -> Gradients:
    """Losses, gradients and their norm for a batch. `state` may lack the moments."""
    found = compute_gradients(program, state, batch)[0]
    return found._replace(gradients=stacked(found.gradients, program.execution.accumulate))


def compute_gradients(program: Program, state: State, batch: Batch) -> tuple[Gradients, Seen]:
    """(`gradients`, what buffers are updated from)."""
    model, placement, execution = program.model, program.placement, program.execution
    parallel = program.parallel
    batch = model.with_derived_fields(batch)
    denominators = global_denominators(model, batch)
    if program.scaler is not None:
        denominators = replace(denominators, loss_scale=state["loss_scale"]["scale"])
    tokens = denominators.counts["loss"]
    batch, denominators = with_divisor(program, batch, denominators)
    # One key for all micro-batches and devices: dropout adds the token's place in the global batch.
    key = jax.random.fold_in(jax.random.key(program.seed), state["step"])
    whole = model.fields_of_all_rows(batch)
    micro_batches = split_batch(batch, execution.micro_batches, whole)
    weights = model.load(state["params"], state.get("buffers", {}), tokens)
    trained, frozen = split_frozen(weights, placement)

    def share(trained: dict, micro_batch: Batch) -> tuple[jax.Array, Scalars]:
        weights = join_frozen(trained, frozen)
        losses, statistics = model.losses(weights, micro_batch | whole, key)
        shares = denominators.shares(losses, statistics)
        return denominators.differentiated(shares), shares

    # The bits of 8-bit weights are integers; their cotangents are not read.
    differentiate = jax.value_and_grad(share, has_aux=True, allow_int=True)

    def accumulate(carry: tuple[Scalars, dict], micro_batch: Batch) -> tuple[tuple, None]:
        """One micro-batch. A matmul that is given its running sum returns the next one."""
        losses, sums = carry
        (_, added), cotangents = differentiate(with_sums(trained, sums), micro_batch)
        cotangents = scatter_micro_batch(cotangents, placement, execution)
        with jax.named_scope("accumulate"):
            losses = jax.tree.map(jnp.add, losses, added)
            return (losses, add_gradients(sums, cotangents)), None

    if program.layout is not None:
        losses, cotangents = pipeline_gradients(
            model, program.layout, weights, micro_batches, whole, key, denominators
        )
    elif execution.micro_batches == 1:
        only = jax.tree.map(lambda field: field[0], micro_batches)
        (_, losses), cotangents = differentiate(trained, only)
    else:
        start = denominators.zeros(), zero_sums(trained, placement, execution)
        (losses, cotangents), _ = jax.lax.scan(accumulate, start, micro_batches)
    counts = global_counts(cotangents, placement)
    reduced, maxima = store_gradients(cotangents, placement, execution)
    reduced = denominators.unscaled(reduced)
    with jax.named_scope("reduce"):
        norm = global_norm(reduced, placement.of_gradients, parallel)
    losses = {name: parallel.psum(loss, *AXES) for name, loss in losses.items()}
    return Gradients(losses, norm, tokens, reduced), Seen(maxima, losses, counts)


def batch_losses(program: Program, state: State, batch: Batch) -> tuple[Scalars, Scalars]:
    """(sums, counts) of the objective's losses in the global batch, without dropout."""
    model, parallel = program.model.for_evaluation(program.evaluation), program.parallel
    totals, _, denominators = evaluation_sums(program, model, state, batch, {})
    sums = {name: parallel.psum(total / parallel.tp, *AXES) for name, total in totals.items()}
    return sums, denominators.counts


def evaluation_sums(
    program: Program, model: LocalModel, state: State, batch: Batch, nothing: Scalars
) -> tuple[Scalars, Scalars, Denominators]:
    """(sums of the losses, sums of the statistics, what to divide by) of the local batch.

    `model` is one for evaluation; `nothing` are zeros of the statistics that its layers give.
    """
    batch = model.with_derived_fields(batch)
    weights = model.load(state["params"], state.get("buffers", {}))
    whole = model.fields_of_all_rows(batch)
    micro_batches = split_batch(batch, program.evaluation.micro_batches, whole)
    denominators = global_denominators(model, batch)
    zeros = denominators.zeros(), nothing

    def add(totals: tuple, micro_batch: Batch) -> tuple[tuple, None]:
        losses = model.losses(weights, micro_batch | whole, None)
        return jax.tree.map(jnp.add, totals, losses), None

    if program.layout is not None:
        sums = pipeline_losses(model, program.layout, weights, micro_batches, whole, *zeros)
    else:
        sums, _ = jax.lax.scan(add, zeros, micro_batches)
    return *sums, denominators


def global_denominators(model: LocalModel, batch: Batch) -> Denominators:
    """The counts of the global batch by which a step's losses and statistics are divided."""
    parallel = model.placement.parallel
    counts = model.objective.counts(batch)
    require_scalars(model.objective, "counts", counts, "loss")
    counts = {name: parallel.psum(count, "dp", "ep", "cp") for name, count in counts.items()}
    sequences = len(batch["rows"]) * parallel.size(*DATA_AXES)
    of_statistics = {}
    for name, kind in model.definition.statistics.items():
        assert name not in counts, f"a loss and a statistic are both called {name}"
        of_statistics[name] = sequences if kind == "sequences" else divisor(counts["loss"])
    return Denominators(counts, of_statistics, parallel.tp)


def with_divisor(
    program: Program, batch: Batch, denominators: Denominators
) -> tuple[Batch, Denominators]:
    """The batch and the divisors of training where `train.loss_divisor` is not "tokens".

    By sequence, the loss mask of a document (of a row that is not packed) sums to 1 over the global
    batch, so its sum counts documents. Only the divisor of "loss" is a constant.
    """
    model, divides = program.model, program.loss_divisor
    if divides == "tokens":
        return batch, denominators
    if divides != "sequences":
        counts = denominators.counts | {"loss": jnp.float32(divides)}
        return batch, replace(denominators, counts=counts)
    mask = batch["loss_mask"].astype(jnp.float32)
    segments = batch["segment_ids"] if model.packed else None
    sums = divisor(sequence_sums(mask, segments, parallel=program.parallel))
    weights = mask / of_each_token(sums, segments, mask.shape[1])
    batch = batch | {"loss_mask": weights}
    counts = global_denominators(model, batch).counts
    return batch, replace(denominators, counts=counts)


def split_batch(batch: Batch, micro_batches: int, whole: Collection[str] = ()) -> Batch:
    """Local rows [b, ...] -> [micro_batches, b / micro_batches, ...]; columns repeat.

    Fields named in `whole` are left out.
    """

    columns = {"columns", *FURTHER_COLUMNS.values()}

    def split(name: str, field: jax.Array) -> jax.Array:
        if name in columns:
            shape = micro_batches, *field.shape
            return jnp.broadcast_to(field, shape)
        return field.reshape(micro_batches, -1, *field.shape[1:])

    return {name: split(name, field) for name, field in batch.items() if name not in whole}


# ---- the programs of this file ------------------------------------------------------------------

TRAIN = ProgramKind(
    train_step,
    inputs=lambda on: (on.state, on.batch, P(), P(), P()),
    outputs=lambda on: (on.state, P()),
    donated=(0,),
)
APPLY = ProgramKind(
    apply_gradients,
    inputs=lambda on: (on.state, on.gradients, P(), P()),
    outputs=lambda on: (on.state, P()),
    donated=(0,),
)
GRADIENTS = ProgramKind(
    gradients,
    outputs=lambda on: Gradients(P(), P(), P(), on.gradients),
)
LOSSES = ProgramKind(
    batch_losses,
    outputs=lambda on: P(),
)
