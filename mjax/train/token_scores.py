"""Log-probabilities of a batch's labels on any mesh: one forward pass.

Invariant: each is equal on every mesh, and lies where its label lies in the batch.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.kernels.loss.token_functions import TokenScores
from mjax.models.base.streams import Activation, decoder_of, split_loads
from mjax.objectives.fields import Batch
from mjax.objectives.local_model import LocalModel
from mjax.pipeline.run import pipeline_outputs
from mjax.sharding.collectives import DATA_AXES
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State, split_batch


def batch_scores(program: Program, state: State, batch: Batch) -> TokenScores:
    """The scores of "labels" without dropout, fp32 [b, S]: the rows of this device, equal over cp.

    Columns are in the order of the batch before it was placed. The entropy is among the scores.
    """
    model, parallel = program.model.for_evaluation(program.evaluation), program.parallel
    batch = model.with_derived_fields(batch)
    weights = model.load(state["params"], state.get("buffers", {}))
    scores = scores_of_micro_batches(program, model, weights, batch)
    order = parallel.all_gather(batch["columns"], "cp", 0)

    def in_order(values: jax.Array) -> jax.Array:
        """[micro-batches, rows, S/cp] -> [b, S]."""
        values = values.reshape(-1, values.shape[-1])
        whole = parallel.all_gather(values, "cp", 1)
        return jnp.zeros_like(whole).at[:, order].set(whole, unique_indices=True)

    return jax.tree.map(in_order, scores)


def scores_of_micro_batches(
    program: Program, model: LocalModel, weights: dict, batch: Batch, entropy: bool = True
) -> TokenScores:
    """The scores of each micro-batch, fp32 [m, b, S/cp]. `model` is one for evaluation."""

    def output(streams: Activation, micro_batch: Batch) -> TokenScores:
        x, _ = split_loads(streams, {})
        return model.edges(weights).token_scores(
            decoder_of(x),
            micro_batch["labels"],
            model.ctx,
            entropy=entropy,
        )

    def score(micro_batch: Batch) -> TokenScores:
        tokens = model.tokens(micro_batch, None)
        inputs = model.layer_inputs(weights, tokens)
        embedded = model.embed(weights, micro_batch, tokens)
        streams, _, _ = model.layers.run(weights, embedded, inputs)
        return output(streams, micro_batch)

    micro_batches = split_batch(batch, program.evaluation.micro_batches)
    if program.layout is None:
        return jax.lax.map(score, micro_batches)
    return pipeline_outputs(model, program.layout, weights, micro_batches, output)


SCORES = ProgramKind(
    batch_scores,
    outputs=lambda on: P(DATA_AXES),
)
