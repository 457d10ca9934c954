"""Objectives of encoders: tokens that are hidden, whether two texts follow each other, classes.

BERT (arXiv 1810.04805) hides 15 % of the tokens and predicts them from all others; its second loss,
from the first token of a row, is whether the row's second text follows the first one. A data set of
masked samples (`data/sentences/masked.py`) gives all fields. On a stream of tokens, `make_fields`
hides some anew at each step, as RoBERTa does (arXiv 1907.11692).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.run import Config, MaskedDataConfig
from mjax.models.architectures import Encoder
from mjax.models.base.context import Context, Tokens
from mjax.models.heads.encoder_heads import has_first_token
from mjax.objectives.fields import Batch, BatchField, HostBatch, Scalars
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import LABELLED

# The class of a row: whether its texts were exchanged, or what it is labelled with. -1: none.
ROW_LABEL = BatchField(np.int32, ("batch",), pad=-1)
TOKEN_TYPES = BatchField(np.int32)


class _OfEncoder:
    """The common part of encoders' objectives: types of tokens, and further measures."""

    pads_rows: ClassVar[bool] = True

    def for_evaluation(self) -> Self:
        return replace(self, measures=True)

    def embed(self, edges: Encoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed(batch["tokens"], replace(tokens, types=batch.get("token_types")), ctx)


@dataclass(frozen=True)
class MaskedTokens(_OfEncoder):
    """The cross-entropy of hidden tokens in nats, and with `pairs` that of rows' classes.

    They are "loss", a mean over hidden tokens, and "row_loss", a mean over rows. With `measures`
    there are also the parts of both that the model gets right, "accuracy" and "row_accuracy".

    types: whether tokens have types.
    pairs: whether the model tells classes of rows.
    ids: of special tokens, and how often tokens are hidden; for streams.
    vocab_size: of the model, for tokens drawn at random.
    """

    types: bool
    pairs: bool
    ids: MaskedDataConfig
    vocab_size: int
    measures: bool = False

    @classmethod
    def of(cls, cfg: Config) -> "MaskedTokens":
        bert = cfg.model.bert
        types, pairs = bert.type_vocab_size > 0, bert.num_labels > 0
        return cls(types, pairs, cfg.data.masked, cfg.model.vocab_size)

    @property
    def fields(self) -> Mapping[str, BatchField]:
        return dict(NextToken.fields) | _further_fields(self.types, self.pairs)

    def counts(self, batch: Batch) -> Scalars:
        counts = {"loss": jnp.sum(batch["loss_mask"].astype(jnp.float32))}
        if self.pairs:
            counts["row_loss"] = jnp.sum(rows_that_count(batch))
        if self.measures:
            counts["accuracy"] = counts["loss"]
        if self.measures and self.pairs:
            counts["row_accuracy"] = counts["row_loss"]
        return counts

    def losses(
        self, edges: Encoder, x: jax.Array, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        labels, mask = batch["labels"], batch["loss_mask"]
        found = {"loss": edges.head_loss(x, labels, mask, ctx)}
        if self.measures:
            found["accuracy"] = edges.token_hits(x, labels, mask, ctx)
        if self.pairs:
            row_loss, hits = _row_losses(edges, x, batch, tokens, ctx)
            found["row_loss"] = row_loss
            if self.measures:
                found["row_accuracy"] = hits
        return found

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Tokens of a stream with some of them hidden; nothing where the data set hid them."""
        if "token_types" in batch:
            return {}
        tokens = batch["tokens"]
        hidden = [
            self._hide(line, (seed, step, row)) for line, row in zip(tokens, rows, strict=True)
        ]
        seen, mask = zip(*hidden, strict=True)
        made = {"tokens": np.stack(seen), "labels": tokens, "loss_mask": np.stack(mask)}
        if self.types:
            made["token_types"] = np.zeros_like(tokens)
        if self.pairs:
            made["row_label"] = np.full(len(rows), -1, np.int32)
        return made

    def _hide(self, tokens: np.ndarray, seed: tuple) -> tuple[np.ndarray, np.ndarray]:
        """(tokens with some replaced, 1 where the loss counts), [S] each; one counts at least.

        80 % of the tokens that count become the mask token, and 10 % any token.
        """
        rng = np.random.default_rng(seed)
        length = len(tokens)
        chosen, how = rng.random((2, length))
        any_token = rng.integers(0, self.vocab_size, length)
        counts = chosen < self.ids.probability
        counts[chosen.argmin()] = True
        becomes_mask = counts & (how < 0.8)
        becomes_any = counts & (how >= 0.9)
        seen = np.where(becomes_mask, self.ids.mask_token_id, tokens)
        seen = np.where(becomes_any, any_token, seen)
        return seen.astype(np.int32), counts.astype(np.float32)


class OfRows(_OfEncoder):
    """The cross-entropy of rows' classes in nats, and with `measures` the part that is right."""

    def counts(self, batch: Batch) -> Scalars:
        counts = {"loss": jnp.sum(rows_that_count(batch))}
        if self.measures:
            counts["accuracy"] = counts["loss"]
        return counts

    def losses(
        self, edges: Encoder, x: jax.Array, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        loss, hits = _row_losses(edges, x, batch, tokens, ctx)
        found = {"loss": loss}
        if self.measures:
            found["accuracy"] = hits
        return found


@dataclass(frozen=True)
class ClassifyRows(OfRows):
    """The cross-entropy of rows' classes in nats, a mean over rows whose "row_label" is not -1.

    The field is int32 [B]. With `measures` there is also the part of rows that the model gets
    right, "accuracy".
    """

    types: bool
    classes: int
    measures: bool = False

    dataset: ClassVar[str] = LABELLED

    @classmethod
    def of(cls, cfg: Config) -> "ClassifyRows":
        return cls(cfg.model.bert.type_vocab_size > 0, cfg.model.bert.num_labels)

    @property
    def fields(self) -> Mapping[str, BatchField]:
        return {"tokens": BatchField(np.int32)} | _further_fields(self.types, pairs=True)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Classes of random tokens, for speed tests; nothing where the data set has them."""
        if "row_label" in batch:
            return {}
        made = {"row_label": (rows % self.classes).astype(np.int32)}
        if self.types:
            made["token_types"] = np.zeros_like(batch["tokens"])
        return made


def _further_fields(types: bool, pairs: bool) -> dict[str, BatchField]:
    """The fields of token types and of rows' classes, where a model has them."""
    fields = {"token_types": TOKEN_TYPES} if types else {}
    return fields | ({"row_label": ROW_LABEL} if pairs else {})


def rows_that_count(batch: Batch) -> jax.Array:
    """fp32 [B]: 1 for rows with a class, on the cp device that has their first token."""
    counts = (batch["row_label"] >= 0) & has_first_token(batch["columns"])
    return counts.astype(jnp.float32)


def _row_losses(
    edges: Encoder, x: jax.Array, batch: Batch, tokens: Tokens, ctx: Context
) -> tuple[jax.Array, jax.Array]:
    """(the sum of rows' cross-entropies, the number of those that are right), fp32 []."""
    logits, counts = edges.row_logits(x, tokens, ctx), rows_that_count(batch)
    labels = jnp.maximum(batch["row_label"], 0)
    of_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    losses = jax.nn.logsumexp(logits, -1) - of_label
    right = jax.lax.stop_gradient((of_label >= logits.max(-1)) * counts)
    return jnp.sum(losses * counts), jnp.sum(right)
