"""The training step: one function of local shards, run inside one `shard_map` over all five axes.

Read it top to bottom: cast the fp32 masters once, accumulate the gradients of this device's share
of the loss over micro-batches, reduce them by the one rule (`sharding/collectives.py`), clip by
the global norm, update. Invariant: shares of the loss sum over all devices to (sum of masked nll)
/ (number of unmasked tokens) + (sum of auxiliary losses) / (number of sequences) of the global
batch, so the result does not depend on the mesh, on the number of micro-batches, or on where the
masked tokens lie. A non-finite loss or norm leaves the state as it was.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from mjax.config.pattern import STACKS
from mjax.config.remat import offloaded
from mjax.config.schema import Config
from mjax.kernels.quantize import (
    Fp8,
    flip_weights,
    join,
    remember,
    round_weights,
    scales_of,
    weight_amax,
)
from mjax.models.context import Context, Tokens
from mjax.models.linear import apart, filled, together, weights_of, with_weights
from mjax.models.params import Definition
from mjax.optim.build import Optimizer
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
    whole_layers,
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
    optimizer: Optimizer
    parallel: Parallel
    max_documents: int = 0
    layout: Layout | None = None  # of the pipeline
    overlap_rows: int | None = None  # tokens in a tp shard that is exchanged piecewise
    unroll: int = 1  # layer groups in an iteration of a layer loop; 0: all
    hides: bool = False  # exchanges of layers run under others' matmuls (plan/xla_options.py)

    def context(
        self, train: bool, of_fp8: tuple[dict, dict] = ({}, {}), sums: dict | None = None
    ) -> Context:
        """`of_fp8`: scales, rounded weights, where blocks do not get theirs from the pipeline."""
        cfg, precision = self.cfg, self.cfg.precision
        delayed, backend = precision.fp8 == "delayed", precision.fp8_backend
        fp8 = Fp8(delayed, precision.fp8_skip_layers, *of_fp8, backend)
        return Context(
            parallel=self.parallel,
            attention=cfg.train.attention,
            cp_type=cfg.mesh.cp_type,
            cp_a2a=cfg.mesh.cp_a2a,
            permute=self.layout is None or self.layout.uniform,
            max_documents=self.max_documents,
            overlap_rows=self.overlap_rows,
            remat=cfg.train.remat if train else "none",
            offload=offloaded(cfg.train.offload) if train else (),
            unroll=self.unroll if train else 1,
            dropout=train,
            label_smoothing=cfg.train.label_smoothing if train else 0.0,
            z_loss=cfg.train.z_loss if train else 0.0,
            fp8=None if precision.fp8 == "none" else fp8,
            sums=sums or {},
            gather=self.gather_layer if self.layerwise else None,
            hides=self.hides,
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
        """Stacks, or what matmuls read of them, are made whole layer by layer: so in ZeRO-3."""
        return self.hides or self.cfg.mesh.zero == 3 and self.stored != self.partitions

    @property
    def early(self) -> bool:
        """ZeRO-2: gradients accumulate in the stored layout."""
        return self.cfg.mesh.zero == 2 and self.stored != self.partitions

    @property
    def by_layer(self) -> bool:
        """Whether unrolled layers have matmul weights, and sums of their gradients, `apart`: then a
        matmul adds to its sum by itself, and gradients are copied into a stack as they come."""
        cut = self.early or self.layerwise and not self.hides
        return not (self.layout is not None or self.unroll or cut)

    def products(self, tree: dict) -> dict:
        """Leaves of `tree` that matmuls read as they are: {stack: {name: leaf}}. Of kv weights that
        tp does not divide they read a part."""
        own = weights_of(tree, self.definition.specs)
        if self.cfg.model.num_key_value_heads % self.parallel.tp == 0:
            return own
        return {s: {n: a for n, a in leaves.items() if n != "kv"} for s, leaves in own.items()}

    @property
    def working(self) -> dict:
        """Partitions of the weights that enter the model, of which gradients are taken."""
        return self.mixed(self.stored, self.partitions)

    def mixed(self, stored: dict, whole: dict) -> dict:
        """`whole`, with the leaves of `stored` that are made whole `layerwise`."""
        if not self.layerwise:
            return whole
        if self.hides:
            return with_weights(whole, self.products(stored))
        return whole | {name: stored[name] for name in STACKS if name in stored}

    @jax.named_scope("gather")
    def gather_layer(self, stack: str, weights: dict, rounded: dict) -> tuple[dict, dict]:
        """Layers of `stack` as stored [n, ...] -> whole along the ZeRO axes. Weights that are read
        rounded take gradients only: their own gather is dead code."""
        trees = self.working, self.partitions, self.definition.specs
        gather = gather_weights
        if self.hides:
            dtype = jnp.dtype(self.cfg.precision.compute)
            gather = functools.partial(whole_layers, dtype=dtype)
        weights = gather(weights, *(tree[stack] for tree in trees), self.parallel)
        if rounded:
            own = (self.products(tree)[stack] for tree in trees)
            rounded = gather_weights(rounded, *own, self.parallel)
        return weights, rounded

    @jax.named_scope("reduce")
    def scatter(self, grads: dict) -> dict:
        """Gradients of the working weights -> the stored layout, summed over what that cuts."""
        accum = jnp.dtype(self.cfg.precision.grad_accum)
        return scatter_gradients(grads, self.working, self.stored, self.parallel, accum)

    def scales(self, state: State, tokens: jax.Array | int = 1) -> dict:
        """Of this step, {stack: {name: [L, 3]}}; empty without FP8."""
        precision = self.cfg.precision
        if precision.fp8 == "none":
            return {}
        dense = weights_of(state["params"], self.definition.specs)
        amax = weight_amax(dense, precision.compute, self.parallel)
        return scales_of(amax, state.get("fp8", {}), tokens)

    @jax.named_scope("gather")
    def rounded(self, params: dict, scales: dict, by_layer: bool = False) -> dict:
        """fp32 masters as stored and scales of this step -> bits of the weights that FP8's matmuls
        read, placed like `weights`; empty where skipped layers need a gather of their own."""
        gathers_once = self.stored != self.partitions and not self.layerwise
        if not scales or (self.cfg.precision.fp8_skip_layers and gathers_once):
            return {}
        low = cast(self.products(params), self.cfg.precision.compute)
        scales = {stack: {name: scales[stack][name] for name in low[stack]} for stack in low}
        low = round_weights(low, scales)
        trees = map(self.products, (self.stored, self.working, self.definition.specs))
        return gather_weights(apart(low) if by_layer else low, *trees, self.parallel)

    @jax.named_scope("gather")
    def weights(self, params: dict, by_layer: bool = False) -> dict:
        """Masters as stored -> the weights that enter the model; `by_layer`: layers `apart`. Whose
        exchange `hides` takes its gradients, and so stays, in the dtype of their sums."""
        low = cast(params, self.cfg.precision.compute)
        if self.hides:
            low = self.mixed(cast(params, self.cfg.precision.grad_accum), low)
        low = with_weights(low, apart(self.products(low))) if by_layer else low
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
        scale = jnp.minimum(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(norm)
        rest = {name: x for name, x in state.items() if name not in ("params", "opt")}
        new = {"step": state["step"] + 1}
        if "fp8" in state:
            new["fp8"], all_finite = remember(state["fp8"], seen, program.parallel)
            finite &= all_finite
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, rest)
        new["params"], new["opt"] = program.optimizer.update(
            grads, opt, params, lr=lr, weight_decay=weight_decay, scale=scale, keep=finite
        )
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
    hides = program.hides and n == 1 and program.stored != program.partitions
    program = replace(program, hides=hides)
    by_layer = program.by_layer
    weights, scales = program.weights(state["params"], by_layer), program.scales(state, count)
    turns = by_layer and not program.layerwise  # once a step: bits that no layer gathers
    rounded = program.rounded(state["params"], scales, turns)
    if turns:
        rounded = flip_weights(rounded, program.products(program.definition.specs))

    def share(weights, scales, sums, micro):
        of_fp8 = scales, rounded
        nll, aux = loss_sums(program, weights, of_fp8, micro, key, train=True, sums=sums)
        nll = nll / jnp.maximum(count, 1) / par.tp  # it is computed on each tp device
        aux = aux / sequences
        return nll + aux, {"loss": nll, "aux_loss": aux}

    value_and_grad = jax.value_and_grad(share, (0, 1, 2), has_aux=True)

    def body(carry, micro):
        sums = program.products(carry[1]) if by_layer else {}
        (_, losses), (grads, seen, sums) = value_and_grad(weights, scales, sums, micro)
        if program.early:
            grads = program.scatter(grads)
        with jax.named_scope("accumulate"):
            add = lambda c, x: c + x.astype(c.dtype)  # noqa: E731
            losses, grads = jax.tree.map(add, carry[:2], (losses, grads))
        return (losses, with_weights(grads, sums), join(carry[2], seen)), None

    if program.layout is not None:
        losses, grads, seen = pipeline_gradients(
            program, weights, (scales, rounded), micro_batches, key, count, sequences
        )
    elif n == 1:
        one = jax.tree.map(lambda a: a[0], micro_batches)
        (_, losses), (grads, seen, _) = value_and_grad(weights, scales, {}, one)
    else:
        shapes = state["params"] if program.early else weights
        none = {"loss": jnp.float32(0), "aux_loss": jnp.float32(0)}
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), shapes)
        zero = none, zeros, jax.tree.map(jnp.zeros_like, scales)
        (losses, grads, seen), _ = jax.lax.scan(body, zero, micro_batches)
    if program.stored != program.partitions and not (program.early and n > 1):
        grads = program.scatter(grads)
    grads = cast(stacked_once(grads) if by_layer or n == 1 else grads, accum)
    with jax.named_scope("reduce"):
        grads = reduce_gradients(grads, program.stored, par)
        norm = global_norm(grads, program.stored, par)
    losses = {name: par.psum(x, *AXES) for name, x in losses.items()}
    return losses, norm, count, grads, seen if "fp8" in state else {}


def stacked_once(grads: dict) -> dict:
    """Unrolled layers leave a gradient each. Stacked wherever they are read, they would split the
    update of a stack into three kernels, for the masters and each moment, that all read them."""
    fence = lambda g: jax.lax.optimization_barrier(g)  # noqa: E731
    whole = {name: together(g, filled) for name, g in grads.items() if name in STACKS}
    return grads | jax.tree.map(fence, whole)


def evaluate(program: Program, state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(sum of masked nll, unmasked tokens) of the global batch, no dropout."""
    par, cfg, program = program.parallel, program.cfg, replace(program, hides=False)
    weights, scales = program.weights(state["params"]), program.scales(state)
    of_fp8 = scales, program.rounded(state["params"], scales)
    micro_batches, _ = split_batch(batch, cfg.train.micro_batch_size)

    def body(total, micro):
        return total + loss_sums(program, weights, of_fp8, micro, None, train=False)[0], None

    if program.layout is not None:
        total = pipeline_nll(program, weights, of_fp8, micro_batches)
    else:
        total, _ = jax.lax.scan(body, jnp.float32(0), micro_batches)
    return par.psum(total / par.tp, *AXES), token_count(batch, par)


def loss_sums(
    program: Program,
    weights: dict,
    of_fp8: tuple[dict, dict],
    micro: Batch,
    key: jax.Array | None,
    train: bool,
    sums: dict | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(sum of masked nll over this device's part of a micro-batch, equal on all tp devices; its
    share of the sum of auxiliary losses). Layers may be `apart`; `sums`: of gradients so far."""
    weights, rounded, sums = map(together, (weights, of_fp8[1], sums or {}))
    model = program.definition.bind(weights)
    info, chunk = program.tokens(micro, key), program.cfg.train.loss_chunk
    return model.loss(micro, info, program.context(train, (of_fp8[0], rounded), sums), chunk)


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
