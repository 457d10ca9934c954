"""The protocol of objectives: the fields of a batch, how it enters the model, and its losses.

The training step knows no loss of its own. It reduces an objective's counts over the devices once,
divides each sum by its count, and differentiates the total. It logs each loss by its name.
The last stage of a pipeline calls the same objective. Invariant: a loss is a pair (sum, count) over
the global batch. So it depends neither on the mesh nor on the number of micro-batches.
"""

import functools
import pkgutil
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.run import Config
from mjax.errors import UserError, line_of, reason
from mjax.models.architectures import MultiTokenDecoder
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import EXPERT_LOADS, Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.models.heads.multi_token import field_names, shifted_fields, with_weight
from mjax.models.towers.modalities import MODALITIES
from mjax.models.towers.tiles import CORNERS
from mjax.sharding.collectives import Parallel

# The fields of an objective, of the layers, and the place of each token (`train/batch.py`).
Batch = dict[str, jax.Array]

# The same on the host, before it is placed on the mesh.
HostBatch = dict[str, np.ndarray]

# fp32 scalars by name: sums or shares of losses and statistics, or their counts.
Scalars = dict[str, jax.Array]


@dataclass(frozen=True)
class BatchField:
    """One array of a batch.

    axes: logical axes (`sharding/rules.py`): "batch" first, then "seq", or "target" of what an
        encoder-decoder's decoder reads, if it has one. "neighbors", "retrieved": of each row, those
        of all chunks, and the tokens of one. "images", "image_tokens" and "sounds", "sound_tokens":
        likewise. "pixels", "mels": the numbers that such a token is embedded from. "corners": of a
        token, the features that it is made of (`models/towers/tiles.py`).
    pad: the value in rows that fill up a batch. They count in no loss.
    """

    dtype: type
    axes: tuple[str, ...] = ("batch", "seq")
    pad: float = 0


# The fields that layers read. They are part of every batch, whatever the objective.
LAYER_FIELDS = {
    "segment_ids": BatchField(np.int32),
    "positions": BatchField(np.int32),
}


# The fields with the columns of tokens along axes that only some batches have, by axis.
FURTHER_COLUMNS = {
    "target": "decoder_columns",
    "retrieved": "neighbor_columns",
}
FURTHER_COLUMNS |= {modality.axes[1]: modality.columns for modality in MODALITIES.values()}


def further_lengths(cfg: Config) -> dict[str, int | None]:
    """The lengths of the axes of a batch besides its rows and the columns of a row."""
    lengths = {"pixels": cfg.model.vision.numbers, "corners": CORNERS}
    companions = cfg.model.companions(cfg.data.seq_length)
    if companions is not None:
        sizes = companions.count, companions.length
        lengths |= dict(zip(companions.axes, sizes, strict=True))
    for name in cfg.model.modalities:
        tower = cfg.model.tower(name)
        length = tower.row_length(cfg.item_size(name))
        sizes = tower.max_items, length, tower.numbers
        lengths |= dict(zip(MODALITIES[name].axes, sizes, strict=True))
    return lengths | {"target": cfg.data.target_length}


@runtime_checkable
class Objective(Protocol):
    """An objective of training, one for a run. It holds no arrays.

    fields: of its batches, besides `LAYER_FIELDS`.
    """

    fields: Mapping[str, BatchField]

    def counts(self, batch: Batch) -> Scalars:
        """The divisor of each loss: the part of this device's rows and columns, fp32 [].

        Its names are those of the losses. One of them is "loss", the one of held-out data.
        """

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> Activation:
        """The input of the first layer: [B, S/tp, D], or `Streams` of a model with several."""

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        """The sum of each loss over this device's rows and columns, fp32 [].

        x is the output of the last layer, as `embed` gives its input. The sums are equal on all tp
        devices. A sum under `jax.lax.stop_gradient` is logged and moves nothing. An entry by the
        name of a statistic of layers is this device's share, and is added to theirs.
        """


@runtime_checkable
class FieldMaker(Protocol):
    """An objective that makes its fields from those of a data set for next-token prediction."""

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """The fields to add to rows `rows`, int [B], of the global batch of a step.

        A row's fields are a function of (seed, step, row of the global batch) and of the row alone.
        """


@runtime_checkable
class FieldDeriver(Protocol):
    """An objective that derives further fields of a batch on the devices."""

    def derive_fields(self, batch: Batch, parallel: Parallel) -> Batch:
        """The fields to add to this device's part of a batch, before micro-batches are cut."""


