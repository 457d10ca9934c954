"""What a training step needs of a device's memory: the one estimate, used by every `auto`.

What a layer keeps for its backward is not estimated but read from its own trace (`kept`), on the
local shapes of a mesh that need not exist. The rest are counts of parameters and, for what the
compiler adds, factors measured on programs compiled for H200 (docs/memory.md). Invariant: a pure
function of (config, sizes of the mesh, number of parameters).
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mjax.config.mesh_rules import AXES, mesh_sizes
from mjax.config.pattern import STACK_OF, expand
from mjax.config.pipeline_layout import EMPTY
from mjax.config.remat import POLICIES, offloaded, remat_policies
from mjax.config.schema import Config, MeshConfig
from mjax.kernels.cross_entropy import cut_of
from mjax.kernels.loss_rows import fits
from mjax.kernels.quantize import Fp8
from mjax.models.context import Context, tokens_of
from mjax.models.decoder import Block
from mjax.models.linear import weights_of
from mjax.models.params import split
from mjax.models.positions import rope_tables
from mjax.models.remat import all_but_views, remat
from mjax.pipeline.layout import layout_of
from mjax.pipeline.schedule import make_schedule
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import param_partitions

WIDTH = {"float32": 4, "bfloat16": 2}

# Buffers of one layer's backward, in units of what that layer keeps under `dots`: measured.
WORK = 3.0


class Layers(NamedTuple):
    """The layers that one device holds of one chunk: (kind, policy) of each; how many
    micro-batches' worth of kept tensors wait at a time; chunks of a device."""

    each: tuple[tuple[str, str], ...]
    waiting: int
    chunks: int


