"""The critic of PPO: the objective of its values, and the program that computes them.

A critic is a decoder with one number for each token (`model.num_labels`). The value at a token is
that of the state after it, in which the policy draws the label of that place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.config.schema.run import Config
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.objectives.fields import Batch, BatchField, HostBatch, Scalars
from mjax.post.base.role_programs import kind_of_tokens
from mjax.post.policy.mock_rollouts import mock_rollouts
from mjax.train.step import Program, State, split_batch


@dataclass(frozen=True)
class ValueObjective:
    """PPO's clipped loss of values, a mean over sampled tokens (arXiv 1707.06347, its code's form).

    clip: how far a value moves from the one of the rollout before the loss ends its gradient.
    The share of the variance of returns that values explain follows from the figures (`critic.py`).
    """

    clip: float

    fields: ClassVar[Mapping[str, BatchField]] = {
        "tokens": BatchField(np.int32),
        "loss_mask": BatchField(np.float32),
        "values": BatchField(np.float32, is_computed=True),
        "returns": BatchField(np.float32, is_computed=True),
    }

    @classmethod
    def of(cls, cfg: Config) -> "ValueObjective":
        return cls(cfg.reinforce.value_clip)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        return {} if "returns" in batch else mock_rollouts(batch, seed, step, rows)

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed(batch["tokens"], tokens, ctx)

    def counts(self, batch: Batch) -> Scalars:
        names = "loss", "value/mean", "value/error", "value/clip_ratio"
        names = *names, "return/mean", "return/squared"
        return dict.fromkeys(names, jnp.sum(batch["loss_mask"].astype(jnp.float32)))

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        is_sampled = batch["loss_mask"] != 0
        values = edges.label_scores(decoder_of(x), ctx)[..., 0]
        old, returns = (jnp.where(is_sampled, batch[name], 0) for name in ("values", "returns"))
        near = jnp.clip(values, old - self.clip, old + self.clip)
        error, clipped = jnp.square(values - returns), jnp.square(near - returns)
        figures = {
            "value/mean": values,
            "value/error": error,
            "value/clip_ratio": clipped > error,
            "return/mean": returns,
            "return/squared": jnp.square(returns),
        }
        found = {"loss": jnp.maximum(error, clipped) / 2} | lax.stop_gradient(figures)
        return {name: jnp.sum(is_sampled * figure) for name, figure in found.items()}


def placed_values(program: Program, state: State, batch: Batch) -> jax.Array:
    """The value at each token without dropout, fp32 [b, S/cp], in the places of a placed batch."""
    model = program.model.for_evaluation(program.evaluation)
    weights = model.load(state["params"], state.get("buffers", {}))

    def values(micro_batch: Batch) -> jax.Array:
        tokens = model.tokens(micro_batch, None)
        x = model.embed(weights, micro_batch, tokens)
        x, _, _ = model.layers.run(weights, x, model.layer_inputs(weights, tokens))
        return model.edges(weights).label_scores(decoder_of(x), model.ctx)[..., 0]

    micro_batches = split_batch(batch, program.evaluation.micro_batches)
    found = lax.map(values, micro_batches)
    return found.reshape(-1, found.shape[-1])


VALUES = kind_of_tokens(placed_values)
