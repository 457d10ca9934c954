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

from mjax.config.languages.layer_pattern import DECODER, DEEPSTACK, ENCODER, stack_of, stream_of
from mjax.config.languages.remat import kept_names
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.run import Config
from mjax.models.attention.positions import rope_of_layers
from mjax.models.base.context import Context, Documents, Tokens, tokens_of
from mjax.models.base.params import Definition, split
from mjax.models.base.streams import Activation, SharedWeights, Streams
from mjax.models.base.weight import Weight
from mjax.models.block import Block
from mjax.models.runtime.remat import all_but_views, remat
from mjax.models.towers.modalities import MODALITIES
from mjax.models.towers.shared_weights import Joint
from mjax.models.towers.tiles import CORNERS
from mjax.models.towers.tower_mesh import is_whole, row_axes, whole_specs
from mjax.objectives.fields import further_lengths
from mjax.plan.execution import decide_execution, micro_batch_shape, training_context
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import on_shards, parallel_of_run
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

    def make_block() -> Block:
        return Block(cfg.model, kind, nnx.Rngs(0))

    block = split(nnx.eval_shape(make_block))[0]
    layer = _Layer(block, kind, policy)
    ctx = training_context(cfg, parallel_of_run(cfg, sizes), Documents(most=1))
    shapes = stream_shapes(cfg, sizes, ctx)
    found: list[_Residuals] = []

    def trace(weights: dict, x: Activation) -> Activation:
        facts = _token_facts(cfg, shapes)
        found.append(_residuals(cfg, ctx, layer, weights, x, facts))
        return x

    along = tuple(sizes[axis] for axis in AXES)
    mesh = AbstractMesh(along, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    mapped = on_shards(trace, mesh, PartitionSpec(), PartitionSpec())
    x = _layer_input(cfg, sizes, ctx, shapes)
    jax.eval_shape(mapped, _local_weights(cfg, ctx.parallel, block, kind), x)
    (residuals,) = found
    labels = [("input", leaf) for leaf in jax.tree.leaves(x) if leaf.ndim == _ACTIVATION_DIMS]
    labels += residuals.named
    tensors = []
    for aval in residuals.held:
        name = _take_label(labels, aval, kept_names(policy))
        tensors.append(Kept(name, aval.shape, str(aval.dtype)))
    return tensors


class _Layer(NamedTuple):
    """A layer that is traced."""

    block: Definition
    kind: str
    policy: str


class _Residuals(NamedTuple):
    """The arrays that a layer's vjp holds, and (name, array) of all that its forward names."""

    held: list[jax.core.ShapedArray]
    named: list[tuple[str, jax.core.ShapedArray]]


StreamShapes = dict[str, tuple[int, int]]  # (sequences, tokens), by stream
LayerOutput = tuple[Activation, dict[str, jax.Array]]  # and statistics
_ACTIVATION_DIMS = 3  # [B, S, D]


def _layer_input(
    cfg: Config, sizes: dict[str, int], ctx: Context, shapes: StreamShapes
) -> Activation:
    """The shapes of what a layer reads."""
    inputs = {}
    for name, (rows, length) in shapes.items():
        of_tower = name in cfg.model.modalities
        sizes_of_stream = cfg.model.tower(name) if of_tower else cfg.model
        tp = ctx.of(name).parallel.tp
        shape = rows, length // tp, sizes_of_stream.hidden_size
        inputs[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.precision.compute))
    kept = len(cfg.model.vision.deepstack_visual_indexes)
    if kept and "vision" in inputs:
        *shape, width = inputs["vision"].shape
        inputs[DEEPSTACK] = inputs["vision"].update(shape=(*shape, kept * width))
    if cfg.model.architecture.has_streams:
        return Streams(inputs, _shared(cfg, sizes))
    return inputs[DECODER]


