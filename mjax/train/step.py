"""The training step: one function of local shards, run inside one `shard_map` over all five axes.

Read it top to bottom: cast the fp32 masters once, accumulate the gradients of this device's share
of the loss over micro-batches, reduce them by the one rule (`sharding/collectives.py`), clip by
the global norm, update. Invariant: shares of the loss sum over all devices to (sum of masked nll)
/ (number of unmasked tokens) + (sum of auxiliary losses) / (number of sequences) of the global
batch, so the result does not depend on the mesh, on the number of micro-batches, or on where the
masked tokens lie. A non-finite loss or norm leaves the state as it was.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from mjax.config.schema import Config
from mjax.kernels.quantize import Fp8, join, remember, scales_of, weight_amax
from mjax.models.context import Context, Tokens
from mjax.models.linear import weights_of
from mjax.models.params import Definition
from mjax.models.pattern import STACKS
from mjax.pipeline.layout import Layout
from mjax.pipeline.run import pipeline_gradients, pipeline_nll
from mjax.sharding.collectives import (
    AXES,
    BATCH_AXES,
    Parallel,
    gather_weights,
    global_norm,
    reduce_gradients,
    scatter_gradients,
)

# {"params": nested dict, "opt": nested dict, "step": int32 scalar} and with delayed scaling "fp8":
# {stack: {name: maxima [L, 2, H] of the last steps}} (kernels/quantize.py)
State = dict
Batch = dict  # tokens, labels, loss_mask, segment_ids, positions [B, S]; rows [B]; columns [S]


@dataclass(frozen=True)
class Program:
    """All that is static in a step."""

    cfg: Config
    definition: Definition
    partitions: dict  # of weights in the forward and backward pass
    stored: dict  # of masters, moments and reduced gradients (ZeRO cuts them further)
    optimizer: optax.GradientTransformationExtraArgs
    parallel: Parallel
    max_documents: int = 0
    layout: Layout | None = None  # of the pipeline
    overlap_rows: int | None = None  # tokens in a tp shard that is exchanged piecewise
    unroll: int = 1  # layer groups in an iteration of a layer loop; 0: all
    one_schedule: bool = True  # every device starts collectives in program order (GPUs do)

    def context(self, train: bool, scales: dict | None = None) -> Context:
        """`scales`: of FP8, where blocks do not get theirs from the pipeline."""
        cfg, precision = self.cfg, self.cfg.precision
        fp8 = Fp8(precision.fp8 == "delayed", precision.fp8_skip_layers, scales or {})
        return Context(
            parallel=self.parallel,
            attention=cfg.train.attention,
            cp_type=cfg.mesh.cp_type,
            cp_a2a=cfg.mesh.cp_a2a,
            permute=self.layout is None or self.layout.uniform,
            max_documents=self.max_documents,
            overlap_rows=self.overlap_rows,
            remat=cfg.train.remat if train else "none",
            unroll=self.unroll if train else 1,
            dropout=train,
            label_smoothing=cfg.train.label_smoothing if train else 0.0,
            z_loss=cfg.train.z_loss if train else 0.0,
            fp8=None if precision.fp8 == "none" else fp8,
            gather=self.gather_layer if self.layerwise else None,
        )

    def tokens(self, micro: Batch, key: jax.Array | None) -> Tokens:
        """Facts about the tokens of a micro-batch; `key` is that of dropout."""
        packed = self.cfg.data.document_mask and self.max_documents != 1
        return Tokens(
            positions=micro["positions"],
            segments=micro["segment_ids"] if packed else None,
            rows=micro["rows"],
            columns=micro["columns"],
            key=key,
        )

    @property
    def layerwise(self) -> bool:
        """ZeRO-3: the scanned stacks are made whole layer by layer, inside the scan."""
        return self.cfg.mesh.zero == 3 and self.stored != self.partitions

    @property
    def working(self) -> dict:
        """Partitions of the weights that enter the model, of which gradients are taken."""
        if not self.layerwise:
            return self.partitions
        stacks = {name: self.stored[name] for name in STACKS if name in self.stored}
        return {**self.partitions, **stacks}

    @jax.named_scope("gather")
    def gather_layer(self, stack: str, weights: dict) -> dict:
        """Layers of `stack` as stored [n, ...] -> whole along the ZeRO axes."""
        have, want, specs = self.stored[stack], self.partitions[stack], self.definition.specs[stack]
        return gather_weights(weights, have, want, specs, self.parallel)

    @jax.named_scope("reduce")
    def scatter(self, grads: dict) -> dict:
        """Gradients of the working weights -> the stored layout, summed over what that cuts."""
        return scatter_gradients(grads, self.working, self.stored, self.parallel)

    def scales(self, state: State, tokens: jax.Array | int = 1) -> dict:
        """Of this step, {stack: {name: [L, 3]}}; empty without FP8."""
        precision = self.cfg.precision
        if precision.fp8 == "none":
            return {}
        dense = weights_of(state["params"], self.definition.specs)
        amax = weight_amax(dense, precision.compute, self.parallel)
        return scales_of(amax, state.get("fp8", {}), tokens)

    @jax.named_scope("gather")
    def weights(self, params: dict) -> dict:
        """fp32 masters as stored -> the weights that enter the model."""
        low = cast(params, self.cfg.precision.compute)
        specs = self.definition.specs  # of stacks: in all but the order and number of layers
        return gather_weights(low, self.stored, self.working, specs, self.parallel)


def train_step(
    program: Program, state: State, batch: Batch, lr: jax.Array, weight_decay: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """Local shards of state and batch -> new state, {loss, aux_loss, grad_norm, tokens, finite}."""
    params, opt = state["params"], state["opt"]
    losses, norm, tokens, grads, seen = gradients(program, state, batch)
    with jax.named_scope("optimizer"):
        clip = program.cfg.optimizer.clip_grad_norm
        if clip > 0:
            scale = jnp.minimum(1.0, clip / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, new_opt = program.optimizer.update(
            grads, opt, params, lr=lr, weight_decay=weight_decay
        )
        new_params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(norm)
        new = {"params": new_params, "opt": new_opt, "step": state["step"] + 1}
        if "fp8" in state:
            new["fp8"], all_finite = remember(state["fp8"], seen, program.parallel)
            finite &= all_finite
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return new, {**losses, "grad_norm": norm, "tokens": tokens, "finite": finite}


def gradients(
    program: Program, state: State, batch: Batch
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array, dict, dict]:
    """({loss: nll per token, aux_loss: added to it in what is differentiated}, gradient norm,
    unmasked tokens, local shards of the reduced gradients, maxima for delayed scaling that this
    device saw). `state` may lack the moments."""
    cfg, par = program.cfg, program.parallel
    count, sequences = token_count(batch, par), len(batch["tokens"]) * par.size(*BATCH_AXES)
    micro_batches, n = split_batch(batch, cfg.train.micro_batch_size)
    key = jax.random.fold_in(jax.random.key(cfg.run.seed), state["step"])
    accum = jnp.dtype(cfg.precision.grad_accum)
    weights, scales = program.weights(state["params"]), program.scales(state, count)
    early = cfg.mesh.zero == 2  # accumulate in the stored layout

    def share(weights, scales, micro):
        nll, aux = loss_sums(program, weights, scales, micro, key, train=True)
        nll = nll / jnp.maximum(count, 1) / par.tp  # it is computed on each tp device
        aux = aux / sequences
        return nll + aux, {"loss": nll, "aux_loss": aux}

    value_and_grad = jax.value_and_grad(share, (0, 1), has_aux=True)

    def body(carry, micro):
        (_, losses), (grads, seen) = value_and_grad(weights, scales, micro)
        if early:
            grads = program.scatter(cast(grads, accum))
        with jax.named_scope("accumulate"):
            sums = jax.tree.map(lambda c, x: c + x.astype(c.dtype), carry[:2], (losses, grads))
        return (*sums, join(carry[2], seen)), None

    if program.layout is not None:
        losses, grads, seen = pipeline_gradients(
            program, weights, scales, micro_batches, key, count, sequences
        )
    elif n == 1:
        one = jax.tree.map(lambda a: a[0], micro_batches)
        (_, losses), (grads, seen) = value_and_grad(weights, scales, one)
        grads = cast(grads, accum)
    else:
        shapes = state["params"] if early else weights
        none = {"loss": jnp.float32(0), "aux_loss": jnp.float32(0)}
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), shapes)
        zero = none, zeros, jax.tree.map(jnp.zeros_like, scales)
        (losses, grads, seen), _ = jax.lax.scan(body, zero, micro_batches)
    if program.layout is not None or n == 1 or not early:
        grads = program.scatter(grads)
    with jax.named_scope("reduce"):
        grads = reduce_gradients(grads, program.stored, par)
        norm = global_norm(grads, program.stored, par)
    losses = {name: par.psum(x, *AXES) for name, x in losses.items()}
    return losses, norm, count, grads, seen if "fp8" in state else {}


def evaluate(program: Program, state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(sum of masked nll, unmasked tokens) of the global batch, no dropout."""
    par, cfg = program.parallel, program.cfg
    weights, scales = program.weights(state["params"]), program.scales(state)
    micro_batches, _ = split_batch(batch, cfg.train.micro_batch_size)

    def body(total, micro):
        return total + loss_sums(program, weights, scales, micro, None, train=False)[0], None

    if program.layout is not None:
        total = pipeline_nll(program, weights, scales, micro_batches)
    else:
        total, _ = jax.lax.scan(body, jnp.float32(0), micro_batches)
    return par.psum(total / par.tp, *AXES), token_count(batch, par)


