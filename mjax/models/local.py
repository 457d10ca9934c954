"""A model on one device of a mesh, as functions of its local weights and one micro-batch.

The training step composes them (`train/step.py`), and so do the stages of a pipeline
(`pipeline/run.py`).
"""

from dataclasses import dataclass, replace

import jax

from mjax.models.context import Context, Tokens
from mjax.models.decoder import Decoder
from mjax.models.execution import Execution
from mjax.models.layers import LayerInputs, Layers
from mjax.models.params import ModelDefinition
from mjax.sharding.rules import Placement

# tokens, labels, loss_mask, segment_ids, positions [B, S]; rows [B]; columns [S] (train/batch.py)
Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class LocalModel:
    """The parts of a model.

    packed: whether sequences hold several documents, which do not attend to each other.
    loss_chunk: tokens of a chunk of the loss; None: by memory.
    """

    definition: ModelDefinition
    placement: Placement
    execution: Execution
    ctx: Context
    packed: bool
    loss_chunk: int | None

    def tokens(self, micro_batch: Batch, key: jax.Array | None) -> Tokens:
        """Facts about the tokens of a micro-batch; `key` is that of dropout."""
        return Tokens(
            positions=micro_batch["positions"],
            segments=micro_batch["segment_ids"] if self.packed else None,
            rows=micro_batch["rows"],
            columns=micro_batch["columns"],
            key=key,
        )

    def edges(self, weights: dict) -> Decoder:
        """The model without its layers: embedding, final norm and head."""
        return self.definition.edges.bind(weights)

    def embed(self, weights: dict, micro_batch: Batch, tokens: Tokens) -> jax.Array:
        """The input of the first layer, [B, S/tp, D]."""
        return self.edges(weights).embed(micro_batch["tokens"], tokens, self.ctx)

    def layer_inputs(self, weights: dict, tokens: Tokens) -> LayerInputs:
        """The inputs of all layers besides weights and activations."""
        return LayerInputs(tokens, self.edges(weights).rope(tokens, self.ctx))

    @property
    def layers(self) -> Layers:
        """The layers of the model, or of a pipeline's chunk."""
        return Layers(self.definition.blocks, self.execution, self.ctx, self.placement)

    def head_loss(self, weights: dict, x: jax.Array, micro_batch: Batch) -> jax.Array:
        """The sum of masked nll, fp32, equal on all tp devices; x is the last layer's output."""
        return self.edges(weights).head_loss(x, micro_batch, self.ctx, self.loss_chunk)

    def loss(
        self, weights: dict, micro_batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(sum of masked nll, share of the auxiliary losses), fp32.

        The first is equal on all tp devices. The second is this device's share, summed over layers
        and sequences.
        """
        tokens = self.tokens(micro_batch, key)
        x = self.embed(weights, micro_batch, tokens)
        x, aux, _ = self.layers.run(weights, x, self.layer_inputs(weights, tokens))
        return self.head_loss(weights, x, micro_batch), aux

    def for_evaluation(self, execution: Execution) -> "LocalModel":
        """The model without dropout and without the terms of the loss that only training has."""
        ctx = replace(self.ctx, dropout=False, label_smoothing=0.0, z_loss=0.0)
        return replace(self, execution=execution, ctx=ctx)