def _token_facts(cfg: Config, shapes: StreamShapes) -> Tokens:
    """Facts about the tokens of a micro-batch, without their values."""
    key = jax.random.key(0)
    text = shapes[DECODER]
    positions = jnp.zeros(text, jnp.int32)
    features, corner_weights = {}, {}
    corners = *text, CORNERS
    for name in cfg.model.modalities:
        features[name] = positions
        if cfg.model.tower(name).is_tiled:
            features[name] = jnp.zeros(corners, jnp.int32)
            corner_weights[name] = jnp.zeros(corners, jnp.float32)
    others = {name: tokens_of(shape, key=key) for name, shape in shapes.items()}
    if "vision" in others:
        others[DEEPSTACK] = others["vision"]
    return replace(
        tokens_of(text, positions, key=key),
        others=others,
        features=features,
        weights=corner_weights,
    )


def _residuals(
    cfg: Config,
    ctx: Context,
    layer: _Layer,
    weights: dict,
    x: Activation,
    tokens: Tokens,
) -> _Residuals:
    """The outcome of tracing a layer forward and backward."""
    rope = rope_of_layers(cfg.model, [layer.kind], tokens, ctx.parallel)

    def apply(weights: dict, x: Activation) -> LayerOutput:
        bound = layer.block.bind(weights)
        output = bound(x, tokens, ctx, kind=layer.kind, rope=rope)
        return output.y, output.statistics

    def forward(weights: dict, x: Activation) -> LayerOutput:
        return jax.vjp(apply, weights, x)[0]

    body = all_but_views(apply) if layer.policy == "none" else remat(apply, layer.policy)
    _, vjp = jax.vjp(body, weights, x)
    travels = ()
    if isinstance(x, Streams):
        own = stream_of(layer.kind)
        others = [y for name, y in x.activations.items() if name != own]
        travels = x.shared, others
    shared = {id(array) for array in jax.tree.leaves((weights, tokens, rope, travels))}
    held = {}
    for array in jax.tree.leaves(vjp):
        if id(array) not in shared:
            held[id(array)] = array.aval
    jaxpr = jax.make_jaxpr(forward)(weights, x).jaxpr
    return _Residuals(list(held.values()), list(_named(jaxpr)))


def stream_shapes(cfg: Config, sizes: dict[str, int], ctx: Context) -> dict[str, tuple[int, int]]:
    """(sequences, tokens) of a micro-batch on a cp device, by stream."""
    text = rows, _ = micro_batch_shape(cfg, sizes)
    further = further_lengths(cfg)
    sides = {DECODER: text}
    companions = cfg.model.companions(cfg.data.seq_length)
    if companions is not None:
        sides[ENCODER] = rows * companions.count, companions.length // sizes["cp"]
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
        relative = {}
        for word, bias in weights.relative.items():
            relative[word] = bias[:heads]
        return replace(weights, relative=relative)

    return jax.eval_shape(shared)


def _local_weights(cfg: Config, parallel: Parallel, block: Definition, kind: str) -> dict:
    """The weights of a layer as one device's matmuls read them, without their values."""
    sizes = {axis: parallel.size(axis) for axis in AXES}
    execution = decide_execution(cfg, sizes)
    mesh = AbstractMesh(tuple(sizes.values()), AXES)

    def weight(spec: ParamSpec, cut: PartitionSpec) -> Weight | jax.ShapeDtypeStruct:
        shape = NamedSharding(mesh, cut).shard_shape(spec.shape)
        value = jax.ShapeDtypeStruct(shape, spec.dtype(cfg.precision.compute))
        if spec.matmul is None:
            return value
        weight = Weight(value, name=spec.matmul, inputs=spec.inputs)
        recipe = execution.recipe_for(spec)
        if recipe is None:
            return weight
        scales = jax.ShapeDtypeStruct(recipe.scales_shape, jnp.float32)
        return replace(weight, scales=scales, recipe=recipe)

    stack = stack_of(kind)
    specs = rounded_specs({stack: block.specs}, cfg.precision)[stack]
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
    for place, (name, like) in enumerate(labels):
        is_like = like.shape == aval.shape and like.dtype == aval.dtype
        is_kept = names is None or name in ("input", *names)
        if is_like and is_kept:
            del labels[place]
            return name
    return "other"