@runtime_checkable
class TokenDescriber(Protocol):
    """An objective of a model whose layers work on several sequences."""

    def tokens(self, batch: Batch, base: Tokens, ctx: Context) -> Tokens:
        """Facts about the tokens of all sequences, those of the decoder first.

        `base` is about the tokens that "segment_ids", "positions" and "columns" belong to. Its
        segments are None where a row holds one document.
        """


def described_tokens(objective: Objective, batch: Batch, base: Tokens, ctx: Context) -> Tokens:
    """`base`, or what the objective adds to it or puts in its place."""
    return objective.tokens(batch, base, ctx) if isinstance(objective, TokenDescriber) else base


@runtime_checkable
class Measurer(Protocol):
    """An objective that measures more where a model is evaluated."""

    def for_evaluation(self) -> Objective:
        """The objective of evaluation, with the same fields."""


@runtime_checkable
class WholeBatch(Protocol):
    """An objective that compares all rows of a step with each other: it is one micro-batch."""

    one_micro_batch: bool


class NextToken:
    """The cross-entropy of the next token in nats, a mean over unmasked tokens."""

    fields: ClassVar[Mapping[str, BatchField]] = {
        "tokens": BatchField(np.int32),
        "labels": BatchField(np.int32),
        "loss_mask": BatchField(np.float32),
    }

    def counts(self, batch: Batch) -> Scalars:
        return {"loss": jnp.sum(batch["loss_mask"].astype(jnp.float32))}

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed(batch["tokens"], tokens, ctx)

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        loss = edges.head_loss(decoder_of(x), batch["labels"], batch["loss_mask"], ctx)
        return {"loss": loss}


