"""The inputs of a forward pass besides weights and activations.

`Context` is static: it selects code. `Tokens` is data: it travels with the batch and is sharded
like it. Both default to an ordinary single-device forward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.config.languages.layer_pattern import DECODER
from mjax.kernels.attention.paged import PagedRows
from mjax.sharding.collectives import LOCAL, Parallel


@dataclass(frozen=True)
class Kernels:
    """The implementations that a forward pass asks for.

    attention, experts, expert_exchange: config keys of `train`.
    deterministic: whether the program is, for `run.deterministic` or for blocks.
    cp_type, cp_a2a: config keys of `mesh`.
    permute: false where only some devices may run a layer, because a ppermute waits for all.
    measures_norms: whether norms find the largest magnitude of what they give, which scales it.
    overlap_rows: tokens in a tp shard from which on exchanges run under matmuls; None: never.
    blocks: what computes layers and heads in blocks of tokens (`models/runtime/token_blocks.py`),
        or None.
    """

    attention: str = "auto"
    experts: str = "auto"
    expert_exchange: str = "auto"
    deterministic: bool = False
    cp_type: str = "auto"
    cp_a2a: int = 1
    permute: bool = True
    measures_norms: bool = False
    overlap_rows: int | None = None
    blocks: Any = None


@dataclass(frozen=True)
class Documents:
    """Promises about the documents in a sequence.

    most: a bound on their number; 1 promises that every sequence is a single document, 0 that the
        number is unknown.
    padded: every sequence is one document, and then maybe padding.
    images: a bound on the images of a packed tower's row; a frame of a video and the padding count
        as one each. 0: the number is unknown.
    """

    most: int = 0
    padded: bool = False
    images: int = 0


PADDED_ROWS = Documents(most=2, padded=True)


@dataclass(frozen=True)
class Training:
    """The parts of training's forward pass that other passes do without.

    dropout: whether dropout, the jitter of routers, Sinkhorn's routing and noise are on.
    capacity: whether experts drop what is above `model.moe.capacity_factor`: in evaluation, too.
        Generation sees a part of a sequence at a time, and drops nothing.
    rounds_dispatch: whether experts read tokens in 8 bits (`precision.fp8_dispatch`): in
        evaluation as `precision.fp8_evaluation` says, in generation never.
    rounds_attention: the same of attention in 8 bits (`precision.fp8_attention`).
    noise: what adds noise to embeddings (`models/embedding_noise.py`), or None.
    label_smoothing, z_loss: terms of the loss (`train.label_smoothing`, `train.z_loss`).
    temperature: what logits are divided by in losses and scores of tokens.
    loss_chunk: tokens whose logits exist at a time (`train.loss_chunk`); None: by memory.
    head_remat: the remat policy of layers that an objective applies.
    keeps_all: whether a layer keeps all that its backward asks for.
    """

    dropout: bool = False
    capacity: bool = False
    rounds_dispatch: bool = False
    rounds_attention: bool = False
    noise: Callable | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0
    loss_chunk: int | None = None
    head_remat: str = "none"
    keeps_all: bool = False


@dataclass(frozen=True)
class Probe:
    """A look at activations.

    figures: what finds the figures of layers (`models/base/activation_statistics.py`), or None.
    outputs: what keeps the outputs of layers (`models/runtime/layer_outputs.py`), or None.
    see: a function (name, x) that may keep or replace activations at the named places of a block
        (`infer/trace.py`).
    """

    figures: Any = None
    outputs: Any = None
    see: Callable[[str, jax.Array], jax.Array] | None = None

    @property
    def of_layers(self) -> list:
        """The parts that see the input of the first layer, and the output of each."""
        return [look for look in (self.outputs, self.figures) if look is not None]


@dataclass(frozen=True)
class Context:
    """Static choices of a forward pass.

    towers: the handles of modalities whose layers have mesh sizes of their own
        (`models/towers/tower_mesh.py`).
    run_layers: what runs the layers in the place of `Decoder.layers`, after the model; or None.
    """

    parallel: Parallel = LOCAL
    towers: Mapping[str, Parallel] = field(default_factory=dict)
    kernels: Kernels = Kernels()
    documents: Documents = Documents()
    training: Training = Training()
    probe: Probe = Probe()
    run_layers: Callable | None = None

    def of(self, stream: str) -> "Context":
        """The context of the layers that work on a stream."""
        return replace(self, parallel=self.towers.get(stream, self.parallel))

    def in_training(self, **changes: object) -> "Context":
        """The context with these fields of `training`."""
        return replace(self, training=replace(self.training, **changes))

    def overlaps(self, rows: int) -> bool:
        """Whether matmuls exchange shards of `rows` tokens over tp piecewise."""
        least = self.kernels.overlap_rows
        return self.parallel.tp > 1 and least is not None and rows >= least

    def tap(self, name: str, x: jax.Array) -> jax.Array:
        """`x`, or what the probe makes of it."""
        return x if self.probe.see is None else self.probe.see(name, x)


class NewTokens(NamedTuple):
    """The tokens that a forward pass adds to caches.

    first: int32 [B], the tokens that a row's caches hold before, which is its first new slot.
    count: int32 [B], how many of a row's new tokens are real; they come first. None: all are.
    """

    first: jax.Array
    count: jax.Array | None = None

    def slots(self, tokens: int) -> jax.Array:
        """The slots of `tokens` new tokens, int32 [B, S]."""
        return self.first[:, None] + jnp.arange(tokens, dtype=jnp.int32)

    def is_real(self, tokens: int) -> jax.Array:
        """Which of `tokens` new tokens are real, bool [B, S], by the `count`."""
        return jnp.arange(tokens, dtype=jnp.int32) < self.count[:, None]


@register_dataclass
@dataclass(frozen=True)
class PagedTokens:
    """The tokens that a step of serving adds to caches in pages, [R, each] or [1, S] of all rows.

    rows: the pages of each row, its length, and which of the flat tokens are its own.
    slots: int32 [R], the place of each row in caches of states.
    pages, places: int32 [T], the page of each token and its place there; (0, 0) for padding.
    count: int32 [1], how many of tokens [1, S] are real; None: each row has `each` tokens.
    """

    rows: PagedRows
    slots: jax.Array
    pages: jax.Array
    places: jax.Array
    count: jax.Array | None
    each: int | None = field(metadata={"static": True})

    def is_real(self, tokens: int) -> jax.Array:
        """Which of `tokens` new tokens are real, bool [1, S], by the `count`."""
        return jnp.arange(tokens, dtype=jnp.int32) < self.count[:, None]

    @property
    def are_first(self) -> jax.Array:
        """Which rows had no token before these, bool [R]."""
        return self.rows.lengths == self.rows.starts[1:] - self.rows.starts[:-1]


@register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Facts about each token, whole along tp. All int32.

    positions [B, S]: for position embeddings.
    segments [B, S] or None: attention stays within equal values.
    prefixes [B, S] or None: the segment whose tokens a token reads as well as those of its own, as
        if they came just before them; 0: none. The segments that read one follow it at once.
    rows [B], columns [S]: the token's place in the global batch, which keys dropout and orders
        attention.
    key: of dropout, or None.
    types [B, S] or None: for embeddings of token types; None: all of the first.
    new: the place of the tokens in caches, or None.
    others: of a model with several streams: facts about the tokens of those besides the decoder's,
        by stream (`config/languages/layer_pattern.py`).
    features: of a text with items, by modality, [B, S]: which of all tokens of its row's items
        (padding counts) stands in the place of a token; -1: none.
    weights: fp32 [B, S, 4], of items in tiles, by modality: `features` are [B, S, 4] then, and what
        stands in the place of a token is their sum, each times its weight
        (`models/towers/tiles.py`).
    axes [B, S, A] or None: positions along several axes, which RoPE reads in the place of
        `positions`. A text has time, row and column. Patches have row and column, and the rows and
        columns of their image. None: all are `positions`.
    windows [B, S] or None: the windows of patches (`Branch.within`).
    adapters [B, S] or [B] or None: the slots of tokens, or of rows, where weights have several
        adapters (`interop/adapter_stack.py`); 0: none.
    experts [B, S, L, k] or None: the experts that tokens go to in each of the L layers that have
        some, whatever their routers would choose; -1: as these do.
    """

    positions: jax.Array
    segments: jax.Array | None
    rows: jax.Array
    columns: jax.Array
    key: jax.Array | None = None
    new: NewTokens | PagedTokens | None = None
    types: jax.Array | None = None
    others: dict[str, "Tokens"] = field(default_factory=dict)
    features: dict[str, jax.Array] = field(default_factory=dict)
    weights: dict[str, jax.Array] = field(default_factory=dict)
    axes: jax.Array | None = None
    windows: jax.Array | None = None
    adapters: jax.Array | None = None
    prefixes: jax.Array | None = None
    experts: jax.Array | None = None

    def of(self, stream: str) -> "Tokens | None":
        """Facts about the tokens of a stream; None: it is left out."""
        return self if stream == DECODER else self.others.get(stream)


def tokens_of(
    shape: tuple[int, ...],
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    rows: jax.Array | None = None,
    columns: jax.Array | None = None,
    key: jax.Array | None = None,
) -> Tokens:
    """The tokens of a plain [B, S] batch: what is left out is of sequences in order, unpacked."""
    batch, seq = shape
    columns = jnp.arange(seq, dtype=jnp.int32) if columns is None else columns
    rows = jnp.arange(batch, dtype=jnp.int32) if rows is None else rows
    positions = jnp.broadcast_to(columns, shape) if positions is None else positions
    return Tokens(positions, segments, rows, columns, key)


def scaled(x: jax.Array, factor: float | None) -> jax.Array:
    """x times a factor of the config, in x's dtype."""
    if factor is None:
        return x
    return x * jnp.asarray(factor, x.dtype)
