"""Megatron-LM's optimizer state -> ours: fp32 masters, both moments of Adam, the number of steps.

States by parameter are read: those of optimizers that are not distributed, and of distributed ones
saved as fully reshardable. The default of distributed ones, buckets, does not say which parameter
lies where, and is refused. Source: megatron/core/optimizer (distrib_optimizer.py, optimizer.py).
"""

import re
from dataclasses import dataclass, replace

from flax.traverse_util import flatten_dict

from mjax.checkpoint.base.source import Path, Source
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.parameters import source_of_store
from mjax.interop.megatron.stored.torch_dist import TorchDist
from mjax.models import definition_of

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_AGAIN = "load and save it once in Megatron-LM with --dist-ckpt-optim-fully-reshardable"
_MASTERS = "param", "fp32_param"


@dataclass(frozen=True)
class OptimizerState:
    """masters: the parameters in fp32. mu, nu: Adam's moments. steps: updates that it made."""

    masters: Source
    mu: Source
    nu: Source
    steps: int


def optimizer_state(store: TorchDist, cfg: ModelConfig, model: Source) -> OptimizerState:
    """The state of the optimizer in a checkpoint; `UserError` where it has none by parameter."""
    if store.weights_alone:
        raise UserError(f"{store.folder}: {store.weights_alone}, or leave out --with-optimizer")
    by_word: dict[str, dict] = {}
    for name, tensor in store.tensors.items():
        if _BUCKETS.match(name):
            raise UserError(
                f"{store.folder}: the optimizer state is dp_reshardable, buckets that do not say "
                f"which parameter lies where; {_AGAIN}, or leave out --with-optimizer"
            )
        if found := _STATE.fullmatch(name):
            by_word.setdefault(found[1], {})[found[2]] = tensor
    if not {"exp_avg", "exp_avg_sq"} <= by_word.keys():
        raise UserError(
            f"{store.folder} holds no state of Adam (exp_avg, exp_avg_sq), but "
            f"{', '.join(sorted(by_word)) or 'none'}; leave out --with-optimizer"
        )
    masters = next((by_word[word] for word in _MASTERS if word in by_word), None)
    return OptimizerState(
        model if masters is None else _source(store, cfg, masters, model),
        _source(store, cfg, by_word["exp_avg"]),
        _source(store, cfg, by_word["exp_avg_sq"]),
        _steps(store),
    )


def trained_paths(cfg: ModelConfig) -> frozenset[Path]:
    """The parameters that have state: all but those that no gradient moves."""
    specs = flatten_dict(definition_of(cfg).specs)
    return frozenset(path for path, spec in specs.items() if not spec.counts)


def _source(store: TorchDist, cfg: ModelConfig, tensors: dict, model: Source | None = None):
    """The tensors of one word. Parameters that no gradient moves have none; masters take `model`'s
    for them, moments are zero."""
    own = replace(store, tensors=tensors)
    trained = trained_paths(cfg)
    source = source_of_store(own, cfg, lambda: own.check_files(set(tensors)), trained)
    if model is None:
        return source

    def read(path, index):
        return (source if path in trained else model).read(path, index)

    return replace(source, read=read, has=None)


def _steps(store: TorchDist) -> int:
    """The number of updates, by the optimizer itself, or else the iteration."""
    state = store.common.get("optimizer")
    while isinstance(state, dict):
        common = state.get("state", {})
        number = common.get("common_step") if isinstance(common, dict) else None
        groups = state.get("param_groups")
        if groups and isinstance(groups[0], dict):
            number = groups[0].get("step", number)
        if isinstance(number, int | float):
            return int(number)
        state = state.get("optimizer", state.get(0))
    return iteration_of(store)


def iteration_of(store: TorchDist) -> int:
    """The iteration that a checkpoint was written after."""
    number = store.common.get("iteration")
    if not isinstance(number, int) or not 0 <= number < 10**12:
        raise UserError(f"{store.where_common}: iteration={number!r} is not a number of steps")
    return number
