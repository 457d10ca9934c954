"""PEFT's adapter_config.json, both ways.

Invariant: every key that is set is read, changes nothing in how the weights of a file are used, or
is refused by name.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mjax.checkpoint.base.hub import hub_name
from mjax.checkpoint.merged import adapter_alpha
from mjax.errors import UserError, or_user_error
from mjax.interop.peft.modules import shortest_names
from mjax.json_file import read_json
from mjax.models.base.adapted import adapter_scale

ADAPTER_CONFIG = "adapter_config.json"
# Keys that say how adapters were chosen or began, or which keys of others they go by.
_WITHOUT_EFFECT = frozenset(
    """task_type auto_mapping peft_version revision inference_mode exclude_modules target_modules
    layers_to_transform layers_pattern init_lora_weights modules_to_save fan_in_fan_out
    ephemeral_gpu_offload runtime_config megatron_core loftq_config eva_config corda_config
    lora_ga_config qalora_group_size""".split()
)
_READ = frozenset(
    """peft_type base_model_name_or_path r lora_alpha lora_dropout use_rslora use_dora rank_pattern
    revision alpha_pattern target_parameters bias""".split()
)
# Starts that leave the base as it is, or of which PEFT's files hold the difference from the base.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a file with adapters.

    ranks, alphas: those of modules whose names end with a match of a regular expression.
    parameters: ends of the names of parameters that have an adapter of their own.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    base: str | None = None
    parameters: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of a module."""
        return _first_match(self.ranks, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """The factor of the product of a module's adapter, which has this rank."""
        return adapter_scale(_first_match(self.alphas, module, self.alpha), rank, self.rslora)

    def is_parameter(self, name: str) -> bool:
        """Whether a parameter of this name has an adapter."""
        return any(name == end or name.endswith(f".{end}") for end in self.parameters)


def _first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        ends = re.compile(rf"(.*\.)?({pattern})$")
        if ends.match(module) or ends.match(f"{module}.weight"):
            return value
    return default


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json in a folder. Raises `UserError` naming what is not supported."""
    file = folder / ADAPTER_CONFIG
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type={config.get('peft_type')!r} is not supported (only 'LORA')"
        )
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        raise UserError(
            f"{file}: init_lora_weights={start!r} changed the base, which others do not have; save "
            "the adapter with path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if value and key not in _READ | _WITHOUT_EFFECT or (key, value) == ("bias", "all"):
            raise UserError(f"{file}: {key}={value!r} is not supported; leave it out")
    if config.get("bias", "none") != "none":
        raise UserError(f"{file}: bias={config['bias']!r} is not supported (only 'none')")
    wrong = f"{file}: {{reason}}; mend it"
    with or_user_error(wrong, (TypeError, ValueError, KeyError, AttributeError, re.error)):
        found = AdapterConfig(
            rank=_positive(int, "r", config.get("r", 8)),
            alpha=_positive(float, "lora_alpha", config.get("lora_alpha", 8)),
            ranks=_patterns(int, "rank_pattern", config),
            alphas=_patterns(float, "alpha_pattern", config),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            dropout=float(config.get("lora_dropout") or 0.0),
            base=_base_of(config),
            parameters=tuple(map(str, config.get("target_parameters") or ())),
        )
    return found


def _base_of(config: dict) -> str | None:
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{base}@{revision}" if revision and hub_name(base) else base


def _patterns(kind: type, key: str, config: dict) -> dict:
    found = config.get(key) or {}
    for pattern in found:
        re.compile(pattern)
    return {pattern: _positive(kind, key, value) for pattern, value in found.items()}


def _positive(kind: type, key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}={value!r} is no number above 0")
    if kind is int and value != int(value):
        raise ValueError(f"{key}={value!r} is no whole number")
    return kind(value)


@dataclass(frozen=True)
class Setting:
    """The settings of the adapter of one module.

    is_parameter: PEFT finds it as a parameter. transposed: it is stored as [inputs, outputs].
    """

    rank: int
    scale: float
    is_parameter: bool = False
    transposed: bool = False


def write_adapter_config(
    settings: Mapping[str, Setting], whole: set[str], names: set[str], **said: Any
) -> bytes:
    """An adapter_config.json.

    settings: by the name of the module or parameter. whole: modules that are saved whole. names:
    all modules and parameters of the model. said: other keys; use_rslora is among them.
    """
    rslora = said["use_rslora"]
    ranks = {name: setting.rank for name, setting in settings.items()}
    alphas = {
        n: adapter_alpha(setting.scale, setting.rank, rslora) for n, setting in settings.items()
    }
    rank, alpha = (_most_common(values.values(), 8) for values in (ranks, alphas))
    modules = {name for name, setting in settings.items() if not setting.is_parameter}
    parameters = set(settings) - modules
    config = {
        "peft_type": "LORA",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": shortest_names(modules, names),
        "target_parameters": shortest_names(parameters, names) or None,
        "modules_to_save": shortest_names(whole, names, dotted=False) or None,
        "rank_pattern": _exceptions(ranks, rank, names),
        "alpha_pattern": _exceptions(alphas, alpha, names),
        "fan_in_fan_out": any(setting.transposed for setting in settings.values()),
        "bias": "none",
        "init_lora_weights": True,
        **said,
    }
    return (json.dumps(dict(sorted(config.items())), indent=2) + "\n").encode()


def _most_common(values: Any, default: Any) -> Any:
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts else default


def _exceptions(values: Mapping[str, Any], usual: Any, names: set[str]) -> dict[str, Any]:
    """Values other than the usual one, by ends of names."""
    found = {}
    for value in sorted(set(values.values()) - {usual}):
        having = {name for name, own in values.items() if own == value}
        found |= dict.fromkeys(shortest_names(having, names), value)
    return found
