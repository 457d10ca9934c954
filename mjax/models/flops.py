"""Model FLOPs of a token: what the speed of a run is measured by.

They are counted from the declarations: products with weights from the parameters' specs, and the
rest from each branch (`BranchModule.flops`). The convention is that of PaLM (Chowdhery et al. 2022,
appendix B) with the causal half counted. Recomputation is not counted. Neither is what a run with
frozen parameters has no need to compute.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    DECODER,
    DEEPSTACK,
    ENCODER,
    PROJECTORS,
    branches_of,
    stack_of,
    stream_of,
    stream_read_by,
)
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.config.schema.vision import MERGED
from mjax.models import definition_of
from mjax.models.base.adapted import adapted_specs
from mjax.models.base.branch import branch_class
from mjax.models.towers.modalities import MODALITIES
from mjax.sharding.spec import ParamSpec, freeze, is_spec

# Roles of the parameters that every token is multiplied with, besides the head.
_MULTIPLIED = ("matrix", "router")
_OF_SOURCE = ("cross_kv", "projector_up", "projector_down")  # matmuls of what a stream reads
_AFTER_LAYERS = "final_norm head vocabulary_bias masked_head classifier joint_embedding".split()


def matmul_weights(model: ModelConfig) -> float:
    """Weights that a token is multiplied with, of which experts count as far as they are active.

    The head counts vocab_size rows, without padding, tied or not; looking up embeddings is free.
    """
    return sum(map(_active_weights, _leaves(_specs(model)))) + _head_weights(model)


def flops_of_run(cfg: Config) -> float:
    """`flops_per_token` of a run."""
    return sum(run_flops_by_part(cfg).values())


def run_flops_by_part(cfg: Config) -> dict[str, float]:
    """`flops_by_part` of a run. The head of a masked model reads hidden tokens alone."""
    data = cfg.data
    frozen, lora = cfg.train.freeze, cfg.lora
    parts = flops_by_part(cfg.model, data.seq_length, frozen, data.target_length, lora)
    parts["head"] *= predicted_share(cfg)
    return parts


def predicted_share(cfg: Config) -> float:
    """The part of the tokens that the head predicts."""
    return cfg.data.masked.probability if cfg.model.bert.mlm_head else 1.0


def flops_per_token(model: ModelConfig, seq_length: int, frozen: Sequence[str] = ()) -> float:
    """Model FLOPs of one token, forward and backward, nothing recomputed.

    A matmul weight counts 2 forward, 2 for its own gradient and 2 for that of its input. The
    branches of each layer add theirs, as the mean over a sequence of `seq_length` tokens. `frozen`
    is train.freeze: a frozen weight has no gradient, and where nothing before it is trained its
    input has none. The tokens of an encoder-decoder are those of its encoder, to each of which
    comes its part of the work on `target_length` tokens of the decoder. If texts have companions,
    only the tokens of texts count, each with its part of the work on the companions.
    """
    return sum(flops_by_part(model, seq_length, frozen).values())


def flops_by_part(
    model: ModelConfig,
    seq_length: int,
    frozen: Sequence[str] = (),
    target_length: int | None = None,
    lora: LoraConfig = LoraConfig(),  # noqa: B008 - frozen
) -> dict[str, float]:
    """`flops_per_token` of the layers' matmuls, of experts, of the head, and of what the branches
    of layers compute besides products with weights (attention). Adapters count as matrices."""
    sides = sides_of(model, seq_length, target_length)
    specs = adapted_specs(freeze(_specs(model), frozen), lora, "bfloat16")
    after = {name: specs[name] for name in _AFTER_LAYERS if name in specs}
    layers = {name: specs[name] for name in specs if name not in after}
    layers_trained = _is_trained(layers)
    trained_stacks, trained_streams = {}, {}
    for modality in model.embedded:
        of_tower = _tower_parts(model, modality)
        trained = _is_trained({name: specs[name] for name in of_tower})
        trained_streams[modality] = trained
        trained_stacks |= dict.fromkeys(of_tower, trained)
    parts = {"matmul": 0.0, "experts": 0.0}
    for name, declared in specs.items():
        for spec in _leaves(declared):
            of_experts = "experts" in spec.axes and spec.role == "matrix"
            part = "experts" if of_experts else "matmul"
            inputs_trained = trained_stacks.get(name, layers_trained)
            per_weight = _flops_per_weight(not spec.frozen, inputs_trained)
            passes = _passes(model, name, spec, sides)
            parts[part] += _active_weights(spec) * per_weight * passes
    inputs_trained = layers_trained or _is_trained(after.get("final_norm", {}))
    parts["head"] = 0.0
    if model.architecture.predicts == "tokens":
        head = specs.get("head", specs["embedding"])
        per_weight = _flops_per_weight(not head.frozen, inputs_trained)
        parts["head"] = _head_weights(model) * per_weight * sides[DECODER].share
    of_branches = 0.0
    for branch in branch_flops(model, seq_length, target_length):
        trained = trained_streams.get(stream_of(branch.word), layers_trained)
        of_branches += branch.flops if trained else branch.flops / 3
    parts["attention"] = of_branches
    return parts


class Side(NamedTuple):
    """A stream: its tokens for each token that is counted, and the tokens of a row."""

    share: float
    length: int


def sides_of(model: ModelConfig, seq_length: int, target_length: int | None) -> dict[str, Side]:
    """The streams of a model, for rows of `seq_length` tokens that are counted."""
    text = Side(1.0, seq_length)
    sides = {ENCODER: text, DECODER: text}
    companions = model.companions(seq_length)
    if companions is not None:
        tokens = companions.count * companions.length
        sides[ENCODER] = Side(tokens / seq_length, companions.length)
    for name in model.modalities:
        tower = model.tower(name)
        length = tower.row_length()
        sides[name] = Side(tower.max_items * length / seq_length, length)
    if "vision" in sides:
        sides[DEEPSTACK] = sides["vision"]
    if target_length is not None:
        sides[DECODER] = Side(target_length / seq_length, target_length)
    return sides


def _tower_parts(model: ModelConfig, modality: str) -> set[str]:
    """The names of what embeds and encodes a modality."""
    stacks = {stack_of(kind) for kind in model.layer_kinds if stream_of(kind) == modality}
    return stacks | _tower_edges(model, modality)


def _tower_edges(model: ModelConfig, modality: str) -> set[str]:
    """The names of what is multiplied with each token of a modality, besides layers."""
    pooler = {"image_pooler"} if model.architecture.compares else set()
    return {MODALITIES[modality].embedding} | pooler


def _passes(model: ModelConfig, stack: str, spec: ParamSpec, sides: dict[str, Side]) -> float:
    """The tokens that a weight is multiplied with for each that is counted; a mean over layers."""
    for modality in model.modalities:
        if stack in _tower_edges(model, modality):
            return sides[modality].share
    side = stream_read_by if spec.matmul in _OF_SOURCE else stream_of
    kinds = [kind for kind in model.layer_kinds if stack_of(kind) == stack]
    shares = [sides[side(kind)].share for kind in kinds]
    passes = sum(shares) / len(shares) if shares else 1.0
    vision = model.vision
    if PROJECTORS.intersection(kinds) and vision.pixel_shuffle:
        passes *= vision.padded(vision.text_tokens()) / vision.row_length()
    if {"patch_merger", "deep_merger"}.intersection(kinds):
        passes /= MERGED
    return passes


class BranchWork(NamedTuple):
    """A branch of a layer: its word and sizes, and its FLOPs besides products with weights.

    share: the tokens that pass it for each token that is counted.
    """

    word: str
    sizes: ModelConfig
    flops: float
    share: float


def branch_flops(
    model: ModelConfig, seq_length: int, target_length: int | None = None
) -> Iterator[BranchWork]:
    """Every branch of every layer.

    Layers of multi-token prediction are among them.
    """
    sides = sides_of(model, seq_length, target_length)
    for kind in (*model.layer_kinds, *model.prediction_kinds):
        sizes, side = model.of_layer(kind), sides[stream_of(kind)]
        for word in branches_of(kind):
            reads_other = BRANCHES[word].mask == "cross"
            keys = sides[stream_read_by(kind) if reads_other else stream_of(kind)].length
            flops = branch_class(word).flops(sizes, word, keys)
            yield BranchWork(word, sizes, flops * side.share, side.share)


def _flops_per_weight(weight_trained: bool, input_trained: bool) -> int:
    return 2 + 2 * weight_trained + 2 * input_trained


def _is_trained(specs: dict) -> bool:
    return not all(spec.frozen for spec in _leaves(specs))


def _active_weights(spec: ParamSpec) -> float:
    return spec.size * spec.active if spec.role in _MULTIPLIED else 0


def _head_weights(model: ModelConfig) -> int:
    """The head's weights, once for every token that is predicted from a place."""
    if model.architecture.predicts != "tokens":
        return 0
    return (1 + model.num_nextn_predict_layers) * model.hidden_size * model.vocab_size


def _leaves(specs: dict) -> list[ParamSpec]:
    return jax.tree.leaves(specs, is_leaf=is_spec)


def _specs(model: ModelConfig) -> dict:
    """The declarations of the parameters of a model."""
    return _specs_of_json(model.model_dump_json())


@functools.cache
def _specs_of_json(model: str) -> dict:
    return definition_of(ModelConfig.model_validate_json(model)).specs
