"""The tensors that a layer keeps for its backward, on one device, under a remat policy.

The block itself is traced on an abstract mesh, so the answer is that of the program. Weights and
what all layers share are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mjax.config.languages.layer_pattern import BRANCHES, DECODER, ENCODER, branches_of, stream_of
from mjax.config.languages.remat import kept_names
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.run import Config
from mjax.models.attention.positions import rope_tables
from mjax.models.base.context import Context, Documents, tokens_of
from mjax.models.base.params import Definition, split
from mjax.models.base.streams import Activation, SharedWeights, Streams
from mjax.models.base.weight import Weight
from mjax.models.block import Block
from mjax.models.runtime.remat import all_but_views, remat
from mjax.models.towers.modalities import MODALITIES
from mjax.models.towers.shared_weights import Joint
from mjax.models.towers.tiles import CORNERS
from mjax.models.towers.tower_mesh import is_whole, row_axes, whole_specs
from mjax.objectives.objective import further_lengths
from mjax.plan.execution import decide_execution, micro_batch_shape, training_context
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import on_shards
from mjax.sharding.rules import param_partitions
from mjax.sharding.spec import ParamSpec, rounded_specs


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
        return self.name in offload and self.name in (kept_names(policy) or ())


def kept(cfg: Config, sizes: dict[str, int], kind: str, policy: str) -> list[Kept]:
    """The tensors that a layer of `kind` keeps of one micro-batch under `policy`.

    `sizes` are those of the mesh axes.

    Weights and what all layers share (rotary tables, segments) are not counted. A tensor without a
    name is 'input' where it has the shape of the layer's, else 'other'.
    """
    parallel = Parallel(**sizes)

    def make_block() -> Block:
        return Block(cfg.model, kind, nnx.Rngs(0))

    block = split(nnx.eval_shape(make_block))[0]
    ctx = training_context(cfg, parallel, Documents(most=1))
    sides = stream_shapes(cfg, sizes, ctx)
    inputs = {}
    for name, (rows, length) in sides.items():
        of_tower = name in cfg.model.modalities
        sizes_of_stream = cfg.model.tower(name) if of_tower else cfg.model
        own = ctx.of(name).parallel
        width = sizes_of_stream.hidden_size
        shape = rows, length // own.tp, width
        dtype = jnp.dtype(cfg.precision.compute)
        inputs[name] = jax.ShapeDtypeStruct(shape, dtype)
    like = x = inputs[DECODER]
    if cfg.model.architecture.has_streams:
        x = Streams(inputs, _shared(cfg, sizes))
    leaves: list = []
    names: list = []

    def trace(weights: dict, x: Activation) -> Activation:
        layer = block, kind, policy
        residuals, named = _residuals(cfg, ctx, layer, weights, x, sides)
        leaves.extend(residuals)
        names.extend(named)
        return x

    along = tuple(sizes[axis] for axis in AXES)
    mesh = AbstractMesh(along, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    mapped = on_shards(trace, mesh, PartitionSpec(), PartitionSpec())
    jax.eval_shape(mapped, _local_weights(cfg, parallel, block, kind), x)
    labels = []
    for leaf in jax.tree.leaves(x):
        if leaf.ndim == like.ndim:
            labels.append(("input", leaf))
    labels += names
    tensors = []
    for aval in leaves:
        name = _take_label(labels, aval, kept_names(policy))
        tensors.append(Kept(name, aval.shape, str(aval.dtype)))
    return tensors


LayerOutput = tuple[Activation, dict[str, jax.Array]]  # and statistics


def _residuals(
    cfg: Config,
    ctx: Context,
    layer: tuple[Definition, str, str],
    weights: dict,
    x: Activation,
    sides: dict[str, tuple[int, int]],
) -> tuple[list, list]:
    """(shapes that a layer's vjp holds, (name, shape) of all that its forward names).

    `sides` are the sequences and their tokens, by stream.
    """
    block, kind, policy = layer
    key = jax.random.key(0)
    others = {name: tokens_of(side, key=key) for name, side in sides.items()}
    text = sides[DECODER]
    positions = jnp.zeros(text, jnp.int32)
    tokens = tokens_of(text, positions, key=key)
    features = dict.fromkeys(cfg.model.modalities, positions)
    corner_weights = {}
    for name in features:
        if cfg.model.tower(name).is_tiled:
            features[name] = jnp.zeros((*text, CORNERS), jnp.int32)
            corner_weights[name] = jnp.zeros((*text, CORNERS), jnp.float32)
    tokens = replace(tokens, others=others, features=features, weights=corner_weights)
    if cfg.model.architecture.has_streams:
        positions = tokens.of(stream_of(kind)).positions
    rope = {}
    if cfg.model.position_embedding == "rope":
        for word in branches_of(kind):
            if BRANCHES[word].rotary:
                rope[word] = rope_tables(cfg.model, positions, word, ctx.parallel)

    def apply(weights: dict, x: Activation) -> LayerOutput:
        bound = block.bind(weights)
        output = bound(x, tokens, ctx, kind=kind, rope=rope)
        return output.y, output.statistics

    def forward(weights: dict, x: Activation) -> LayerOutput:
        return jax.vjp(apply, weights, x)[0]

    body = all_but_views(apply) if policy == "none" else remat(apply, policy)
    _, vjp = jax.vjp(body, weights, x)
    travels = ()
    if isinstance(x, Streams):
        own = stream_of(kind)
        others = [y for name, y in x.activations.items() if name != own]
        travels = x.shared, others
    shared = {id(a) for a in jax.tree.leaves((weights, tokens, rope, travels))}
    held = {}
    for array in jax.tree.leaves(vjp):
        if id(array) not in shared:
            held[id(array)] = array.aval
    named = _named(jax.make_jaxpr(forward)(weights, x).jaxpr)
    return list(held.values()), list(named)


def stream_shapes(cfg: Config, sizes: dict[str, int], ctx: Context) -> dict[str, tuple[int, int]]:
    """(sequences, tokens) of a micro-batch on a cp device, by stream."""
    text = rows, _ = micro_batch_shape(cfg, sizes)
    further = further_lengths(cfg)
    sides = {DECODER: text}
    if cfg.model.architecture.reads_neighbors:
        sides[ENCODER] = rows * further["neighbors"], further["retrieved"] // sizes["cp"]
    for name in cfg.model.modalities:
        count, length, _ = MODALITIES[name].axes
        own = ctx.of(name).parallel
        devices = ctx.parallel.size(*row_axes(name, ctx))
        items = -(-rows * further[count] // devices)
        sides[name] = items, further[length] // own.cp
    if cfg.model.architecture.reads_target:
        target = cfg.data.target_length or cfg.data.seq_length
        sides = {ENCODER: text, DECODER: (rows, target // sizes["cp"])}
    return sides


def _shared(cfg: Config, sizes: dict[str, int]) -> SharedWeights:
    """The shapes of what all layers of two streams read."""
    heads = cfg.model.attention.num_attention_heads // sizes["tp"]

    def shared() -> SharedWeights:
        weights = Joint(cfg.model, nnx.Rngs(0)).weights()
        relative = {name: bias[:heads] for name, bias in weights.relative.items()}
        return replace(weights, relative=relative)

    return jax.eval_shape(shared)


def _local_weights(cfg: Config, parallel: Parallel, block: Definition, kind: str) -> dict:
    """The weights of a layer as one device's matmuls read them, without their values."""
    sizes = {axis: parallel.size(axis) for axis in AXES}
    recipe = decide_execution(cfg, sizes).recipe
    mesh = AbstractMesh(tuple(sizes.values()), AXES)

    def weight(spec: ParamSpec, cut: PartitionSpec) -> Weight | jax.ShapeDtypeStruct:
        shape = NamedSharding(mesh, cut).shard_shape(spec.shape)
        value = jax.ShapeDtypeStruct(shape, spec.dtype(cfg.precision.compute))
        if spec.matmul is None:
            return value
        of_matmul = {"name": spec.matmul, "inputs": spec.inputs}
        if recipe is None or not spec.takes_fp8:
            return Weight(value, **of_matmul)
        scales = jax.ShapeDtypeStruct((3,), jnp.float32)
        return Weight(value, scales=scales, recipe=recipe, **of_matmul)

    specs = rounded_specs(block.specs, cfg.precision.fp8_experts)
    if is_whole(kind, cfg):
        specs = whole_specs(specs)
    cuts = param_partitions(specs, parallel)
    return jax.tree.map(weight, specs, cuts)


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
