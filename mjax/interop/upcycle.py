"""Dense weights as those of a model with experts: upcycling with granularity.

The MLP of a layer is cut into G parts along its width, G = intermediate_size /
moe_intermediate_size. Expert e is part e % G, so experts come in groups of G that are a whole MLP
each. A group's columns of the router are drawn at random and equal. So a token is sent to whole
groups, and the sum of its experts is that of the MLP over the sum of gates times G, which a factor
on `down` undoes (He et al. 2024, arXiv 2410.07524, "virtual groups"). Invariant: with normalized
gates the model computes what the dense one does, up to rounding. Without them gates are what they
are where all logits are equal, and it is an approximation.

Megatron-LM spreads the factor as cube roots over gate, up and down, which is not exact where the
activation is SiLU; here `down` takes all of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from mjax.checkpoint.base.source import Index, Path, Source, flat
from mjax.config.languages.layer_pattern import (
    BRANCHES,
    branch_groups,
    branches_of,
    pattern_of,
    sizes_of,
    stack_index,
    stack_of,
)
from mjax.config.schema.model import ModelConfig, MoeConfig
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec

_NAME = BRANCHES["experts"].name
_DRAWN, _ZERO = "router", ("router_bias", "expert_bias")


def upcycled(source: Source, cfg: ModelConfig, seed: int) -> tuple[Source, dict[Path, str]]:
    """(the weights of `source`, whose MLPs are experts where `cfg` has experts; what was done for
    each parameter that is not as it was, in words).

    Raises `UserError` where the sizes of both do not fit.
    """
    dense, model = source.cfg, _with_experts(source.cfg, cfg)
    if model.layer_kinds == dense.layer_kinds:
        return source, {}
    parts = _granularity(dense, model)
    specs = flat(definition_of(model).specs)
    rows = stack_index(dense.layer_kinds)
    layers: dict[str, list[int]] = {}  # of each stack
    for number, kind in enumerate(model.layer_kinds):
        layers.setdefault(stack_of(kind), []).append(number)

    def read_layer(path: Path, number: int, index: Index) -> np.ndarray:
        """The part `index` of a parameter of one layer, [1, ...]."""
        kind = dense.layer_kinds[number]
        row = rows[number]
        in_source = stack_of(kind), *path[1:]
        own = slice(row, row + 1), *index
        if not _is_new(path, model.layer_kinds[number], kind):
            return source.read(in_source, own)
        name, spec = path[-1], specs[path]
        if path[1:] == (_NAME, _DRAWN):
            drawn = _router(spec, model, parts, (seed, number))
            return drawn[index][None]
        if name in _ZERO:
            return _no_weights((slice(0, 1), *index))
        read = partial(source.read, in_source)
        made = _experts_of_mlp(read, own, spec, parts)
        if not name.startswith("down"):
            return made
        scale = scale_of_down(model.moe, parts) / (1 if name == "down" else parts)
        return made.astype(np.float32) * np.float32(scale)

    def read(path: Path, index: Index) -> np.ndarray:
        if path[0] not in layers:
            return source.read(path, index)
        numbers = layers[path[0]][index[0].start : index[0].stop]
        found = [read_layer(path, number, index[1:]) for number in numbers]
        return np.concatenate(found) if found else _no_weights(index)

    made = {}
    for path in specs:
        numbers = layers.get(path[0], [])
        if any(_is_new(path, model.layer_kinds[n], dense.layer_kinds[n]) for n in numbers):
            made[path] = _what_was_done(path, model.moe, parts)
    return replace(source, cfg=model, read=read), made


def scale_of_down(moe: MoeConfig, parts: int) -> float:
    """The factor on `down` that makes experts of `parts` to an MLP add up to the MLP.

    Each part gets the same share of the sum of gates. The sum is routed_scaling_factor if gates are
    normalized, else its value for equal logits.
    """
    total = 1.0
    if not moe.norm_topk_prob:
        one = 1 / moe.num_experts if moe.scoring_func == "softmax" else 0.5
        total = moe.num_experts_per_tok * one
    return parts / (total * moe.routed_scaling_factor)


def _no_weights(index: Index) -> np.ndarray:
    return np.zeros([s.stop - s.start for s in index], np.float32)


def _experts_of_mlp(
    read: Callable[[Index], np.ndarray], index: Index, spec: ParamSpec, parts: int
) -> np.ndarray:
    """Experts [1, ..] of a layer: parts of what `read` gives of its MLP; `index` has them, too."""
    at, wide = spec.axes.index("experts"), None
    if "mlp" in spec.axes:
        wide = spec.axes.index("mlp")
    found: dict[int, np.ndarray] = {}
    numbers = range(index[at].start, index[at].stop)
    for part in {number % parts for number in numbers}:
        cut = list(index)
        if wide is not None:
            first = part * spec.shape[wide]
            cut[wide] = slice(first + cut[wide].start, first + cut[wide].stop)
        del cut[at]
        found[part] = read(tuple(cut))
    return np.stack([found[number % parts] for number in numbers], at)


def _router(spec: ParamSpec, model: ModelConfig, parts: int, seed: tuple[int, int]) -> np.ndarray:
    """The router [D, E] of a layer: a column drawn for each group of experts."""
    _, width, experts = spec.shape
    drawn = np.random.default_rng(seed).standard_normal((width, experts // parts), np.float32)
    return np.repeat(drawn * np.float32(model.initializer_range), parts, 1)


# ---- what fits ---------------------------------------------------------------------------------


def _with_experts(dense: ModelConfig, cfg: ModelConfig) -> ModelConfig:
    """The model of `dense` with the experts of `cfg` in the place of MLPs."""
    kinds = list(dense.layer_kinds)
    for number, (ours, theirs) in enumerate(zip(cfg.layer_kinds, kinds, strict=False)):
        if _replaces(ours, theirs):
            kinds[number] = ours
    if tuple(kinds) == dense.layer_kinds:
        return dense
    moe = dense.moe if dense.moe.num_experts else cfg.moe
    return dense.model_copy(update={"layer_pattern": pattern_of(kinds), "moe": moe})


def _replaces(ours: str, theirs: str) -> bool:
    """Whether a layer is another one with experts in the place of its MLP."""
    names = {"experts": "mlp"}
    like = [tuple(names.get(word, word) for word in group) for group in branch_groups(ours)]
    same = tuple(like) == branch_groups(theirs) and sizes_of(ours) == sizes_of(theirs)
    return same and "experts" in branches_of(ours) and "mlp" in branches_of(theirs)


def _is_new(path: Path, ours: str, theirs: str) -> bool:
    """Whether a parameter of a layer is made of an MLP's."""
    return path[1] == _NAME and _replaces(ours, theirs)


