"""Contrastive objectives of images and their texts: CLIP's (arXiv 2103.00020) and SigLIP's (arXiv
2303.15343).

All pairs of an image and a text of the global batch count, whatever the mesh. A device gathers the
vectors of the other side and has logits of its own rows alone, `LOGIT_ROWS` at a time: never those
of all pairs. A step is one micro-batch, for a pair of two micro-batches would count in neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.models.architectures import DualEncoder
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Streams
from mjax.models.towers.modalities import MODALITIES
from mjax.objectives.fields import Batch, BatchField, HostBatch, Scalars
from mjax.objectives.masked import ROW_LABEL, rows_that_count
from mjax.objectives.text_with_items import WithItems, items_of, random_items
from mjax.sharding.collectives import DATA_AXES

LOGIT_ROWS = 1024  # whose logits exist at a time
_LOW = -1e30  # the logit of what is no pair


class EmbeddedRows(NamedTuple):
    """Unit vectors fp32 [B, P], their rows in the global batch [B], and which of them count [B]."""

    vectors: jax.Array
    numbers: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class Contrastive(WithItems):
    """The contrastive loss in nats, a mean over rows whose "row_label" is not -1.

    "patches" are fp32 [B, 1, T, C*P*P] of the image of each text. A row's softmax loss
    is the mean of two cross-entropies: which text is the image's, and which image is the text's.
    Its sigmoid loss is the sum over all texts. With `measures` there is also the part of images
    whose own text, of all in the batch, has the largest logit: "accuracy".
    """

    measures: bool = False

    one_micro_batch: ClassVar[bool] = True
    pads_rows: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, BatchField]] = {
        "tokens": BatchField(np.int32),
        "patches": BatchField(np.float32, ("batch", *MODALITIES["vision"].axes)),
        "row_label": ROW_LABEL,
    }

    def for_evaluation(self) -> "Contrastive":
        return replace(self, measures=True)

    def counts(self, batch: Batch) -> Scalars:
        counts = {"loss": jnp.sum(rows_that_count(batch))}
        if self.measures:
            counts["accuracy"] = counts["loss"]
        return counts

    @jax.named_scope("contrastive")
    def losses(
        self, edges: DualEncoder, x: Streams, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        rows, is_pair = batch["rows"], batch["row_label"] >= 0
        images = EmbeddedRows(edges.embedded_images(x, tokens, ctx), rows, is_pair)
        texts = edges.embedded_texts(x, batch["tokens"], tokens, ctx)
        texts = images._replace(vectors=texts)
        sides = [(images, texts)]
        if self.cfg.model.contrastive.loss == "softmax":
            sides.append((texts, images))
        found = []
        for mine, others in sides:
            gathered = [ctx.parallel.all_gather(part, DATA_AXES, 0) for part in others]
            found.append(self._of_rows(edges, mine, EmbeddedRows(*gathered)))
        here = rows_that_count(batch)  # zero on cp devices that would count a row again
        total = sum(jnp.sum(losses * here) for losses, _ in found)
        losses = {"loss": total / len(found)}
        if self.measures:
            losses["accuracy"] = jnp.sum(found[0][1] * here)
        return losses

    def _of_rows(
        self, edges: DualEncoder, mine: EmbeddedRows, others: EmbeddedRows
    ) -> tuple[jax.Array, jax.Array]:
        """(losses, whether the largest logit is right) of rows among all others, [B] each."""
        is_softmax = self.cfg.model.contrastive.loss == "softmax"

        @jax.checkpoint
        def of_row(row: EmbeddedRows) -> tuple[jax.Array, jax.Array]:
            (logits,) = edges.pair_logits(row.vectors[None], others.vectors)
            is_own = others.numbers == row.numbers
            among = jnp.where(others.count, logits, _LOW)
            own = jnp.sum(jnp.where(is_own, logits, 0))
            right = jax.lax.stop_gradient(own >= among.max())
            if is_softmax:
                return jax.nn.logsumexp(among) - own, right
            each = jax.nn.softplus(jnp.where(is_own, -logits, logits))
            return jnp.sum(jnp.where(others.count, each, 0)), right

        return jax.lax.map(of_row, mine, batch_size=LOGIT_ROWS)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Random images, for speed tests; nothing where the data set has them."""
        if "patches" in batch:
            return {}
        vision, labels = self.model.vision, np.zeros(len(rows), np.int32)
        patches = random_items(vision, items_of(self.cfg, "vision"), seed, step, rows)
        return {"patches": patches, "row_label": labels}
