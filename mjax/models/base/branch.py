"""A residual branch of a layer: what attention, a feed-forward and every other mixer are made as.

`config/languages/layer_pattern.py` names the branches and the class of each. A class brings its
parameters with the names of their matmuls, its computation, its cache and the FLOPs that are not
those of its weights. Nothing else knows it.
"""

import pkgutil
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
from flax import nnx

from mjax.config.languages.layer_pattern import BRANCHES, branches_of, of_decoder
from mjax.config.schema.model import ModelConfig
from mjax.kernels import Choice
from mjax.kernels.elementwise.norm import NormFork
from mjax.models.base.context import Context, Tokens
from mjax.models.base.params import StatisticCount
from mjax.models.base.streams import Activation, SharedWeights
from mjax.models.base.weight import Weight
from mjax.sharding.collectives import Parallel

# The cache of a branch: a tree of arrays, or None.
BranchCache = jax.Array | tuple | dict | None

# The caches of a layer, by the names of its branches.
LayerCache = dict[str, BranchCache]

# What the chooser answers, by op.
KernelChoices = dict[str, Choice]

# Rotary tables (cos, sin), by the word of a branch.
Rope = dict[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class CacheSpec:
    """An array of a cache: its shape, and its logical axes (`sharding/rules.py`) or None.

    dtype: its own, whatever the model's is; None: the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None


class HeadSizes(NamedTuple):
    """The heads of attention: of queries and of keys and values; the size of a head of queries and
    keys, and of one of values."""

    heads: int
    kv_heads: int
    size: int
    value_size: int

    @property
    def kv_channels(self) -> int:
        """Channels of the keys and values of a token."""
        return self.kv_heads * (self.size + self.value_size)


class Source(NamedTuple):
    """The other stream that a branch reads.

    x: its activations [B, S/tp, D]; None where keys are cached. tokens: the facts about its tokens.
    """

    x: jax.Array | None
    tokens: Tokens


@dataclass(frozen=True)
class BranchInputs:
    """The inputs of a branch besides weights and activations.

    word: which row of `BRANCHES` it is (`config/languages/layer_pattern.py`).
    salt: tells its draws of dropout from those of others.
    layer: the number of its layer in the model.
    norm: what the norm before the branch gave.
    shared, source: of a model with two streams (`models/base/streams.py`).
    """

    tokens: Tokens
    ctx: Context
    word: str
    rope: Rope = field(default_factory=dict)
    salt: jax.Array | int = 0
    layer: jax.Array | int = 0
    shared: SharedWeights | None = None
    source: Source | None = None
    norm: NormFork | None = None

    def reading(self, x: jax.Array, *weights: Weight) -> tuple[Weight, ...]:
        """Weights that multiply x, with its maximum if it is what the norm gave and measured."""
        norm = self.norm
        if norm is None or norm.amax is None or norm.normed is not x or self.ctx.probe.see:
            return weights
        amax = self.ctx.parallel.pmax(norm.amax, "tp")
        return tuple(replace(w, input_amax=amax) if w.recipe else w for w in weights)


class BranchOutput(NamedTuple):
    """y [B, S/tp, D], this device's shares of statistics, fp32 [] by name, the new cache."""

    y: jax.Array
    statistics: dict[str, jax.Array] = {}
    cache: BranchCache = None


@dataclass(frozen=True)
class Workload:
    """A micro-batch on one device, as far as the choice of a branch's kernels depends on it.

    dtype: of activations.
    rows, length: sequences and the tokens of each, before tp cuts the tokens.
    fp8, fp8_experts: whether matmuls, and those of experts, are in 8 bits.
    experts, expert_exchange: config keys of `train`.
    shared_prefixes: `data.shared_prefixes`.
    rounds_dispatch: `precision.fp8_dispatch`.
    """

    dtype: str
    rows: int
    length: int
    parallel: Parallel
    fp8: bool
    fp8_experts: bool
    experts: str
    expert_exchange: str
    shared_prefixes: bool = False
    rounds_dispatch: bool = False


# [tokens, heads] that pass through memory: rotary embedding or biases of queries, keys and values.
PASSES_OF_HEADS = 4


class BranchModule(nnx.Module):
    """The base of all branches: one with no cache, and no FLOPs but those of its weights.

    `__init__(cfg, out_std, rngs)` declares the parameters; `out_std` is the standard deviation of
    the projection back to the residual stream. `__call__(x, inputs, cache)` gives a `BranchOutput`
    of x [B, S/tp, D].
    """

    @staticmethod
    def statistics(cfg: ModelConfig) -> dict[str, StatisticCount]:
        """The names of the statistics that it gives, and what each is divided by."""
        return {}

    @staticmethod
    def begin(x: Activation, rows: int, cfg: ModelConfig) -> Activation:
        """The input of the first layer, with what branches of this class add up over all layers.

        There are `rows` sequences on this device.
        """
        return x

    @staticmethod
    def finish(
        x: Activation, cfg: ModelConfig, parallel: Parallel
    ) -> tuple[Activation, dict[str, jax.Array]]:
        """(the output of the last layer without what `begin` put beside it, shares of statistics).

        The statistics are those of all layers together.
        """
        return x, {}

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        """FLOPs of a token, forward and backward, besides its products with weights.

        It is the mean over a sequence of `seq_length` tokens.
        """
        return 0.0

    @staticmethod
    def heads(cfg: ModelConfig) -> HeadSizes | None:
        """The heads of a branch that is attention."""
        return None

    @staticmethod
    def kernels(cfg: ModelConfig, work: Workload) -> KernelChoices:
        """The kernels that it calls besides those of attention, norms and activations, by op."""
        return {}

    @classmethod
    def memory_traffic(cls, cfg: ModelConfig, kernels: KernelChoices, seq_length: int) -> float:
        """Elements of a token that pass through memory, forward and backward.

        Its matmuls, its norm and the residual stream are not counted. `kernels` are the
        choices that `kernels` gives, `seq_length` the tokens of a sequence.
        """
        heads = cls.heads(cfg)
        if heads is None:
            return 0.0
        return PASSES_OF_HEADS * (heads.heads * heads.size + heads.kv_channels)

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> BranchCache:
        """The cache, as a tree of `CacheSpec`, of `length` tokens in each of `batch` rows.

        `tp` devices share it.
        """
        return None


def branch_class(word: str) -> type[BranchModule]:
    """The class of a branch."""
    return pkgutil.resolve_name(BRANCHES[word].module)


def begin_layers(x: Activation, rows: int, cfg: ModelConfig) -> Activation:
    """The input of the first layer as all branches of a model begin it (`BranchModule.begin`)."""
    for word in sorted(cfg.branches):
        x = branch_class(word).begin(x, rows, cfg)
    return x


def finish_layers(
    x: Activation, cfg: ModelConfig, parallel: Parallel
) -> tuple[Activation, dict[str, jax.Array]]:
    """The output of the last layer, and statistics of all layers (`BranchModule.finish`)."""
    statistics: dict[str, jax.Array] = {}
    for word in sorted(cfg.branches):
        x, found = branch_class(word).finish(x, cfg, parallel)
        statistics |= found
    return x, statistics


def model_heads(cfg: ModelConfig) -> HeadSizes | None:
    """The heads of the first of a model's kinds of attention, if it has one."""
    found = [branch_class(word).heads(cfg) for word in BRANCHES if word in cfg.branches]
    return next((heads for heads in found if heads is not None), None)


def cache_specs(
    cfg: ModelConfig, batch: int, length: int, tp: int = 1, source_length: int = 0
) -> list[LayerCache | None]:
    """The caches of all layers, as trees of `CacheSpec` (`BranchModule.cache`).

    Beside a decoder, an encoder has none. Its decoder also keeps keys of `source_length` tokens.
    """
    specs: list[LayerCache | None] = []
    for kind in cfg.layer_kinds:
        if cfg.architecture.has_streams and not of_decoder(kind):
            specs.append(None)
            continue
        layer: LayerCache = {}
        for word in branches_of(kind):
            slots = source_length if BRANCHES[word].mask == "cross" else length
            sizes = cfg.of_layer(kind), batch, slots, tp
            layer[BRANCHES[word].name] = branch_class(word).cache(*sizes)
        specs.append(layer)
    return specs
