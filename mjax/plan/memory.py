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
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mjax.config.mesh_rules import AXES, mesh_sizes
from mjax.config.pattern import STACK_OF, expand
from mjax.config.pipeline_layout import EMPTY
from mjax.config.remat import POLICIES, offloaded
from mjax.config.schema import Config, MeshConfig
from mjax.kernels.cross_entropy import cut_of
from mjax.kernels.loss_rows import fits
from mjax.models.context import Context, tokens_of
from mjax.models.decoder import Block
from mjax.models.execution import Execution
from mjax.models.params import Definition, split
from mjax.models.positions import rope_tables
from mjax.models.remat import STASHED, all_but_views, remat
from mjax.models.weight import Weight
from mjax.pipeline.layout import layout_of
from mjax.pipeline.schedule import make_schedule
from mjax.plan.execution import decide_execution
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import param_partitions
from mjax.sharding.spec import ParamSpec

WIDTH = {"float32": 4, "bfloat16": 2}

# Buffers of one layer's backward, in units of what that layer keeps under `dots`: measured.
WORK = 3.0


class HeldLayers(NamedTuple):
    """The layers that one device holds of one chunk.

    each: (kind, policy) of each. waiting: for how many micro-batches kept tensors wait at a time.
    chunks: of a device.
    """

    each: tuple[tuple[str, str], ...]
    waiting: int
    chunks: int


def held_layers(cfg: Config, sizes: dict[str, int]) -> HeldLayers:
    """The layers of a device under train.remat, where "auto" stands for dots."""
    execution = decide_execution(cfg, sizes)
    each = tuple(
        (max(set(plan.kinds) - {EMPTY}), "none" if plan.remat == STASHED else plan.remat)
        for plan in execution.layers
    )
    if not execution.pipelined:
        return HeldLayers(each, 1, 1)
    layout = layout_of(cfg)
    return HeldLayers(
        each, make_schedule(layout.pp, layout.v, execution.micro_batches).slots, layout.v
    )


Traced = dict[tuple[str, str], list["Kept"]]  # by kind of layer and policy


def bytes_per_device(
    cfg: Config, mesh: MeshConfig, devices: int, parameters: int, traced: Traced | None = None
) -> dict[str, float]:
    """Bytes that a training step of `cfg` on `mesh` needs at its peak, by what they are for.

    `parameters` is the model's count. `traced` is what layers keep, as far as it is known; what is
    found is added to it.
    """
    sizes, traced = mesh_sizes(mesh, devices), {} if traced is None else traced
    cfg = cfg.model_copy(update={"mesh": mesh})
    execution, layers = decide_execution(cfg, sizes), held_layers(cfg, sizes)
    kinds = sorted({kind for kind, _ in layers.each})
    for pair in {*layers.each, *((kind, "dots") for kind in kinds)} - set(traced):
        traced[pair] = kept(cfg, sizes, *pair)
    to_host = offloaded(cfg.train.offload)
    held = {
        pair: sum(t.bytes for t in found if not t.goes_to_host(pair[1], to_host))
        for pair, found in traced.items()
    }
    counts = Counter(layers.each)
    stays = layers.waiting * sum(count * held[pair] for pair, count in counts.items())
    reordered = _reordered_bytes(cfg, sizes, execution)
    stays += sum(count * reordered for pair, count in counts.items() if pair[1] == "none")
    work = WORK * max(sum(t.bytes for t in traced[kind, "dots"]) for kind in kinds)
    parts = _parameter_bytes(cfg, sizes, execution, parameters, layers)
    loss = _loss_bytes(cfg, sizes) - parts["gradients of a micro-batch"]  # which come later
    return parts | {"activations": stays, "work": max(work, loss)}


class Counts(NamedTuple):
    """Parameters on one device: tables (embedding, positions, head) and stacks of layers.

    shard: of both, as ZeRO stores them. whole_layer: of one layer. stored_stacks: of the stacks, as
    ZeRO stores them.
    """

    tables: float
    stacks: float
    shard: float
    whole_layer: float
    stored_stacks: float


