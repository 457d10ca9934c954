"""The load of each expert, layer by layer: a program of its own, and its record in the log.

The program is a forward pass without dropout. So the step's own program stays as it is. Invariant:
figures are those of the global batch, equal on every mesh.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.model_schema import ModelConfig
from mjax.config.pattern import branches_of
from mjax.models.expert_loads import nothing_seen
from mjax.models.objective import Batch
from mjax.pipeline.run import pipeline_losses
from mjax.sharding.collectives import AXES
from mjax.train.step import Program, State, global_denominators, split_batch


def seen_experts(program: Program, state: State, batch: Batch) -> dict[str, jax.Array]:
    """The sums of `nothing_seen` over the global batch and all layers, on local shards."""
    model = program.model.for_evaluation(program.evaluation)
    model = replace(model, ctx=replace(model.ctx, seen_experts=program.expert_sizes))
    weights = model.load(state["params"], state.get("buffers", {}))
    batch = model.with_derived_fields(batch)
    micro_batches = split_batch(batch, program.evaluation.micro_batches)
    nothing = nothing_seen(*program.expert_sizes)
    if program.layout is not None:
        zeros = global_denominators(model, batch).zeros()
        _, totals = pipeline_losses(
            model,
            program.layout,
            weights,
            micro_batches,
            zeros,
            nothing,
        )
    else:

        def add(totals: dict, micro_batch: Batch) -> tuple[dict, None]:
            _, found = model.losses(weights, micro_batch, None)
            return jax.tree.map(jnp.add, totals, found), None

        totals, _ = jax.lax.scan(add, nothing, micro_batches)
    return {name: program.parallel.psum(total, *AXES) for name, total in totals.items()}


def expert_record(cfg: ModelConfig, seen: dict[str, np.ndarray]) -> dict:
    """{"expert_imbalance/layers.3": ..}: figures of each layer with experts.

    expert_imbalance: the fullest expert's load over the mean. expert_entropy: of the router, in
    nats, a mean over tokens. expert_bias_range: largest less smallest bias that chooses.
    expert_load: of each expert over the mean, a list.
    """
    tokens = np.maximum(seen["layer_tokens"], 1.0)
    entropies = seen["layer_entropy"] / tokens
    ranges = seen["bias_range"] / tokens
    loads = seen["expert_load"]
    loads = loads / np.maximum(loads.mean(-1, keepdims=True), 1e-20)
    record: dict = {}
    for number, kind in enumerate(cfg.layer_kinds):
        if "E" not in branches_of(kind):
            continue
        name = f"layers.{number}"
        load = loads[number]
        record[f"expert_imbalance/{name}"] = float(load.max())
        record[f"expert_entropy/{name}"] = float(entropies[number])
        if cfg.moe.expert_bias:
            record[f"expert_bias_range/{name}"] = float(ranges[number])
        record[f"expert_load/{name}"] = load.round(4).tolist()
    return record
