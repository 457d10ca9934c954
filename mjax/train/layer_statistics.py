"""Statistics of each layer and of its experts: the program that computes them, and the log record.

The program is a forward pass without dropout, apart from the step's own program, which stays as it
is. Invariant: figures are those of the global batch, equal on every mesh.
"""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from mjax.config.languages.layer_pattern import roles_of
from mjax.config.schema.model import ModelConfig
from mjax.models.base.activation_statistics import LayerFigures
from mjax.models.base.context import Probe
from mjax.objectives.fields import Batch
from mjax.sharding.collectives import AXES
from mjax.train.program_kind import ProgramKind
from mjax.train.step import Program, State, evaluation_sums


def seen_layers(program: Program, state: State, batch: Batch) -> dict[str, jax.Array]:
    """The sums of `LayerFigures` over the global batch and all layers, on local shards."""
    figures = LayerFigures(program.layers, program.experts)
    model = program.model.for_evaluation(program.evaluation)
    probe = Probe(figures=figures)
    context = replace(model.ctx, probe=probe)
    model = replace(model, ctx=context)
    start = figures.nothing
    _, totals, _ = evaluation_sums(program, model, state, batch, start)
    return {name: program.parallel.psum(total, *AXES) for name, total in totals.items()}


LAYER_STATISTICS = ProgramKind(
    seen_layers,
    outputs=lambda on: P(),
)


def layer_record(cfg: ModelConfig, seen: dict[str, np.ndarray]) -> dict:
    """{"activation_rms/layers.3": ..}: figures of each layer, and of its experts if it has some.

    activation_rms: the root of the mean square of the layer's output. activation_kurtosis: the mean
    of its fourth power over the square of its mean square: 3 for normal numbers, more where some
    stand out.
    """
    count = seen["activations"]
    square = seen["activation_square"] / count
    fourth = seen["activation_fourth"] / count
    kurtosis = fourth / np.maximum(square**2, 1e-30)
    record = expert_record(cfg, seen)
    for number in range(cfg.num_hidden_layers):
        layer = f"layers.{number}"
        record[f"activation_rms/{layer}"] = float(square[number] ** 0.5)
        record[f"activation_kurtosis/{layer}"] = float(kurtosis[number])
    return record


def expert_record(cfg: ModelConfig, seen: dict[str, np.ndarray]) -> dict:
    """{"expert_imbalance/layers.3": ..}: figures of each layer with experts.

    expert_imbalance: the fullest expert's load over the mean. expert_entropy: of the router, in
    nats, a mean over tokens. expert_bias_range: largest less smallest bias that chooses.
    expert_load: of each expert over the mean, a list.
    """
    record: dict = {}
    for number, kind in enumerate(cfg.layer_kinds):
        if "experts" not in roles_of(kind):
            continue
        of_layer = {name: values[number] for name, values in seen.items()}
        tokens = max(of_layer["layer_tokens"], 1)
        mean = max(of_layer["expert_load"].mean(), 1e-20)
        load = of_layer["expert_load"] / mean
        figures = {
            "expert_imbalance": load.max(),
            "expert_entropy": of_layer["layer_entropy"] / tokens,
        }
        if cfg.moe.expert_bias:
            figures["expert_bias_range"] = of_layer["bias_range"] / tokens
        for name, value in figures.items():
            record[f"{name}/layers.{number}"] = float(value)
        shares = load.astype(np.float64).round(4)
        record[f"expert_load/layers.{number}"] = shares.tolist()
    return record
