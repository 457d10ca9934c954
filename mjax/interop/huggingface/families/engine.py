"""Reads and writes a config.json, and finds the tensors of a model, by the table of families.

Invariant: every key of a config.json is read, listed as meaningless (`unread_keys.py`), or refused
by name. A config is written only if reading it back gives the same model.
"""

import contextlib
import copy
import difflib
import functools
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NoReturn

from mjax.checkpoint.base.source import Path, flat
from mjax.config.languages.layer_pattern import stack_of
from mjax.config.schema.keys import leaf_keys, model_of, nested, value_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, reason
from mjax.interop.coded import quantization
from mjax.interop.huggingface.families.family import Family, Slot, SlotsByPath
from mjax.interop.huggingface.families.parts import say_unused
from mjax.interop.huggingface.families.table import FAMILIES
from mjax.interop.huggingface.families.unread_keys import read_of, require_known
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec

# The weight of the balance loss.
BALANCE_KEYS = "router_aux_loss_coef", "aux_loss_alpha"
# Keys of ours that a config.json does not carry, or that do not change the trained function.
UNSAID = frozenset(
    """model_type vocab_multiple scaled_output_init moe.router_z_loss_coef moe.router_aux_loss_over
    moe.router_aux_loss_type moe.expert_bias_update_rate moe.capacity_factor moe.drop_policy
    moe.router_jitter_noise moe.sinkhorn moe.skip_padding vision.max_images
    vision.length_multiple vision.max_patches vision.min_pixels vision.max_pixels""".split()
)

SCORED = "ForSequenceClassification"
MOST_LAYERS = 100_000
# What reading a value of another kind raises.
WRONG_KIND = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Keys(dict):
    """A config.json, whose missing keys are named."""

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(f"config.json lacks {key!r}, which its model_type needs; add it")


def config_from_hf(config: dict) -> ModelConfig:
    """A parsed config.json -> ours. Raises `UserError` naming what is unknown or unsupported."""
    return with_named_values(_model_of, config)


def _model_of(config: dict) -> ModelConfig:
    quantization.weight_blocks(config)  # refuses codes that are not read
    if quantization.has_static_scales(config):
        say_unused("quantization_config has static scales, which are for servers: not used")
    config = {k: v for k, v in read_of(config).items() if k not in quantization.KEYS_OF_CODES}
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, n=3)
        hint = f"near are {', '.join(near)}; " if near else ""
        raise UserError(
            f"config.json: model_type={name!r} is not supported; {hint}"
            "`mjax convert families` lists all"
        )
    family = FAMILIES[name]
    rest = _Keys(family.left_out | config)
    fields: dict = dict(family.fixed)
    for part in family.parts:
        fields |= part.read(rest)
    if _is_scored(config, family):
        fields["num_labels"] = config.get("num_labels", len(config.get("id2label") or "01"))
    require_known(rest, name)
    return model_of({"model_type": name, **nested(fields)}, "config.json: {key}: {why}")


def _is_scored(config: dict, family: Family) -> bool:
    """Whether a decoder has a head of scores in place of its vocabulary's."""
    scored = _scored_class(family)
    return scored != family.architecture and config.get("architectures") == [scored]


def _scored_class(family: Family) -> str:
    """The class of a decoder with scores; that of the family where it is no decoder."""
    return re.sub("(ForCausalLM|LMHeadModel)$", SCORED, family.architecture)


def config_of_folder(config: dict) -> ModelConfig:
    """The model of a folder with weights, which may be those of a base class without heads."""
    base_classes = [[family.base_class] for family in FAMILIES.values() if family.base_class]
    if config.get("architectures") in base_classes:
        config = config | {"num_labels": 0}
    return config_from_hf(config)


def config_to_hf(cfg: ModelConfig) -> dict:
    """Our model -> a config.json of its family. Raises `UserError` if none can express it.

    If the family's balance loss is another one, its coefficient is 0: none means the same.
    """
    problems = []
    for name in [cfg.model_type] if cfg.model_type else FAMILIES:
        said, config = cfg, _written_config(name, cfg)
        try:
            back = config_from_hf(dict(config))
            if back.moe.router_aux_loss_type != cfg.moe.router_aux_loss_type:
                moe = cfg.moe.model_copy(update={"router_aux_loss_coef": 0.0})
                said = cfg.model_copy(update={"moe": moe})
                config = _written_config(name, said)
                back = config_from_hf(dict(config))
        except UserError as e:
            problems.append(f"{name}: {e}")
            continue
        differing = [key for key in _keys_said(cfg) if _meaning(back, key) != _meaning(said, key)]
        if not differing:
            return config
        problems.append(f"{name}: no model.{differing[0]}={value_of(cfg, differing[0])!r}")
    raise UserError(f"no Hugging Face family can express this model ({'; '.join(problems)})")


def _written_config(name: str, cfg: ModelConfig) -> dict:
    """A config.json of the family of that name, which may not say all of `cfg`."""
    family = FAMILIES[name]
    config: dict = {"architectures": [family.architecture], "model_type": name}
    if cfg.num_labels:
        config |= {"architectures": [_scored_class(family)], "num_labels": cfg.num_labels}
    for part in reversed(family.parts):  # what reads first has the last word
        config |= part.write(cfg)
    return config


def family_of(cfg: ModelConfig) -> Family:
    """The family that `config_to_hf` writes."""
    return FAMILIES[config_to_hf(cfg)["model_type"]]


