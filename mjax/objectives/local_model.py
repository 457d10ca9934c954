"""A model on one device of a mesh, as functions of its local weights and one micro-batch.

The training step composes them (`train/step.py`), and so do the stages of a pipeline
(`pipeline/run.py`).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from mjax.errors import UserError
from mjax.models.base.branch import begin_layers, finish_layers
from mjax.models.base.context import Context, Tokens
from mjax.models.base.params import ModelDefinition
from mjax.models.base.streams import (
    EXPERT_LOADS,
    Activation,
    Statistics,
    Streams,
    WithLoads,
    split_loads,
)
from mjax.models.decoder import Decoder
from mjax.models.runtime.execution import Execution
from mjax.models.runtime.layer_outputs import LAYER_OUTPUTS, KeptOutputs, among_all
from mjax.models.runtime.load import fp8_scales, load_weights
from mjax.models.runtime.run import LayerInputs, Layers
from mjax.models.runtime.training_layers import TrainingLayers
from mjax.objectives.fields import Batch, Scalars
from mjax.objectives.objective import (
    OWN_WEIGHTS,
    FieldDeriver,
    LayerReader,
    Measurer,
    Objective,
    described_tokens,
    require_dictionary,
    require_scalars,
)
from mjax.sharding.rules import Placement


@dataclass(frozen=True)
class LocalModel:
    """The parts of a model.

    objective: what it is trained for.
    packed: whether sequences hold several documents, which do not attend to each other.
    """

    definition: ModelDefinition
    placement: Placement
    execution: Execution
    ctx: Context
    objective: Objective
    packed: bool

    def tokens(self, micro_batch: Batch, key: jax.Array | None) -> Tokens:
        """Facts about the tokens of a micro-batch; `key` is that of dropout."""
        tokens = Tokens(
            positions=micro_batch["positions"],
            segments=micro_batch["segment_ids"] if self.packed else None,
            rows=micro_batch["rows"],
            columns=micro_batch["columns"],
            key=key,
            prefixes=micro_batch.get("prefix_ids") if self.packed else None,
            experts=micro_batch.get("experts"),
        )
        return described_tokens(self.objective, micro_batch, tokens, self.ctx)

    def edges(self, weights: dict) -> Decoder:
        """The model without its layers: embedding, final norm and head."""
        return self.definition.edges.bind(weights, self.ctx.parallel)

    def load(self, params: dict, buffers: dict, tokens: jax.Array | int = 1) -> dict:
        """The weights of a step from masters as stored (`load_weights`).

        `tokens` is the count of the loss, from which FP8 guesses its first scales.
        """
        scales = fp8_scales(params, buffers.get("fp8", {}), tokens, self.placement, self.execution)
        return load_weights(params, scales, self.placement, self.execution)

    def embed(self, weights: dict, micro_batch: Batch, tokens: Tokens) -> Activation:
        """The input of the first layer."""
        edges, shape = self.edges(weights), micro_batch["segment_ids"].shape
        x = self.objective.embed(edges, micro_batch, tokens, self.ctx)
        wanted = shape[0], shape[1] // self.ctx.parallel.tp, edges.cfg.hidden_size
        if not isinstance(x, Streams) and jnp.shape(x) != wanted:
            of = type(self.objective)
            raise UserError(
                f"{of.__module__}:{of.__qualname__}.embed returns {jnp.shape(x)}, and the layers "
                f"take [rows, columns, model.hidden_size]={wanted}; mend it"
            )
        if not self.definition.statistics:  # in evaluation
            return x
        return begin_layers(x, len(micro_batch["rows"]), edges.cfg)

    def layer_inputs(self, weights: dict, tokens: Tokens) -> LayerInputs:
        """The inputs of all layers besides weights and activations."""
        return LayerInputs(tokens, self.edges(weights).rope(tokens, self.ctx))

    @property
    def layers(self) -> Layers:
        """The layers of the model, or of a pipeline's chunk."""
        return TrainingLayers(
            self.definition.blocks,
            self.execution,
            self.ctx,
            tuple(self.definition.statistics),
            placement=self.placement,
        )

    def run_layers(
        self, weights: dict, x: Activation, tokens: Tokens, outputs: tuple[int, ...] = ()
    ) -> tuple[Activation, Statistics, jax.Array | None]:
        """(the last layer's output, shares of statistics, `outputs` [N, B, S/tp, D] or None).

        `outputs` are the numbers of the layers whose outputs are kept.
        """
        inputs = self.layer_inputs(weights, tokens)
        x, statistics, _ = self.layers_that_keep(outputs).run(weights, x, inputs)
        return x, statistics, statistics.pop(LAYER_OUTPUTS, None)

    @property
    def layer_reader(self) -> LayerReader | None:
        """The objective, if it has a loss of layers' outputs."""
        objective = self.objective
        return objective if isinstance(objective, LayerReader) and objective.outputs else None

    def layers_that_keep(self, outputs: tuple[int, ...]) -> Layers:
        """`layers`, whose statistics have `LAYER_OUTPUTS` of layers of these numbers, if any."""
        probe = replace(self.ctx.probe, outputs=KeptOutputs(outputs) if outputs else None)
        return replace(self.layers, ctx=replace(self.ctx, probe=probe))

    def fields_of_all_rows(self, batch: Batch) -> Batch:
        """The fields that are not of rows, which each micro-batch takes whole."""
        fields = self.objective.fields.items()
        return {name: batch[name] for name, field in fields if "batch" not in field.axes}

    def with_derived_fields(self, batch: Batch) -> Batch:
        """A batch with the fields that the objective derives on the devices."""
        if not isinstance(self.objective, FieldDeriver):
            return batch
        derived = self.objective.derive_fields(batch, self.placement.parallel)
        where = require_dictionary(self.objective, "derive_fields", derived)
        for name, field in derived.items():
            if jnp.shape(field)[:1] != batch["rows"].shape:
                rows = f"{len(batch['rows'])} rows of this device"
                raise UserError(f"{where}: {name} has shape {jnp.shape(field)}; give the {rows}")
        return batch | derived

    def head_losses(
        self,
        weights: dict,
        x: Activation,
        micro_batch: Batch,
        key: jax.Array | None,
        outputs: jax.Array | None = None,
    ) -> tuple[Scalars, Scalars]:
        """(sums of the losses, equal on all tp devices; this device's shares of statistics).

        x is the last layer's output, `outputs` are those that a `LayerReader` asked for. None: the
        stages of a pipeline add the losses of them. The statistics are those that the objective
        adds to the layers', zeros for the others.
        """
        edges, tokens = self.edges(weights), self.tokens(micro_batch, key)
        ctx = self.ctx.in_training(head_remat=self.execution.layers[-1].remat)
        x, of_layers = split_loads(x, {})
        found = self.objective.losses(edges, x, micro_batch, tokens, ctx)
        if outputs is not None:
            own = weights.get(OWN_WEIGHTS, {})
            found |= self.objective.layer_losses(outputs, own, micro_batch, ctx)
        elif self.layer_reader is not None:
            found |= dict.fromkeys(self.layer_reader.layer_names, jnp.float32(0))
        # of layers of multi-token prediction
        loads = found.pop(EXPERT_LOADS, 0.0) if isinstance(found, dict) else 0.0
        counts = jax.eval_shape(self.objective.counts, micro_batch)
        require_scalars(self.objective, "losses", found, *counts)
        require_scalars(self.objective, "counts", counts, *(set(found) - set(edges.statistics)))
        if of_layers:
            loads = loads + of_layers[EXPERT_LOADS]
            _, of_all = finish_layers(WithLoads(x, loads), edges.cfg, ctx.parallel)
            found |= of_all
        losses = {name: total for name, total in found.items() if name not in edges.statistics}
        zero = jnp.float32(0)
        return losses, {name: found.get(name, zero) for name in self.definition.statistics}

    def losses_of_stage(
        self, kept: jax.Array, own: jax.Array, weights: dict, micro_batch: Batch
    ) -> Scalars:
        """The losses of outputs [M, B, S/tp, D] of a stage's layers, by `own_outputs`."""
        reader = self.layer_reader
        assert reader is not None, "nothing is kept"
        outputs, counted = among_all(kept, own, len(reader.outputs))
        return reader.layer_losses(outputs, weights, micro_batch, self.ctx, counted)

    def losses(
        self, weights: dict, micro_batch: Batch, key: jax.Array | None
    ) -> tuple[Scalars, Scalars]:
        """(sums of the losses, equal on all tp devices; this device's shares of statistics).

        Statistics are summed over layers and sequences.
        """
        tokens = self.tokens(micro_batch, key)
        x = self.embed(weights, micro_batch, tokens)
        outputs = () if self.layer_reader is None else self.layer_reader.outputs
        x, statistics, kept = self.run_layers(weights, x, tokens, outputs)
        losses, of_head = self.head_losses(weights, x, micro_batch, key, kept)
        for name, share in of_head.items():
            statistics[name] = statistics[name] + share
        return losses, statistics

    def for_evaluation(self, execution: Execution) -> "LocalModel":
        """The model without dropout and without the terms of the loss that only training has."""
        ctx = self.ctx.in_training(
            dropout=False,
            label_smoothing=0.0,
            z_loss=0.0,
            rounds_dispatch=execution.rounds_dispatch,
            rounds_attention=execution.rounds_attention,
        )
        definition = replace(self.definition, statistics={})
        objective = self.objective
        if isinstance(objective, Measurer):
            objective = objective.for_evaluation()
        parts = {"definition": definition, "execution": execution, "objective": objective}
        return replace(self, ctx=ctx, **parts)