def _count(cfg: Config, sizes: dict[str, int], parameters: int, layers: HeldLayers) -> Counts:
    """Of uneven stages a device has slots for more layers than there are."""
    model = cfg.model
    copies = sizes["dp"] * sizes["ep"] * sizes["cp"] if cfg.mesh.zero else 1
    learned = model.position_embedding == "learned"
    rows = model.padded_vocab_size * (2 - model.tie_word_embeddings)
    tables = (rows + model.max_position_embeddings * learned) * model.hidden_size
    expert = model.hidden_size * model.moe_intermediate_size * (2 + model.mlp_gated)
    kinds = expand(model.layer_pattern, model.num_hidden_layers)
    experts = kinds.count("E") * model.num_experts * expert
    share = len(layers.each) * layers.chunks / len(kinds) / sizes["tp"]
    stacks = (parameters - tables - experts + experts / sizes["ep"]) * share
    shard = (tables / sizes["tp"] + (parameters - tables) * share) / copies
    if not cfg.mesh.zero:
        shard = tables / sizes["tp"] + stacks
    whole_layer = stacks * sizes["pp"] / len(kinds)
    return Counts(tables / sizes["tp"], stacks, shard, whole_layer, stacks / copies)


def _parameter_bytes(
    cfg: Config,
    sizes: dict[str, int],
    execution: Execution,
    parameters: int,
    layers: HeldLayers,
) -> dict[str, float]:
    """State, weights and gradients.

    Gradients of a pipeline's chunk exist once more where a slot chooses what it does. With one
    micro-batch, gradients wait in the dtype of weights where nothing but shards is made of them,
    and weights that nothing gathers are cast where they are used. With several, the matmuls of
    unrolled layers add to the sums by themselves.
    """
    count, zero = _count(cfg, sizes, parameters, layers), cfg.mesh.zero
    optimizer, precision = cfg.optimizer, cfg.precision
    compute, accumulate = WIDTH[precision.compute], WIDTH[precision.grad_accum]
    is_cut = sizes["dp"] * sizes["ep"] * sizes["cp"] > 1
    once, in_layer = execution.micro_batches == 1, execution.gather == "layer" and zero == 3
    read = count.stacks
    if in_layer:
        read = min(count.stacks, count.stored_stacks + count.whole_layer)
    summed = count.tables + count.stacks
    if execution.reduce == "micro_batch" or (zero == 2 and is_cut):
        summed = count.shard
    elif in_layer:
        summed = count.tables + count.stored_stacks
    if once and not execution.pipelined and (zero in (1, 2) or not is_cut):
        summed, accumulate = count.tables + count.stacks, compute
    experts = "E" in expand(cfg.model.layer_pattern, cfg.model.num_hidden_layers)
    in_bytes = execution.recipe is not None and not precision.fp8_skip_layers and not experts
    weights = compute * count.tables + (1 if in_bytes else compute) * read
    alone = once and not (is_cut and zero) and not execution.pipelined
    slots, chosen = len(layers.each) * layers.chunks * sizes["pp"], 0.0
    if slots > cfg.model.num_hidden_layers:
        chosen = count.stacks / layers.chunks
    moments = WIDTH[optimizer.mu_dtype] + WIDTH[optimizer.nu_dtype]
    of_micro_batch = count.tables if execution.sums_in_matmuls else count.tables + read
    return {
        "masters": WIDTH[precision.params] * count.shard,
        "moments": (optimizer.offload is not True) * moments * count.shard,
        "weights": 0.0 if alone else weights,
        "gradients": accumulate * summed + compute * chosen,
        "gradients of a micro-batch": 0.0 if once else compute * of_micro_batch,
    }


def _reordered_bytes(cfg: Config, sizes: dict[str, int], execution: Execution) -> float:
    """What a layer that keeps all also keeps of a ring over cp.

    A backward of unrolled layers would gather and reorder anew what the ring did in its forward.
    XLA finds that out and keeps it: keys, values, and six times the queries.
    """
    if sizes["cp"] == 1 or execution.pipelined or cfg.mesh.cp_type == "a2a" or execution.unroll:
        return 0.0
    model, rows = cfg.model, cfg.train.micro_batch_size
    heads = 2 * model.num_key_value_heads + 6 * model.num_attention_heads / sizes["cp"]
    width = heads * model.head_dim / sizes["tp"]
    return WIDTH[cfg.precision.compute] * rows * cfg.data.seq_length * width


def _loss_bytes(cfg: Config, sizes: dict[str, int]) -> float:
    """The loss's fp32 gradient of the head, and a chunk's logits and their gradient."""
    rows = cfg.model.padded_vocab_size // sizes["tp"]
    tokens = cfg.train.micro_batch_size * cfg.data.seq_length // sizes["cp"]
    chunk = cfg.train.loss_chunk
    cut = cut_of(tokens, rows, chunk, fused=fits(tokens, rows, sizes["tp"], chunk))
    return 4 * rows * cfg.model.hidden_size + cut.bytes(rows)


# ---- what a layer keeps --------------------------------------------------------------------------


