"""`Distillation`: the divergence of a student's next-token distribution from a teacher's.

The teacher's output activations and the table of its head are fields of the batch, which the
teacher computes (`teacher.py`). The logits of both exist for a chunk of tokens at a time
(`kernels/loss/divergence.py`).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.preference import DistillConfig
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.interop.sources import source_of
from mjax.kernels.loss.divergence import Divergence, LogitSource, stored_divergence
from mjax.kernels.loss.rows import Terms
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.objectives.fields import Batch, BatchField, Scalars
from mjax.objectives.next_token import NextToken
from mjax.post.distillation.hidden_losses import LayerPairs, layer_pairs
from mjax.post.distillation.stored_teacher import IDS, LOG_PROBS, TeacherStore
from mjax.post.distillation.teacher_vocabulary import require_leading_tokens
from mjax.sharding.spec import ParamSpec

HIDDEN, HEAD, BIAS = "teacher_hidden", "teacher_head", "teacher_bias"
OF_LAYERS = "teacher_layers"  # the outputs of layers, [B, S, N, D]


class TeacherLoss(NextToken):
    """The counts that both forms of the loss have: each figure is a mean over unmasked tokens."""

    def counts(self, batch: Batch) -> Scalars:
        count = super().counts(batch)["loss"]
        return dict.fromkeys(self.names, count)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the losses."""
        return "loss", "divergence", "nll"