@dataclass(frozen=True)
class MultiToken(NextToken):
    """Next-token prediction, and that of tokens further ahead by `depths` layers.

    The layers are those of `models/heads/multi_token.py`. "loss" is the former. "mtp_1", .. are the
    mean cross-entropies of the depths. The gradient of each has the weight `factor` / `depths`, as
    in DeepSeek-V3 and Megatron-LM.
    """

    depths: int
    factor: float

    @classmethod
    def of(cls, cfg: Config) -> "MultiToken":
        return cls(cfg.model.num_nextn_predict_layers, cfg.train.mtp_loss_scaling_factor)

    def derive_fields(self, batch: Batch, parallel: Parallel) -> Batch:
        return shifted_fields(batch, self.depths, parallel)

    def counts(self, batch: Batch) -> Scalars:
        counts = super().counts(batch)
        for depth in range(1, self.depths + 1):
            _, _, mask = field_names(depth)
            counts[f"mtp_{depth}"] = jnp.sum(batch[mask].astype(jnp.float32))
        return counts

    def losses(
        self, edges: MultiTokenDecoder, x: jax.Array, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        x = edges.final_norm(x)
        loss = edges.token_loss(x, batch["labels"], batch["loss_mask"], ctx)
        found = {"loss": loss}
        for depth in range(1, self.depths + 1):
            ahead, labels, mask = (batch[name] for name in field_names(depth))
            output = edges.predict(depth, x, ahead, tokens, ctx)
            x = output.y
            loss = edges.token_loss(x, labels, mask, ctx)
            found[f"mtp_{depth}"] = with_weight(loss, self.factor / self.depths)
            for name in (*edges.statistics, EXPERT_LOADS):
                if name in output.statistics:
                    found[name] = found.get(name, 0.0) + output.statistics[name]
        return found


NEXT_TOKEN = "next_token"

# The objective of this name, by the architecture; that of others is `NextToken`.
_NEXT_TOKEN = {
    "multi_token_decoder": "mjax.objectives.objective:MultiToken.of",
    "retro": "mjax.objectives.retrieved:WithNeighbors",
    "text_with_items": "mjax.objectives.text_with_items:WithItems",
}

# What makes objectives of a config, by their names in `train.objective`.
CONFIGURED = {
    "masked_lm": "mjax.objectives.masked:MaskedTokens.of",
    "classify": "mjax.objectives.masked:ClassifyRows.of",
    "span_corruption": "mjax.objectives.span_corruption:CorruptedSpans",
    "classify_images": "mjax.objectives.image_classes:ClassifyImages",
    "contrastive": "mjax.objectives.contrastive:Contrastive",
}


def objective_of(cfg: Config) -> Objective:
    """The objective that `train.objective` names: one of ours, or module.path:Name, called."""
    name = cfg.train.objective
    if name == NEXT_TOKEN:
        own = _NEXT_TOKEN.get(cfg.model.architecture.name)
        return NextToken() if own is None else pkgutil.resolve_name(own)(cfg)
    if name in CONFIGURED:
        return pkgutil.resolve_name(CONFIGURED[name])(cfg)
    try:
        objective = pkgutil.resolve_name(name)()
        is_one = isinstance(objective, Objective)
    except Exception as e:  # whatever the code of a user raises
        why = reason(e) if isinstance(e, ImportError) else f"{type(e).__name__}: {reason(e)}"
        raise UserError(
            f"train.objective={name}: {why}{line_of(e)}; set it to "
            f"{', '.join((NEXT_TOKEN, *CONFIGURED))}, or to module.path:Name of a class that can "
            "be imported and takes no arguments"
        ) from e
    if not is_one or isinstance(objective, type):
        raise UserError(
            f"train.objective={name} is no objective: it needs fields, counts, embed and losses, "
            "as objectives/objective.py says; mend the class or name another"
        )
    fields = objective.fields
    kinds = fields.values() if isinstance(fields, Mapping) else [fields]
    if not all(isinstance(kind, BatchField) for kind in kinds):
        raise UserError(f"train.objective={name}: fields is no dictionary of BatchField; mend it")
    return objective


def divisor(count: jax.Array) -> jax.Array:
    """The divisor of a sum: its count, or 1 where nothing counts and the sum is 0.

    The weights of a mask may sum to less than 1.
    """
    return jnp.where(count == 0, 1, count)


def require_dictionary(objective: Objective, method: str, found: object) -> str:
    """The name of a method; raises `UserError` unless it returned a dictionary."""
    where = f"{type(objective).__module__}:{type(objective).__qualname__}.{method}"
    if not isinstance(found, Mapping):
        raise UserError(f"{where} returns {reprlib.repr(found)}; give a dictionary")
    return where


def require_scalars(objective: Objective, method: str, found: object, *names: str) -> None:
    """Raise `UserError` unless what a method of an objective returned is a number for each name."""
    where = require_dictionary(objective, method, found)
    for name in names:
        if name not in found:
            have = ", ".join(map(str, found)) or "nothing"
            raise UserError(f"{where} returns {have}, without {name!r}; add it")
    for name, value in found.items():
        is_number = isinstance(value, (int, float)) or hasattr(value, "shape")
        shape = getattr(value, "shape", ()) if is_number else type(value).__name__
        if shape != ():
            raise UserError(f"{where}: {name!r} is no number ({shape}); give one, as by jnp.sum")


@dataclass(frozen=True)
class Denominators:
    """The divisors of the sums of a step.

    counts: of each loss, in the global batch.
    of_statistics: of each statistic of the layers.
    tp: each device of it computes the same losses, and takes a part of them as its share.
    loss_scale: what the total is multiplied by before it is differentiated (`train/loss_scale.py`),
        fp32 [], or None.
    """

    counts: Scalars
    of_statistics: dict[str, jax.Array | int]
    tp: int
    loss_scale: jax.Array | None = None

    def zeros(self) -> Scalars:
        """A zero for each loss and statistic."""
        return {name: jnp.float32(0) for name in (*self.counts, *self.of_statistics)}

    def shares(self, losses: Scalars, statistics: Scalars) -> Scalars:
        """This device's shares of the global losses, from its sums."""
        shares = {}
        for name, total in losses.items():
            shares[name] = total / divisor(self.counts[name]) / self.tp
        for name, total in statistics.items():
            shares[name] = total / self.of_statistics[name]
        return shares

    def differentiated(self, shares: Scalars) -> jax.Array:
        """The value to differentiate: the sum of a device's shares, times the loss scale."""
        total = functools.reduce(jnp.add, shares.values())
        return total if self.loss_scale is None else total * self.loss_scale

    def cotangents_of_statistics(self) -> Scalars:
        """The derivatives of `differentiated` by the sums of statistics."""
        factors = self.factors()
        found = {name: factors[name] for name in self.of_statistics}
        if self.loss_scale is None:
            return found
        return {name: factor * self.loss_scale for name, factor in found.items()}

    def unscaled(self, gradients: dict) -> dict:
        """Gradients of the losses from those of what was differentiated, in their dtypes."""
        if self.loss_scale is None:
            return gradients
        factor = 1 / self.loss_scale
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

    def factors(self) -> Scalars:
        """The factors that make shares of sums: `shares`, up to rounding."""
        factors = {}
        for name, count in self.counts.items():
            factors[name] = 1 / divisor(count) / self.tp
        for name, count in self.of_statistics.items():
            factors[name] = jnp.float32(1 / count)
        return factors
