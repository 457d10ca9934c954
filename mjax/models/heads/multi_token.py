"""Multi-token prediction: layers that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437).

Depth k predicts token i + k + 1 at place i. Its layer reads the normed output of the depth before,
first that of the model, and the embedding of token i + k. Embedding and head are the model's.
Training runs these layers, and the engine where they guess tokens (`infer/drafting/`). They belong
to the edges of the model, as the head does. The last stage of a pipeline runs them. ZeRO gathers
them once a step, and FP8 recipes leave them in the dtype of the computation. Invariant: no
prediction reaches over the end of its document.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.models.base.branch import BranchOutput, LayerCache, Rope
from mjax.models.base.context import Context, Tokens
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, normal, specs_of, state_from
from mjax.models.base.streams import EMBEDDING_SALT
from mjax.models.runtime.remat import remat
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec, is_spec

# Fields of a batch, [B, S] each.
Fields = dict[str, jax.Array]


class PredictionLayer(nnx.Module):
    """One depth: it joins hidden state and embedding, and applies a block of kind `kind`.

    `projection` [2, D, D] brings the two, each normed, back to the width of the model. `block` is
    as a layer of the model.
    """

    def __init__(self, cfg: ModelConfig, kind: str, block: nnx.Module, rngs: nnx.Rngs):
        self.kind = kind
        norm = partial(Norm, cfg, (cfg.hidden_size,), ("embed",), rngs=rngs)
        self.embedding_norm = norm("enorm")
        self.hidden_norm = norm("hnorm")
        projection = ParamSpec(
            shape=(2, cfg.hidden_size, cfg.hidden_size),
            axes=(None, "embed", None),
            role="matrix",
            inputs=2,
            hf=("eh_proj.weight",),
        )
        self.projection = declare(rngs, projection, normal(cfg.initializer_range))
        self.block = block
        self.final_norm = norm("shared_head.norm")

    def __call__(
        self,
        hidden: jax.Array,
        embedding: jax.Array,
        tokens: Tokens,
        ctx: Context,
        *,
        rope: Rope,
        layer: int,
        cache: LayerCache | None = None,
    ) -> BranchOutput:
        """The normed output [B, S/tp, D], this device's shares of statistics, the new cache.

        hidden [B, S/tp, D] is the normed output of the depth before, embedding [B, S/tp, D] that of
        the tokens that follow. `layer` is the number that keys the block's dropout. The layer keeps
        for its backward what `ctx.training.head_remat` says.
        """
        if ctx.parallel.pp > 1:  # only the last stage runs it, and a permute waits for all
            ctx = replace(ctx, kernels=replace(ctx.kernels, permute=False, overlap_rows=None))
        graph, state = nnx.split(self)

        def apply(state: nnx.State, hidden: jax.Array, embedding: jax.Array) -> BranchOutput:
            own = nnx.merge(graph, state)
            x = own.join(hidden, embedding)
            options = {"kind": own.kind, "rope": rope, "layer": layer, "cache": cache}
            output = own.block(x, tokens, ctx, **options)
            y = own.final_norm(output.y)
            return output._replace(y=y)

        return remat(apply, ctx.training.head_remat, in_loop=False)(state, hidden, embedding)

    def join(self, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        """The input of the block, [B, S/tp, D]: both normed, side by side, and projected."""
        embedding = self.embedding_norm(embedding)
        hidden = self.hidden_norm(hidden)
        both = jnp.concatenate((embedding, hidden), -1)
        weight = self.projection[...]
        return both @ weight.reshape(-1, weight.shape[-1])


class MultiTokenParts:
    """The layers `mtp_1`, .. of a decoder that predicts tokens further ahead."""

    def declare_head(self, rngs: nnx.Rngs) -> None:
        cfg = self.cfg
        for depth, kind in enumerate(cfg.prediction_kinds, 1):
            layer = PredictionLayer(cfg, kind, self.make_block(kind, rngs), rngs)
            number = cfg.num_hidden_layers + depth - 1
            setattr(self, f"mtp_{depth}", as_edge(layer, f"model.layers.{number}."))
        super().declare_head(rngs)

    @jax.named_scope("mtp")
    def predict(
        self,
        depth: int,
        x: jax.Array,
        tokens: jax.Array,
        info: Tokens,
        ctx: Context,
        cache: LayerCache | None = None,
    ) -> BranchOutput:
        """The normed output [B, S/tp, D] of a depth of multi-token prediction, and what a layer
        gives besides.

        x [B, S/tp, D] is the normed output of the depth before. `tokens` int32 [B, S] are those
        that lie `depth` places ahead, `info` is about those of the model itself.
        """
        embedding = self.embed(tokens, info, ctx, salt=EMBEDDING_SALT + (depth << 24))
        layer = getattr(self, f"mtp_{depth}")
        number = self.cfg.num_hidden_layers + depth - 1
        rope = self.rope(info, ctx)
        return layer(x, embedding, info, ctx, rope=rope, layer=number, cache=cache)


def as_edge(module: nnx.Module, prefix: str) -> nnx.Module:
    """A layer as a part of the model that is in no stack; `prefix` goes before its names.

    FP8, whose scales lie in stacks, leaves it in the dtype of the computation.
    """
    graph, state = nnx.split(module)

    def edge(spec: ParamSpec) -> ParamSpec:
        names = tuple(prefix + name for name in spec.hf)
        return replace(spec, hf=names, fp8=False)

    specs = jax.tree.map(edge, specs_of(state), is_leaf=is_spec)
    return nnx.merge(graph, state_from(nnx.to_pure_dict(state), specs))


# ---- the fields of each depth --------------------------------------------------------------------


def field_names(depth: int) -> tuple[str, str, str]:
    """The names of the tokens that a depth reads, of its labels, and of its loss mask."""
    return f"mtp_{depth}_tokens", f"mtp_{depth}_labels", f"mtp_{depth}_loss_mask"


def shifted_fields(batch: Fields, depths: int, parallel: Parallel) -> Fields:
    """The fields of depths 1 to `depths`, from those of next-token prediction.

    At place i of depth k lie token i + k, and the label and the loss mask of that place. Token
    and mask are 0 outside the document. Sequences are gathered over cp for this, because
    the tokens that follow may lie on another device.
    """
    columns = batch["columns"]
    shift = _shifter(columns, parallel)
    segments = batch["segment_ids"]
    fields = {}
    for depth in range(1, depths + 1):
        tokens, labels, mask = (shift(batch[name], depth) for name in _SHIFTED)
        length = len(columns) * parallel.cp
        is_same_document = shift(segments, depth) == segments
        is_inside = is_same_document & (columns + depth < length)
        of_tokens, of_labels, of_mask = field_names(depth)
        fields[of_tokens] = jnp.where(is_inside, tokens, 0)
        fields[of_labels] = labels
        fields[of_mask] = jnp.where(is_inside, mask, 0)
    return fields


_SHIFTED = "tokens", "labels", "loss_mask"


def _shifter(columns: jax.Array, parallel: Parallel) -> Callable[[jax.Array, int], jax.Array]:
    """f(field [B, S/cp], k): its entries k places ahead; of what is behind the end, the last.

    `columns` int32 [S/cp] are the places of this device's tokens in the sequence.
    """
    order = parallel.all_gather(columns, "cp", 0)
    length = len(order)
    unset = jnp.zeros_like(order)
    at = unset.at[order].set(jnp.arange(length), unique_indices=True)

    def shift(field: jax.Array, places: int) -> jax.Array:
        whole = parallel.all_gather(field, "cp", 1)
        ahead = jnp.minimum(columns + places, length - 1)
        return jnp.take(whole, at[ahead], axis=1)

    return shift


# ---- its weight in the loss ----------------------------------------------------------------------


def with_weight(loss: jax.Array, weight: float) -> jax.Array:
    """The loss, with a gradient `weight` times its own: logged as it is, trained with a weight."""
    constant = jax.lax.stop_gradient(loss)
    return constant + weight * (loss - constant)