@dataclass(frozen=True)
class Distillation(TeacherLoss):
    """The loss of `distill`, a mean over unmasked tokens.

    "loss" is differentiated. "divergence" has neither temperature's square nor weight; "nll" is the
    cross-entropy of labels. "hidden" is the weighted loss of `pairs` of layers, which is added.
    Held-out data is measured by the same loss.
    """

    settings: DistillConfig
    teacher: ModelConfig
    dtype: type
    pairs: LayerPairs
    fields: Mapping[str, BatchField] = field(init=False)

    def __post_init__(self) -> None:
        hidden = BatchField(self.dtype, ("batch", "seq", "teacher_width"), is_computed=True)
        head = BatchField(self.dtype, ("vocab", "teacher_width"), is_computed=True)
        fields = dict(NextToken.fields) | {HIDDEN: hidden, HEAD: head}
        if self.teacher.lm_head_bias:
            fields[BIAS] = BatchField(self.dtype, ("vocab",), is_computed=True)
        if self.pairs.student:
            axes = "batch", "seq", "teacher_layers", "teacher_width"
            fields[OF_LAYERS] = BatchField(self.dtype, axes, is_computed=True)
        object.__setattr__(self, "fields", fields)

    @classmethod
    def of(cls, cfg: Config) -> "Distillation | StoredDistillation":
        if cfg.distill.stored is not None:
            return StoredDistillation.of(cfg)
        teacher, dtype = teacher_config(cfg), jnp.dtype(cfg.precision.compute).type
        return cls(cfg.distill, teacher, dtype, layer_pairs(cfg.distill, cfg.model, teacher))

    @property
    def names(self) -> tuple[str, ...]:
        return *super().names, *self.layer_names

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.pairs.student

    @property
    def layer_names(self) -> tuple[str, ...]:
        return ("hidden",) if self.pairs.student else ()

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return self.pairs.specs

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of the axes that no other objective has."""
        lengths = {"vocab": self.teacher.padded_vocab_size, "teacher_layers": len(self.outputs)}
        return lengths | {"teacher_width": self.teacher.hidden_size}

    @property
    def own_devices(self) -> tuple[int, str]:
        own = self.settings.teacher_mesh
        return own.get("devices", 0), f"distill.teacher_mesh={own}"

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        hidden = batch[HIDDEN].reshape(-1, batch[HIDDEN].shape[-1])
        teacher = LogitSource(hidden, batch[HEAD], batch.get(BIAS))
        settings = self.settings
        found = edges.head_divergence(
            decoder_of(x),
            batch["labels"],
            batch["loss_mask"],
            ctx,
            teacher,
            Terms(self.teacher.vocab_size, self.teacher.final_logit_softcapping),
            Divergence(settings.beta, settings.temperature, settings.label_weight),
        )
        loss = found.pop("loss")
        return {"loss": loss} | jax.lax.stop_gradient(found)

    def layer_losses(
        self,
        outputs: jax.Array,
        weights: Mapping[str, jax.Array],
        batch: Batch,
        ctx: Context,
        counted: jax.Array | None = None,
    ) -> Scalars:
        given = outputs, weights, batch[OF_LAYERS], batch["loss_mask"]
        return {"hidden": self.pairs.losses(*given, ctx.parallel, counted)}


@dataclass(frozen=True)
class StoredDistillation(TeacherLoss):
    """The loss of `distill` from the likeliest tokens of a teacher; all others are one outcome.

    The losses are named as those of `Distillation`, and "divergence" is at most as large.
    """

    settings: DistillConfig
    top: int

    fields: ClassVar[Mapping[str, BatchField]] = NextToken.fields | {
        IDS: BatchField(np.int32, ("batch", "seq", "teacher_top")),
        LOG_PROBS: BatchField(np.float32, ("batch", "seq", "teacher_top")),
    }

    @classmethod
    def of(cls, cfg: Config) -> "StoredDistillation":
        settings = cfg.distill
        record = TeacherStore(Path(settings.stored)).record
        ours = {"temperature": settings.temperature, "vocab_size": cfg.model.vocab_size}
        for name, value in ours.items():
            if record[name] != value:
                raise UserError(
                    f"distill.stored={settings.stored} was written with {name}={record[name]}, and "
                    f"this run has {value}; take the same, or write it anew"
                )
        return cls(settings, record["top"])

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of the axes that no other objective has."""
        return {"teacher_top": self.top}

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        settings, mask, x = self.settings, batch["loss_mask"], decoder_of(x)
        alpha, temperature = settings.label_weight, settings.temperature
        ids = jnp.concatenate([batch["labels"][..., None], batch[IDS]], -1)
        log_q = edges.token_scores(x, ids, ctx.in_training(temperature=temperature)).log_p
        divergence = stored_divergence(log_q[..., 1:], batch[LOG_PROBS], settings.beta)
        divergence = jnp.sum(jnp.where(mask == 0, 0, divergence * mask))
        nll = -jnp.sum(log_q[..., 0] * mask)
        if temperature != 1:
            nll = edges.head_loss(x, batch["labels"], mask, ctx)
        loss = (1 - alpha) * temperature**2 * divergence + alpha * nll
        figures = {"divergence": divergence, "nll": nll}
        return {"loss": loss} | jax.lax.stop_gradient(figures)


@functools.lru_cache(maxsize=4)
def _model_in(folder: str) -> ModelConfig:
    """The config of the model in a folder, which a plan asks for many times."""
    return source_of(folder).cfg


def teacher_config(cfg: Config) -> ModelConfig:
    """The config of the teacher, cut to the tokens that the student has, the first of it.

    Raises `UserError` for one that the student cannot learn from.
    """
    folder = cfg.distill.teacher
    if folder is None:
        raise UserError(
            "distill.teacher is not set; give a folder of the teacher's weights, or distill.stored"
        )
    teacher, student = _model_in(folder), cfg.model
    if teacher.vocab_size != student.vocab_size:
        require_leading_tokens(folder, teacher.vocab_size, student.vocab_size, cfg.data.tokenizer)
    cut = {"vocab_size": student.vocab_size, "vocab_multiple": student.vocab_multiple}
    teacher = teacher.model_copy(update=cut)
    if teacher.architecture.reads != ("tokens",) or not teacher.architecture.generates:
        raise UserError(f"distill.teacher={folder} is not a decoder of text alone; take one")
    return teacher
