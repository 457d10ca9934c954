"""Layers and heads in blocks of tokens, all of one shape: the batch-invariant mode.

XLA orders the sums of a matmul, and fuses what is around it, by the shapes of a program. A trainer
and an engine have other shapes. Here both run a layer in a loop over blocks of `IN_BLOCK` tokens,
each a row of its own that reads the keys before it. Then one body, of one shape, computes a token
in either program. Barriers and a trip count that XLA does not know keep a body apart from what is
around it. Invariant: the bits of a token depend on the weights and on its text up to it.

A gradient is that of the plain layer, at the activations that the blocks gave.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mjax.config.languages.layer_pattern import BRANCHES, branches_of
from mjax.kernels.attention.paged import PagedRows
from mjax.kernels.loss.logits import below_largest, log_prob_of
from mjax.models.attention.calls import IN_ORDER
from mjax.models.attention.documents import DocumentKeysValues, DocumentTokens
from mjax.models.attention.positions import rope_of_layers
from mjax.models.base.branch import LayerCache
from mjax.models.base.context import Context, Kernels, PagedTokens, Tokens, tokens_of
from mjax.models.base.params import Definition
from mjax.models.base.weight import WeightOrArray, is_weight, map_weights

IN_BLOCK = 64  # tokens: memory bounds a matmul of so many on a GPU

# A tree of arrays.
BlockTree = Any


def loop_over_blocks(
    function: Callable[[BlockTree, BlockTree], tuple[BlockTree, BlockTree]],
    given: BlockTree,
    carry: BlockTree = (),
    count: jax.Array | int | None = None,
) -> tuple[BlockTree, BlockTree]:
    """(outputs [T, ...], the last carry) of `function(block of given, carry)`, block by block.

    given: arrays [T, ...], whose blocks are [IN_BLOCK, ...], with zeros after the last token.
    count: tokens after which outputs may be zeros; None: T. Nothing here is differentiated.
    """
    size = len(jax.tree.leaves(given)[0])
    given, carry = lax.stop_gradient((given, carry))
    given = jax.tree.map(_in_whole_blocks, given)

    def at(begin: jax.Array | int) -> BlockTree:
        def cut(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, begin, IN_BLOCK)

        return jax.tree.map(cut, given)

    def body(number: jax.Array, state: tuple) -> tuple:
        outputs, carry = state
        begin = number * IN_BLOCK
        block = lax.optimization_barrier(at(begin))
        made, carry = function(block, carry)
        made = lax.optimization_barrier(made)

        def put(whole: jax.Array, own: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(whole, own, begin, 0)

        return jax.tree.map(put, outputs, made), carry

    def room(block: jax.ShapeDtypeStruct) -> jax.Array:
        shape = _room_for(size), *block.shape[1:]
        return jnp.zeros(shape, block.dtype)

    shapes, _ = jax.eval_shape(lambda carry: function(at(0), carry), carry)
    outputs = jax.tree.map(room, shapes)
    count = jnp.int32(size if count is None else count)
    count = lax.optimization_barrier(count)
    blocks = (count + IN_BLOCK - 1) // IN_BLOCK
    outputs, carry = lax.fori_loop(0, blocks, body, (outputs, carry))
    return jax.tree.map(lambda a: a[:size], outputs), carry


def _room_for(tokens: int) -> int:
    """Whole blocks, two at least: XLA takes out of a loop what all its turns would share."""
    blocks = -(-tokens // IN_BLOCK)
    return IN_BLOCK * max(blocks, 2)


def _in_whole_blocks(array: jax.Array) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[0] = 0, _room_for(len(array)) - len(array)
    return jnp.pad(array, widths)


def each_in_blocks(function: Callable[..., jax.Array], *given: jax.Array) -> jax.Array:
    """`function` of arrays [T, ...], block by block."""

    def of_block(block: tuple, carry: tuple) -> tuple[jax.Array, tuple]:
        return function(*block), carry

    return loop_over_blocks(of_block, given)[0]


def _still(module: nnx.Module) -> Any:
    """The module with parameters that take no gradient."""
    graph, state = nnx.split(module)
    state = lax.stop_gradient(state)
    return nnx.merge(graph, state)


@jax.custom_vjp
def _with_value(plain: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, with the gradient of `plain`."""
    return value