def _keys_said(cfg: ModelConfig) -> list[str]:
    skipped = UNSAID | {"hidden_dropout", "attention.attention_dropout", "initializer_range"}
    if not cfg.has_role("feedforward"):
        skipped |= {"intermediate_size"}
    if not cfg.reads_group("attention"):
        skipped |= {"attention.head_dim", "attention.num_key_value_heads"}
    return [key for key in leaf_keys(ModelConfig) if key not in skipped]


def _meaning(cfg: ModelConfig, key: str) -> object:
    """The value of a key; patterns that are spelled differently mean the same layers."""
    return cfg.layer_kinds if key == "layer_pattern" else value_of(cfg, key)


# ---- values that are not of the kind that belongs there ------------------------------------------


def with_named_values(read: Callable[[dict], ModelConfig], config: dict) -> ModelConfig:
    """The model that `read` makes of a config.json.

    Raises `UserError` naming a value that it cannot read.

    It is the first which, replaced by another, lets `read` come to an end.
    """
    for path in _paths(config):
        count = _value_at(config, path)
        if "layer" in str(path[-1]) and isinstance(count, int) and count > MOST_LAYERS:
            raise UserError(
                f"config.json: {_key_text(path)}={count} is above {MOST_LAYERS}; mend it"
            )
    try:
        return read(config)
    except UserError:
        raise
    except WRONG_KIND as e:
        path = next((path for path in _paths(config) if _is_cause(read, config, path)), None)
        if path is None:
            raise UserError(f"config.json cannot be read: {reason(e)}; mend it") from e
        value = reprlib.repr(_value_at(config, path))
        raise UserError(
            f"config.json: {_key_text(path)}={value} is not of the kind that belongs there "
            f"({reason(e)}); mend it"
        ) from e


def _key_text(path: tuple[str, ...]) -> str:
    return ".".join(map(str, path))  # a dictionary of labels may have numbers as its keys


def _value_at(config: dict, path: tuple[str, ...]) -> object:
    return functools.reduce(dict.__getitem__, path, config)


def _paths(config: dict) -> Iterator[tuple[str, ...]]:
    """The keys of a config.json, those of its parts first."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
        yield (key,)


def _is_cause(read: Callable[[dict], ModelConfig], config: dict, path: tuple[str, ...]) -> bool:
    """Whether a config.json can be read once a key has a value of another kind, or none."""
    changed = copy.deepcopy(config)
    place = _value_at(changed, path[:-1])
    for value in (None, 8, "silu", {}):
        place[path[-1]] = value
        with contextlib.suppress(*WRONG_KIND):  # a `UserError` is a ValueError
            read(changed)
            return True
    return False


# ---- names -------------------------------------------------------------------------------------


def slots(cfg: ModelConfig, specs: dict, family: Family | None = None) -> SlotsByPath:
    """For each parameter, the places of its matrices and vectors in a checkpoint of the family.

    `family`: None: the model's.
    """
    family, leaves = family or family_of(cfg), flat(specs)
    pieces = {path: list(_pieces(cfg, family, path[0], spec)) for path, spec in leaves.items()}
    sizes: dict[str, dict[int, int]] = {}  # of fused tensors: position -> length
    for path, of_path in pieces.items():
        for slot, order in of_path:
            lengths = [slot.spec_of(leaves[path]).shape[axis] for axis in slot.dims[slot.axis]]
            sizes.setdefault(slot.tensor, {})[order] = math.prod(lengths)

    def placed(slot: Slot, order: int) -> Slot:
        before = [n for position, n in sizes[slot.tensor].items() if position < order]
        return replace(slot, start=slot.start + sum(before))

    found = {}
    for path, of_path in pieces.items():
        places = tuple(placed(slot, order) for slot, order in of_path)
        repeats = _repeats(cfg, path, places) if family.repeats_in_predictions else ()
        found[path] = (*repeats, *places)
    return found


def _repeats(cfg: ModelConfig, path: Path, places: tuple[Slot, ...]) -> Iterator[Slot]:
    """Slots of the copies of embedding and head in each layer of multi-token prediction."""
    for depth in range(cfg.num_nextn_predict_layers):
        layer = f"model.layers.{cfg.num_hidden_layers + depth}"
        names = {"embedding": "embed_tokens", "head": "shared_head.head"}
        if path[0] in names:
            yield replace(places[0], tensor=f"{layer}.{names[path[0]]}.weight")


def _pieces(
    cfg: ModelConfig, family: Family, stack: str, spec: ParamSpec
) -> Iterator[tuple[Slot, int]]:
    """(slot, position in a fused tensor) of each piece; `slots` moves it past those before."""
    layers = [i for i, kind in enumerate(cfg.layer_kinds) if stack_of(kind) == stack]
    layout = family.layout_of(spec)
    axes = [axis for axis in spec.axes if axis in ENUMERATING_AXES]
    counts = [n for axis, n in zip(spec.axes, spec.shape, strict=True) if axis in axes]
    for index in product(*map(range, counts)):
        at = dict(zip(axes, index, strict=True))
        placed = layout(spec, at)
        for slot in placed if isinstance(placed, tuple) else (placed,):
            name = slot.tensor.format(expert=at.get("experts"))
            if "layers" in at:
                name = f"model.layers.{layers[at['layers']]}.{name}"
            tensor, order = family.tensor_of(cfg, name)
            yield replace(slot, tensor=tensor), order
