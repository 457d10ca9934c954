"""The protocol of objectives: the fields of a batch, how it enters the model, and its losses.

The training step knows no loss of its own. It reduces an objective's counts over the devices once,
divides each sum by its count, and differentiates the total. It logs each loss by its name.
The last stage of a pipeline calls the same objective. Invariant: a loss is a pair (sum, count) over
the global batch. So it depends neither on the mesh nor on the number of micro-batches.
"""

import functools
import pkgutil
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.errors import UserError, line_of, reason
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation
from mjax.models.decoder import Decoder
from mjax.objectives.fields import Batch, BatchField, HostBatch, Scalars
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec


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


@runtime_checkable
class DatasetReader(Protocol):
    """An objective that trains on samples of another kind than tokens in a row.

    dataset: LABELLED, SPANS or a kind of records of answers.
    """

    dataset: str


@runtime_checkable
class OwnAxes(Protocol):
    """An objective whose fields have axes of their own.

    lengths: of these axes.
    """

    lengths: Mapping[str, int]


@runtime_checkable
class LayerReader(Protocol):
    """An objective with a loss of the outputs of some layers, and perhaps weights of its own.

    outputs: the numbers of those layers; () if it has no such loss.
    layer_names: the names of those losses.
    specs: declarations of its weights by name. They are trained and saved, and never exported.
    """

    outputs: tuple[int, ...]
    layer_names: tuple[str, ...]
    specs: Mapping[str, ParamSpec]

    def layer_losses(
        self,
        outputs: jax.Array,
        weights: Mapping[str, jax.Array],
        batch: Batch,
        ctx: Context,
        counted: jax.Array | None = None,
    ) -> Scalars:
        """Sums of losses as of `losses`; outputs [N, B, S/tp, D] are in their order.

        counted: bool [N], those of a stage's layers. Only these count; None: all do.
        """


@runtime_checkable
class TeacherReader(LayerReader, Protocol):
    """An objective whose fields another model computes.

    teacher: that model. `outputs` are as many as the layers of it that are fields.
    """

    teacher: ModelConfig


@runtime_checkable
class DeviceSharer(Protocol):
    """An objective with a role, such as a teacher or an engine, that may have its own devices.

    own_devices: (their number, the key that says so); 0 for none. They are the last of a run, as
    many in each process.
    """

    own_devices: tuple[int, str]


def share_devices(
    objective: Objective, devices: Sequence[jax.Device]
) -> tuple[list[jax.Device], list[jax.Device]]:
    """(the devices of a run that train, those that a role of the objective has for itself).

    Raises `UserError`, which begins with the key, where none would be left to train or processes
    would not have as many.
    """
    count, key = objective.own_devices if isinstance(objective, DeviceSharer) else (0, "")
    if not count:
        return list(devices), []
    of_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        of_process.setdefault(device.process_index, []).append(device)
    each, rest = divmod(count, len(of_process))
    if rest:
        raise UserError(
            f"{key}: {count} devices are not as many in each of {len(of_process)} processes; give "
            f"a multiple of {len(of_process)}"
        )
    if each >= min(map(len, of_process.values())):
        raise UserError(
            f"{key}: {count} of {len(devices)} devices do not leave one to train and one for it; "
            "give it fewer, or start more devices"
        )
    own = [device for local in of_process.values() for device in local[-each:]]
    return [device for device in devices if device not in own], own


OWN_WEIGHTS = "objective"  # the entry of the parameters that holds the weights of `LayerReader`


def own_specs(objective: Objective) -> dict:
    """The declarations of the weights of an objective, as an entry of the parameters."""
    specs = dict(objective.specs) if isinstance(objective, LayerReader) else {}
    return {OWN_WEIGHTS: specs} if specs else {}


@runtime_checkable
class PaddedRows(Protocol):
    """An objective whose rows hold one document each, and then padding."""

    pads_rows: bool


# Kinds of datasets: tokens in a row, a class for each text, texts with spans cut out of them.
TOKENS, LABELLED, SPANS = "tokens", "labelled", "spans"
# Records of answers: pairs, single ones with a mismatched one beside each, single ones, in steps.
PAIRS, MATCHED, SINGLE, STEPS = "pairs", "matched", "single", "steps"


def dataset_kind(cfg: Config) -> str:
    """The kind of dataset that the objective of a config trains on."""
    objective = objective_of(cfg)
    return objective.dataset if isinstance(objective, DatasetReader) else TOKENS


NEXT_TOKEN = "next_token"

# The objective of this name, by the architecture; that of others is `NextToken`.
_NEXT_TOKEN = {
    "multi_token_decoder": "mjax.objectives.next_token:MultiToken",
    "retro": "mjax.objectives.retrieved:WithNeighbors",
    "text_with_items": "mjax.objectives.text_with_items:WithItems",
}

# Objectives by their names in `train.objective`.
_CLASSES = {
    "masked_lm": "mjax.objectives.masked:MaskedTokens",
    "classify": "mjax.objectives.masked:ClassifyRows",
    "span_corruption": "mjax.objectives.span_corruption:CorruptedSpans",
    "classify_images": "mjax.objectives.image_classes:ClassifyImages",
    "contrastive": "mjax.objectives.contrastive:Contrastive",
    "preference": "mjax.post.preferences.objective:Preference",
    "distill": "mjax.post.distillation.teacher_divergence:Distillation",
    "reward": "mjax.post.preferences.rewards:Reward",
    "policy": "mjax.post.policy.policy_objective:PolicyObjective",
    "value": "mjax.post.policy.values:ValueObjective",
}


@runtime_checkable
class MadeOfConfig(Protocol):
    """A class of objectives that the config makes; others are called without arguments."""

    def of(self, cfg: Config) -> Objective:
        """The objective of a run, by a class method."""


@dataclass(frozen=True)
class OfConfig:
    """The part of an objective that holds the config of its run."""

    cfg: Config

    @classmethod
    def of(cls, cfg: Config) -> Self:
        return cls(cfg)


def objective_of(cfg: Config) -> Objective:
    """The objective that `train.objective` names: one of ours, or module.path:Name."""
    name = cfg.train.objective
    if name == NEXT_TOKEN:
        default = "mjax.objectives.next_token:NextToken"
        own = _NEXT_TOKEN.get(cfg.model.architecture.name, default)
        return pkgutil.resolve_name(own).of(cfg)
    if name in _CLASSES:
        return pkgutil.resolve_name(_CLASSES[name]).of(cfg)
    try:
        make = pkgutil.resolve_name(name)
        objective = make.of(cfg) if isinstance(make, MadeOfConfig) else make()
        is_one = isinstance(objective, Objective)
    except Exception as e:  # whatever the code of a user raises
        why = reason(e) if isinstance(e, ImportError) else f"{type(e).__name__}: {reason(e)}"
        raise UserError(
            f"train.objective={name}: {why}{line_of(e)}; set it to "
            f"{', '.join((NEXT_TOKEN, *_CLASSES))}, or to module.path:Name of a class that can "
            "be imported and takes no arguments, or has a class method of(cfg)"
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
    assert isinstance(found, Mapping)
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

    def cotangents(self, names: Iterable[str]) -> Scalars:
        """The derivatives of `differentiated` by the sums of these names."""
        factors = self.factors()
        found = {name: factors[name] for name in names}
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
        for name, number in self.of_statistics.items():
            factors[name] = jnp.float32(1 / number)
        return factors