class Kept(NamedTuple):
    """A tensor that a layer keeps for its backward, as one device holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def goes_to_host(self, policy: str, offload: tuple[str, ...]) -> bool:
        """Whether it waits in host memory."""
        return self.name in offload and self.name in (POLICIES[policy] or ())


def kept(cfg: Config, sizes: dict[str, int], kind: str, policy: str) -> list[Kept]:
    """What a layer of `kind` keeps of one micro-batch under `policy`, on a mesh of `sizes`.

    Weights and what all layers share (rotary tables, segments) are not counted. A tensor without a
    name is 'input' where it has the shape of the layer's, else 'other'.
    """
    parallel = Parallel(**sizes)
    block = split(nnx.eval_shape(lambda: Block(cfg.model, STACK_OF[kind], nnx.Rngs(0))))[0]
    rows = min(
        cfg.train.micro_batch_size, cfg.train.global_batch_size // parallel.size("dp", "ep") or 1
    )
    width = cfg.data.seq_length // parallel.cp
    shape = rows, width // parallel.tp, cfg.model.hidden_size
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.precision.compute))
    leaves: list = []
    names: list = []

    def trace(weights: dict, x: jax.Array) -> jax.Array:
        found, named = _residuals(cfg, parallel, (block, kind, policy), weights, x, (rows, width))
        leaves.extend(found)
        names.extend(named)
        return x

    mesh = AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * 5)
    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        trace, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    jax.eval_shape(mapped, _local_weights(cfg, parallel, block), x)
    labels = [("input", x), *names]
    found = [(_take_label(labels, aval, POLICIES[policy]), aval) for aval in leaves]
    return [Kept(name, aval.shape, str(aval.dtype)) for name, aval in found]


def _residuals(
    cfg: Config,
    parallel: Parallel,
    layer: tuple[Definition, str, str],
    weights: dict,
    x: jax.Array,
    shape: tuple[int, int],
) -> tuple[list, list]:
    """(shapes that a layer's vjp holds, (name, shape) of all that its forward names)."""
    block, kind, policy = layer
    ctx = Context(
        parallel=parallel,
        attention=cfg.train.attention,
        cp_type=cfg.mesh.cp_type,
        cp_a2a=cfg.mesh.cp_a2a,
        max_documents=1,
        dropout=True,
    )
    positions = jnp.zeros(shape, jnp.int32)
    tokens = tokens_of(shape, positions, key=jax.random.key(0))
    rope = {}
    if cfg.model.position_embedding == "rope" and kind != "N":
        rope[kind] = rope_tables(cfg.model, positions, kind == "L", parallel)

    def apply(weights: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return block.bind(weights)(x, tokens, ctx, kind=kind, rope=rope)[:2]

    body = all_but_views(apply) if policy == "none" else remat(apply, policy)
    _, vjp = jax.vjp(body, weights, x)
    shared = {id(a) for a in jax.tree.leaves((weights, tokens, rope))}
    held = {id(a): a.aval for a in jax.tree.leaves(vjp) if id(a) not in shared}
    forward = jax.make_jaxpr(lambda w, x: jax.vjp(apply, w, x)[0])(weights, x)
    return list(held.values()), list(_named(forward.jaxpr))


def _local_weights(cfg: Config, parallel: Parallel, block: Definition) -> dict:
    """The weights of a layer as one device's matmuls read them, without their values."""
    recipe = decide_execution(cfg, {axis: parallel.size(axis) for axis in AXES}).recipe
    mesh = AbstractMesh(tuple(parallel.size(axis) for axis in AXES), AXES)

    def weight(spec: ParamSpec, cut: PartitionSpec) -> Weight | jax.ShapeDtypeStruct:
        shape = NamedSharding(mesh, cut).shard_shape(spec.shape)
        value = jax.ShapeDtypeStruct(shape, cfg.precision.compute)
        if spec.matmul is None:
            return value
        scales = None if recipe is None else jax.ShapeDtypeStruct((3,), jnp.float32)
        of_matmul = {"name": spec.matmul, "inputs": spec.inputs, "recipe": recipe}
        return Weight(value, scales=scales, **of_matmul)

    return jax.tree.map(weight, block.specs, param_partitions(block.specs, parallel))


def _named(jaxpr) -> Iterator[tuple[str, jax.core.ShapedArray]]:
    """(name, shape) of every `checkpoint_name` in a jaxpr and those within."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"], equation.outvars[0].aval
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _named(inner)


def _take_label(labels: list, aval, names: tuple[str, ...] | None) -> str:
    """The first name that fits `aval`, among those that a policy keeps; it is used up."""
    for i, (name, like) in enumerate(labels):
        same = (like.shape, like.dtype) == (aval.shape, aval.dtype)
        if same and (name == "input" or names is None or name in names):
            return labels.pop(i)[0]
    return "other"