def _with_value_forward(plain: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
    return value, None


def _with_value_backward(_: None, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, jnp.zeros_like(g)


_with_value.defvjp(_with_value_forward, _with_value_backward)


# ---- the parts of a model ------------------------------------------------------------------------


class BlockLayer(NamedTuple):
    """One layer of a kind, as blocks of tokens compute it."""

    definition: Definition
    kind: str
    weights: dict

    def __call__(
        self, x: jax.Array, tokens: Tokens, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache | None]:
        """(y, the new cache) of a block x [IN_BLOCK, 1, D]."""
        block = self.definition.bind(self.weights, slots=tokens.adapters)
        ctx = Context(kernels=Kernels(attention=IN_ORDER))
        rope = rope_of_layers(block.cfg, [self.kind], tokens)
        output = block(x, tokens, ctx, kind=self.kind, rope=rope, cache=cache)
        return output.y, output.cache


@dataclass(frozen=True)
class TokenBlocks:
    """The batch-invariant forms of a model's parts, which `Kernels.blocks` offers to them."""

    def each(self, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """`function` of the tokens of x [..., D], in the shape of x."""
        flat = x.reshape(-1, x.shape[-1])
        y = each_in_blocks(function, flat)
        return y.reshape(x.shape)

    def log_probs(
        self, head: Any, plain: jax.Array, x: jax.Array, labels: jax.Array, temperature: float
    ) -> jax.Array:
        """The log-probability of each label, fp32 [B, S], as an engine finds it.

        x [B, S, D] is the last layer's output, `head` a model. The gradient is that of `plain`.
        """
        head = _still(head)
        x = self.each(head.normed, x)
        heat = jnp.full(labels.size, temperature)

        def of_block(x: jax.Array, labels: jax.Array, heat: jax.Array) -> jax.Array:
            z = head.logits(x)
            z = lax.optimization_barrier(z)
            differences = below_largest(z) / heat[:, None]
            return each_in_blocks(log_prob_of, differences, labels)

        flat = x.reshape(-1, x.shape[-1])
        flat_labels = labels.reshape(-1)
        found = each_in_blocks(of_block, flat, flat_labels, heat)
        value = found.reshape(labels.shape)
        return _with_value(plain, value)

    def layer_of_pages(
        self, layer: BlockLayer, x: jax.Array, tokens: Tokens, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """(y, the new cache) of tokens that are rows of their own in pages, x [T, 1, D]."""
        new = tokens.new
        lengths = new.rows.lengths
        of_rows = new.rows.tables, lengths, new.slots, new.pages, new.places
        starts = jnp.arange(IN_BLOCK + 1, dtype=jnp.int32)

        def of_block(given: tuple, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
            x, positions, adapters, of_rows = given
            tables, lengths, slots, pages, places = of_rows
            rows = PagedRows(tables, lengths, starts)
            new = PagedTokens(rows, slots, pages, places, None, 1)
            facts = _own_rows(positions, new, adapters)
            return BlockLayer(*layer)(x, facts, cache)

        places = jnp.arange(1, len(x) + 1)
        last = jnp.where(lengths > 0, places, 0).max()
        given = x, tokens.positions, tokens.adapters, of_rows
        return loop_over_blocks(of_block, given, cache, last)

    def layer_of_documents(
        self, layer: BlockLayer, plain: jax.Array, x: jax.Array, tokens: Tokens
    ) -> jax.Array:
        """y [B, S, D] of rows of whole documents x [B, S, D]; 0 of padding.

        The gradient is that of `plain`.
        """
        layer = BlockLayer(*layer)
        shape = x.shape[:2]
        segments = tokens.segments
        if segments is None:
            segments = jnp.ones(shape, jnp.int32)
        is_real = segments.reshape(-1) > 0
        # Padding comes last, and is left out. Each document still lies in one piece.
        order = jnp.argsort(~is_real, stable=True)
        moved = jnp.argsort(order)
        starts = moved[_document_begins(segments)]
        weights = map_weights(_value_alone, layer.weights)
        weights = lax.stop_gradient(weights)
        layer = layer._replace(weights=weights)
        block = layer.definition.bind(weights)
        room = len(order) + IN_BLOCK
        keys = DocumentKeysValues.empty(block.cfg.attention, room, x.dtype)
        cache: LayerCache = {}
        for word in branches_of(layer.kind):
            branch = BRANCHES[word]
            cache[branch.name] = keys if branch.has_heads else None

        def of_block(given: tuple, carry: tuple) -> tuple[jax.Array, tuple]:
            x, positions, starts, is_real = given
            first, cache = carry
            places = first + jnp.arange(IN_BLOCK, dtype=jnp.int32)
            lengths = jnp.where(is_real, places - starts + 1, 0)
            new = DocumentTokens(first, starts, lengths)
            facts = _own_rows(positions, new, None)
            y, cache = layer(x, facts, cache)
            return y, (first + IN_BLOCK, cache)

        flat = x.reshape(len(order), 1, -1)
        positions = tokens.positions.reshape(-1, 1)
        given = flat, positions, starts, is_real
        given = jax.tree.map(lambda a: a[order], given)
        first = jnp.int32(0)
        carry = first, cache
        y, _ = loop_over_blocks(of_block, given, carry, is_real.sum())
        value = y[moved]
        value = value.reshape(x.shape)
        return _with_value(plain, value)


def _document_begins(segments: jax.Array) -> jax.Array:
    """The flat place where the document of each token begins, int32 [B * S]."""
    before = jnp.full_like(segments, -1)
    before = before.at[:, 1:].set(segments[:, :-1])
    is_first = segments != before
    is_first = is_first.reshape(-1)
    places = jnp.arange(segments.size, dtype=jnp.int32)
    firsts = jnp.where(is_first, places, 0)
    return lax.cummax(firsts)


def _own_rows(positions: jax.Array, new: Any, adapters: jax.Array | None) -> Tokens:
    """Facts about a block of tokens, each a row of its own."""
    shape = positions.shape
    ones = jnp.ones(shape, jnp.int32)
    facts = tokens_of(shape, positions, ones)
    return replace(facts, new=new, adapters=adapters)


def _value_alone(weight: WeightOrArray) -> WeightOrArray:
    """A weight without what only training reads."""
    if not is_weight(weight):
        return weight
    return replace(
        weight,
        grad_sum=None,
        scales=None,
        places=None,
        input_amax=None,
    )
