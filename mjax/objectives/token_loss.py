"""The objective of a token function: the mean of the losses that a function gives to tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.loss.token_functions import TokenFunction, TokenScores, reads_entropy
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.objectives.fields import Batch, BatchField, Scalars
from mjax.objectives.next_token import NextToken


@dataclass(frozen=True)
class TokenLoss(NextToken):
    """A mean over the tokens of the loss mask; statistics of the function are logged.

    names: the fields of each token, fp32 [B, S], that the function reads.
    temperature: divides logits before tokens are rated.
    """

    function: TokenFunction
    names: tuple[str, ...]
    temperature: float = 1.0

    @property
    def fields(self) -> Mapping[str, BatchField]:  # type: ignore[override]
        return dict(NextToken.fields) | dict.fromkeys(self.names, BatchField(np.float32))

    def counts(self, batch: Batch) -> Scalars:
        one: Any = jax.ShapeDtypeStruct((1,), jnp.float32)
        scores = TokenScores(one, one if reads_entropy(self.function) else None)
        _, figures = jax.eval_shape(self.function, scores, dict.fromkeys(self.names, one))
        return dict.fromkeys(("loss", *figures), super().counts(batch)["loss"])

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        ctx = ctx.in_training(temperature=self.temperature)
        fields = {name: batch[name] for name in self.names}
        given = batch["labels"], batch["loss_mask"], ctx, self.function, fields
        return edges.head_sums(decoder_of(x), *given)
