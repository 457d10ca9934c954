"""Next-token prediction, the default objective, and that of tokens further ahead."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.run import Config
from mjax.models.architectures import MultiTokenDecoder
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import EXPERT_LOADS, Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.models.heads.multi_token import field_names, shifted_fields, with_weight
from mjax.objectives.fields import Batch, BatchField, Scalars
from mjax.sharding.collectives import Parallel


class NextToken:
    """The cross-entropy of the next token in nats, a mean over unmasked tokens."""

    fields: ClassVar[Mapping[str, BatchField]] = {
        "tokens": BatchField(np.int32),
        "labels": BatchField(np.int32),
        "loss_mask": BatchField(np.float32),
    }

    @classmethod
    def of(cls, cfg: Config) -> Self:
        """The objective of a run; a class that reads the config has its own."""
        return cls()

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