def _granularity(dense: ModelConfig, model: ModelConfig) -> int:
    """The parts of an MLP. Raises `UserError` where experts cannot be made of them."""
    moe, width = model.moe, dense.intermediate_size
    parts, rest = divmod(width, moe.moe_intermediate_size)
    problem = None
    if rest or not parts:
        problem = (
            f"moe_intermediate_size={moe.moe_intermediate_size} does not divide the width of the "
            f"dense MLP, {width}"
        )
    elif moe.num_experts % parts or moe.num_experts_per_tok % parts:
        problem = (
            f"num_experts={moe.num_experts} and num_experts_per_tok={moe.num_experts_per_tok} must "
            f"be multiples of the {parts} parts of an MLP"
        )
    elif (moe.num_experts // moe.n_group) % parts:
        problem = f"n_group={moe.n_group} divides the {parts} parts of an MLP"
    elif moe.shared_expert_intermediate_size:
        problem = (
            "shared_expert_intermediate_size: shared experts are not made of an MLP; set it to 0"
        )
    elif moe.latent_size:
        problem = "latent_size: projections to a latent are not made of an MLP; leave it out"
    elif model.layer_sizes:
        raise UserError("checkpoint.init_changes=[experts] is not built for model.layer_sizes")
    if problem:
        raise UserError(f"checkpoint.init_changes=[experts]: model.moe.{problem}")
    return parts


def _what_was_done(path: Path, moe: MoeConfig, parts: int) -> str:
    name = path[-1]
    if path[1:] == (_NAME, _DRAWN):
        return f"drawn from run.seed, equal for each {parts} experts"
    if name in _ZERO:
        return "zero"
    copies = moe.num_experts // parts
    text = f"{moe.num_experts} experts of the MLP's, {parts} parts in {copies} copies"
    if name.startswith("down"):
        text += f", times {scale_of_down(moe, parts) / (1 if name == 'down' else parts):g}"
    return text