def layers_of(cfg: Config, sizes: dict[str, int]) -> Layers:
    """The layers of a device under train.remat, where "auto" stands for dots."""
    text = "dots" if cfg.train.remat == "auto" else cfg.train.remat
    if sizes["pp"] == 1:
        kinds = expand(cfg.model.layer_pattern, cfg.model.num_hidden_layers)
        return Layers(tuple(zip(kinds, remat_policies(text, len(kinds)), strict=True)), 1, 1)
    layout = layout_of(cfg)
    kinds = [max(set(kinds) - {EMPTY}) for kinds in layout.slot_kinds()]
    rows = cfg.train.global_batch_size // (sizes["dp"] * sizes["ep"])
    schedule = make_schedule(layout.pp, layout.v, rows // min(cfg.train.micro_batch_size, rows))
    each = tuple(zip(kinds, remat_policies(text, len(kinds)), strict=True))
    return Layers(each, schedule.slots, layout.v)


Traced = dict[tuple[str, str], list["Kept"]]  # by kind of layer and policy


def bytes_per_device(
    cfg: Config, mesh: MeshConfig, devices: int, parameters: int, traced: Traced | None = None
) -> dict[str, float]:
    """Bytes that a training step of `cfg` on `mesh` needs at its peak, by what they are for.

    `parameters` is the model's count; `traced`: what layers keep, as far as known; is added to.
    """
    sizes, traced = mesh_sizes(mesh, devices), {} if traced is None else traced
    cfg = cfg.model_copy(update={"mesh": mesh})
    layers = layers_of(cfg, sizes)
    kinds = sorted({kind for kind, _ in layers.each})
    for pair in {*layers.each, *((kind, "dots") for kind in kinds)} - set(traced):
        traced[pair] = kept(cfg, sizes, *pair)
    away = offloaded(cfg.train.offload)
    held = {
        pair: sum(t.bytes for t in found if not t.goes(pair[1], away))
        for pair, found in traced.items()
    }
    layers_of_each = Counter(layers.each)
    stays = layers.waiting * sum(n * held[pair] for pair, n in layers_of_each.items())
    stays += sum(n * _moved(cfg, sizes) for pair, n in layers_of_each.items() if pair[1] == "none")
    work = WORK * max(sum(t.bytes for t in traced[kind, "dots"]) for kind in kinds)
    parts = _of_parameters(cfg, sizes, parameters, layers)
    loss = _loss_bytes(cfg, sizes) - parts["gradients of a micro-batch"]  # which come later
    return parts | {"activations": stays, "work": max(work, loss)}


def _of_parameters(
    cfg: Config, sizes: dict[str, int], parameters: int, layers: Layers
) -> dict[str, float]:
    """State, weights and gradients. Of uneven stages a device has slots for more layers than there
    are, and gradients of a chunk once more, from the choice of what a slot does. With one
    micro-batch, gradients wait in the dtype of weights where nothing but shards is made of them;
    weights that nothing gathers are cast where they are used. With several the matmuls of unrolled
    layers add to the sums by themselves."""
    model, zero, pp = cfg.model, cfg.mesh.zero, sizes["pp"]
    copies = sizes["dp"] * sizes["ep"] * sizes["cp"] if zero else 1
    tables = model.padded_vocab_size * model.hidden_size * (2 - model.tie_word_embeddings)
    tables += (
        model.max_position_embeddings * model.hidden_size * (model.position_embedding == "learned")
    )
    expert = model.hidden_size * model.moe_intermediate_size * (2 + model.mlp_gated)
    kinds = expand(model.layer_pattern, model.num_hidden_layers)
    experts = kinds.count("E") * model.num_experts * expert
    slots, outer = len(layers.each) * layers.chunks, tables / sizes["tp"]
    share = slots / len(kinds) / sizes["tp"]
    stacks = (parameters - tables - experts + experts / sizes["ep"]) * share
    shard = (outer + (parameters - tables) * share) / copies
    if not zero:
        shard = outer + stacks
    layerwise = stacks / copies + stacks * pp / len(kinds)  # ZeRO-3: as stored, and one layer whole
    whole = outer + (stacks if zero < 3 else min(stacks, layerwise))
    summed = {2: shard, 3: outer + stacks / copies}.get(zero, outer + stacks)
    optimizer, precision = cfg.optimizer, cfg.precision
    moments = WIDTH[optimizer.mu_dtype] + WIDTH[optimizer.nu_dtype]
    compute, accum = WIDTH[precision.compute], WIDTH[precision.grad_accum]
    rounded = precision.fp8 != "none" and not precision.fp8_skip_layers and not experts
    in_blocks = 1 if rounded else compute  # what 8-bit matmuls read
    working = compute * outer + in_blocks * (whole - outer)
    once = cfg.train.micro_batch_size * sizes["dp"] * sizes["ep"] >= cfg.train.global_batch_size
    apart = unrolls(cfg) and pp == 1 and (zero < 2 or copies == 1)
    sharded = zero in (1, 2) or sizes["dp"] * sizes["ep"] * sizes["cp"] == 1
    if once and pp == 1 and sharded:
        summed, accum = outer + stacks, compute
    chosen = stacks / layers.chunks if slots * pp > len(kinds) else 0.0
    return {
        "masters": WIDTH[precision.params] * shard,
        "moments": (optimizer.offload is not True) * moments * shard,
        "weights": 0.0 if once and copies * pp == 1 else working,
        "gradients": accum * summed + compute * chosen,
        "gradients of a micro-batch": 0.0 if once else compute * (outer if apart else whole),
    }


def _moved(cfg: Config, sizes: dict[str, int]) -> float:
    """Under `none` a backward of unrolled layers would gather and reorder anew what a ring over cp
    did in its forward; XLA finds that out and keeps it: keys, values, and six times the queries."""
    if sizes["cp"] == 1 or sizes["pp"] > 1 or cfg.mesh.cp_type == "a2a" or not unrolls(cfg):
        return 0.0
    model, rows = cfg.model, cfg.train.micro_batch_size
    heads = 2 * model.num_key_value_heads + 6 * model.num_attention_heads / sizes["cp"]
    width = heads * model.head_dim / sizes["tp"]
    return WIDTH[cfg.precision.compute] * rows * cfg.data.seq_length * width


def unrolls(cfg: Config) -> bool:
    """Whether GPUs run the layers one after the other instead of in a loop."""
    return cfg.train.unroll in ("auto", 0) and not cfg.train.offload


def _loss_bytes(cfg: Config, sizes: dict[str, int]) -> float:
    """The loss's fp32 gradient of the head, and of a chunk of tokens logits and their gradient."""
    rows = cfg.model.padded_vocab_size // sizes["tp"]
    tokens = cfg.train.micro_batch_size * cfg.data.seq_length // sizes["cp"]
    chunk = cfg.train.loss_chunk
    cut = cut_of(tokens, rows, chunk, fused=fits(tokens, rows, sizes["tp"], chunk))
    return 4 * rows * cfg.model.hidden_size + cut.bytes(rows)


class Kept(NamedTuple):
    """A tensor that a layer keeps for its backward, as one device holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def goes(self, policy: str, offload: tuple[str, ...]) -> bool:
        """Whether it waits in host memory."""
        return self.name in offload and self.name in (POLICIES[policy] or ())


def kept(cfg: Config, sizes: dict[str, int], kind: str, policy: str) -> list[Kept]:
    """What a layer of `kind` keeps of one micro-batch under `policy`, on a mesh of `sizes`.

    Weights and what all layers share (rotary tables, segments) are not counted. A tensor without a
    name is 'input' where it has the shape of the layer's, else 'other'.
    """
    found = _residuals(cfg, sizes, kind, policy)
    return [Kept(name, aval.shape, str(aval.dtype)) for name, aval in found]


def _residuals(cfg: Config, sizes: dict[str, int], kind: str, policy: str) -> list[tuple]:
    parallel = Parallel(**sizes)
    block, weights, rows, width = _local(cfg, parallel, kind)
    dtype = jnp.dtype(cfg.precision.compute)
    x = jax.ShapeDtypeStruct((rows, width // parallel.tp, cfg.model.hidden_size), dtype)
    dense = weights_of({STACK_OF[kind]: weights}, {STACK_OF[kind]: block.specs})
    fp8 = cfg.precision.fp8 != "none"
    scales = {name: jnp.zeros(3) for name in dense.get(STACK_OF[kind], {}) if fp8}
    ctx = Context(
        parallel=parallel,
        attention=cfg.train.attention,
        cp_type=cfg.mesh.cp_type,
        cp_a2a=cfg.mesh.cp_a2a,
        max_documents=1,
        dropout=True,
        fp8=Fp8(cfg.precision.fp8 == "delayed", scales=scales) if fp8 else None,
    )
    leaves: list = []
    names: list = []

    def trace(weights, x):
        positions = jnp.zeros((rows, width), jnp.int32)
        info = tokens_of((rows, width), positions, key=jax.random.key(0))
        turns = cfg.model.position_embedding == "rope" and kind != "N"
        rope = {kind: rope_tables(cfg.model, positions, kind == "L", parallel)} if turns else {}

        def apply(weights, x):
            return block.bind(weights)(x, info, ctx, kind=kind, rope=rope)[:2]

        body = all_but_views(apply) if policy == "none" else remat(apply, policy)
        _, pull = jax.vjp(body, weights, x)
        shared = {id(a) for a in jax.tree.leaves((weights, info, rope))}
        leaves.extend(
            {id(a): a.aval for a in jax.tree.leaves(pull) if id(a) not in shared}.values()
        )
        forward = jax.make_jaxpr(lambda w, x: jax.vjp(apply, w, x)[0])(weights, x)
        names.extend(_named(forward.jaxpr))
        return x

    mesh = AbstractMesh(tuple(sizes[a] for a in AXES), AXES, axis_types=(AxisType.Auto,) * 5)
    every = PartitionSpec()
    jax.eval_shape(
        jax.shard_map(trace, mesh=mesh, in_specs=every, out_specs=every, check_vma=False),
        weights,
        x,
    )
    labels = [("input", x), *names]
    return [(_take_label(labels, aval, POLICIES[policy]), aval) for aval in leaves]


def _local(cfg: Config, parallel: Parallel, kind: str):
    """A block, its local weights, and the rows and columns of a device's micro-batch."""
    model = cfg.model
    block, _ = split(nnx.eval_shape(lambda: Block(model, STACK_OF[kind], nnx.Rngs(0))))
    partitions = param_partitions(block.specs, parallel)
    mesh = AbstractMesh(tuple(getattr(parallel, a) for a in AXES), AXES)

    def weight(spec, cut):
        shape = jax.sharding.NamedSharding(mesh, cut).shard_shape(spec.shape)
        return jax.ShapeDtypeStruct(shape, cfg.precision.compute)

    weights = jax.tree.map(weight, block.specs, partitions)
    rows = min(
        cfg.train.micro_batch_size, cfg.train.global_batch_size // parallel.size("dp", "ep") or 1
    )
    return block, weights, rows, cfg.data.seq_length // parallel.cp


def _named(jaxpr) -> Iterator[tuple[str, jax.core.ShapedArray]]:
    """(name, shape) of every `checkpoint_name` in a jaxpr and those within."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], eqn.outvars[0].aval
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _named(inner)


def _take_label(labels: list, aval, names: tuple[str, ...] | None) -> str:
    """The first name that fits `aval`, of those that a policy keeps; it is used up."""
    for i, (name, like) in enumerate(labels):
        fits = (like.shape, like.dtype) == (aval.shape, aval.dtype)
        if fits and (name == "input" or names is None or name in names):
            return labels.pop(i)[0]
    return "other"