def loss_sums(
    program: Program, weights: dict, scales: dict, micro: Batch, key: jax.Array | None, train: bool
) -> tuple[jax.Array, jax.Array]:
    """(sum of masked nll over this device's part of a micro-batch, equal on all tp devices; its
    share of the sum of auxiliary losses)."""
    model = program.definition.bind(weights)
    info, chunk = program.tokens(micro, key), program.cfg.train.loss_chunk
    return model.loss(micro, info, program.context(train, scales), chunk)


def token_count(batch: Batch, par: Parallel) -> jax.Array:
    """Unmasked tokens of the global batch, fp32: the one denominator of the loss."""
    return par.psum(jnp.sum(batch["loss_mask"].astype(jnp.float32)), "dp", "ep", "cp")


def split_batch(batch: Batch, micro_batch_size: int) -> tuple[Batch, int]:
    """Local rows [b, ...] -> [n, micro_batch_size, ...]; columns repeat. Returns (batch, n)."""
    rows = batch["tokens"].shape[0]
    size = min(micro_batch_size, rows)
    assert rows % size == 0, (rows, micro_batch_size)
    n = rows // size

    def cut(name, a):
        if name == "columns":
            return jnp.broadcast_to(a, (n, *a.shape))
        return a.reshape(n, size, *a.shape[1:])

    return {name: cut(name, a) for name, a in batch.items()}, n


def cast(tree: dict, dtype: str | jnp.dtype) -> dict:
    return jax.tree.map(lambda a: a.astype(dtype), tree)
