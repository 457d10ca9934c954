"""Rotary positions in a config.json, in either spelling.

`rope_theta` stands beside `rope_scaling`, or both are in transformers 5's `rope_parameters`.
Releases of transformers differ in the place that they read. Invariant: what stands in two places is
the same in both, or the file is refused; what a kind of scaling does not use is left out.
"""

import math
from collections.abc import Iterable
from typing import Any

from mjax.config.schema.model import ROPE_KEYS, ModelConfig, RopeScaling
from mjax.errors import UserError
from mjax.interop.huggingface.families.parts import Part, say_unused, shape

_LENGTH = "original_max_position_embeddings"
_UNREAD = "max_position_embeddings"  # Ministral 3 has it here, too
_TYPES = {"su": "longrope"} | {name: name for name in ROPE_KEYS}  # su: Phi-3's first name
_NEEDED_KEYS = {  # readers differ in what they assume where these are left out
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", _LENGTH),
    "longrope": ("short_factor", "long_factor", _LENGTH),
}
_PHI3_LENGTH = 4096  # where it is left out, whatever rope_scaling says
_FULL, _WINDOW = "full_attention", "sliding_attention"

Said = tuple[str, str, Any]  # the place in a config.json, the key that it gives, the value


def rope(theta: float = 10000.0, fraction: float | None = None, original: bool = False) -> Part:
    """Rotary positions of one kind. Written in the older spelling, which all readers take.

    `fraction`: of a head that is turned where nothing is said; None: the family turns whole heads.
    `original`: the family keeps original_max_position_embeddings outside, as Phi-3 does.
    """

    def read(config: dict) -> dict:
        said = _flat(config)
        length = config.pop(_LENGTH, None)
        if original:
            said = [(w, k, "longrope" if v == "yarn" else v) for w, k, v in said]
            length = length or _PHI3_LENGTH
        values = _agreeing([*said, (_LENGTH, _LENGTH, length)])
        turned = values.pop("partial_rotary_factor", None) or fraction or 1
        if turned != 1 and fraction is None:
            raise UserError(f"config.json: partial_rotary_factor={turned} is not supported")
        fields = {"rope.rope_theta": values.pop("rope_theta", None) or theta}
        fields |= {"rope.rope_scaling": _scaling(values)}
        return fields | ({"rope.partial_rotary_factor": float(turned)} if fraction else {})

    def write(cfg: ModelConfig) -> dict:
        scaling = _rope_written(cfg)
        out = {"rope_theta": cfg.rope.rope_theta, "rope_scaling": scaling}
        if original and scaling:
            scaling = {k: v for k, v in scaling.items() if k not in (_LENGTH, "rope_type")}
            out |= {_LENGTH: cfg.rope.rope_scaling.original_max_position_embeddings}
            out |= {"rope_scaling": scaling}
        return out | ({"partial_rotary_factor": cfg.rope.partial_rotary_factor} if fraction else {})

    return Part(read, write)


def sizes_with_rope(
    theta: float = 10000.0, fraction: float | None = None, **defaults: object
) -> tuple[Part, Part]:
    """`shape` and `rope`, which most families have, with the defaults of both."""
    return shape(**defaults), rope(theta, fraction)


def typed_rope(
    theta: float,
    local: float,
    key: str = "rope_theta",
    local_key: str | None = "rope_local_base_freq",
    scales_both: bool = False,
) -> Part:
    """One base for full and one for windowed layers, under keys of the family (Gemma 3's).

    `local_key`: None: windowed layers have theirs in `rope_parameters` alone (OLMo 3's).
    `scales_both`: transformers scales windowed layers by `rope_scaling`, too, which is refused.
    """

    def read(config: dict) -> dict:
        new = _dictionary(config, "rope_parameters")
        old = _dictionary(config, "rope_scaling")
        unknown = sorted(new.keys() - {_FULL, _WINDOW})
        if unknown:
            raise UserError(
                f"config.json: rope_parameters has {unknown[0]!r}, which is not known (only "
                f"{_FULL} and {_WINDOW}, each with parameters of its own)"
            )
        full = [*_rope_keys("rope_scaling", old), (key, "rope_theta", config.pop(key, None))]
        full += _rope_keys(f"rope_parameters.{_FULL}", _dictionary(new, _FULL))
        window = [(local_key, "rope_theta", config.pop(local_key, None))]
        window += _rope_keys(f"rope_parameters.{_WINDOW}", _dictionary(new, _WINDOW))
        window += _rope_keys("rope_scaling", old) if scales_both else []
        values, of_window = _agreeing(full), _agreeing(window)
        own = of_window.pop("rope_theta", None) or local
        if of_window.get("rope_type", "default") != "default":
            raise UserError("config.json: RoPE of sliding_attention must not be scaled")
        _scaling(of_window)
        return {
            "rope.rope_theta": values.pop("rope_theta", None) or theta,
            "rope.rope_local_theta": own,
            "rope.rope_scaling": _scaling(values),
        }

    def write(cfg: ModelConfig) -> dict:
        own, scaling = cfg.rope.rope_local_theta, _rope_written(cfg)
        out = {key: cfg.rope.rope_theta, "rope_scaling": scaling}
        if local_key is not None:
            return out | {local_key: own}
        full = {"rope_type": "default", key: cfg.rope.rope_theta} | (scaling or {})
        window = {"rope_type": "default", key: own}
        return out | {"rope_parameters": {_FULL: full, _WINDOW: window}}

    return Part(read, write)


def _dictionary(config: dict, name: str) -> dict:
    """Remove and return a dictionary, without nulls; none is an empty one."""
    found = config.pop(name, None) or {}
    if not isinstance(found, dict):
        raise UserError(f"config.json: {name}={found!r} must be an object; give one or null")
    return {key: value for key, value in found.items() if value is not None}


def _rope_keys(name: str, values: dict) -> list[Said]:
    """The entries of a dictionary. `rope_type` counts, and its older name `type` without it."""
    older = values.get("type")
    named = {key: value for key, value in values.items() if key != "type"}
    if older is not None:
        named.setdefault("rope_type", older)
    if "rope_type" in named:
        named["rope_type"] = _TYPES.get(named["rope_type"], named["rope_type"])
    return [(f"{name}.{key}", key, value) for key, value in named.items()]


def _flat(config: dict) -> list[Said]:
    """Rotary positions of one kind in a config.json."""
    beside = [(key, key, config.pop(key, None)) for key in ("rope_theta", "partial_rotary_factor")]
    old = _rope_keys("rope_scaling", _dictionary(config, "rope_scaling"))
    new = _rope_keys("rope_parameters", _dictionary(config, "rope_parameters"))
    seen = {key for _, key, value in [*beside, *old] if value is not None}
    for where, key, value in new if old else ():
        if key not in seen:
            raise UserError(
                f"config.json: {where}={value!r} has no effect beside rope_scaling, which "
                "transformers reads alone; keep one of the two dictionaries"
            )
    return [*beside, *old, *new]


def _agreeing(said: Iterable[Said]) -> dict:
    """Each key with its value. Raises `UserError` where two places give it different ones."""
    first: dict[str, tuple[str, Any]] = {}
    for where, key, value in said:
        if value is None:
            continue
        before, known = first.setdefault(key, (where, value))
        if known != value:
            raise UserError(
                f"config.json: {before}={known!r} and {where}={value!r} say the same; keep the one "
                "that is meant"
            )
    return {key: value for key, (_, value) in first.items()}


def _scaling(values: dict) -> dict | None:
    """Hugging Face's scaling as ours. Raises `UserError` for unknown types and keys."""
    kind = values.pop("rope_type", "default")
    known = {*RopeScaling.model_fields, "finetuned", "partial_rotary_factor"} | {_UNREAD}
    unknown = sorted(values.keys() - known)
    if kind not in (*ROPE_KEYS, "default") or unknown:
        what = f"key {unknown[0]!r}" if kind in (*ROPE_KEYS, "default") else f"rope_type {kind!r}"
        raise UserError(f"config.json: rope_scaling has {what}, which is not supported")
    used = ROPE_KEYS.get(kind, ())
    unused = sorted(values.keys() - {*used, _LENGTH, "finetuned", _UNREAD})
    # DeepSeek's code reads mscale_all_dim of every kind.
    none = {"mscale": 0, "mscale_all_dim": 0, "partial_rotary_factor": 1, "llama_4_scaling_beta": 0}
    wrong = [key for key in unused if key in none and values[key] != none[key]]
    if wrong:
        raise UserError(
            f"config.json: rope_scaling of type {kind!r} has {wrong[0]}={values[wrong[0]]!r}, "
            "which is not supported; remove it"
        )
    if unused:
        say_unused(f"rope_scaling of type {kind!r} does not use {', '.join(unused)}")
    if kind == "default":
        return None
    missing = [key for key in _NEEDED_KEYS[kind] if key not in values]
    if missing:
        raise UserError(f"config.json: rope_scaling of type {kind!r} lacks {missing[0]!r}; add it")
    scaling = {key: values[key] for key in used if key in values}
    if kind == "longrope":
        scaling |= _temperature(values)
    lists = {k: [float(x) for x in v] for k, v in scaling.items() if isinstance(v, list)}
    return {"rope_type": kind, **scaling, **lists}


def _temperature(values: dict) -> dict:
    """LongRoPE's attention_factor, where a factor says it instead of the two lengths."""
    factor = values.get("factor")
    if factor is None or "attention_factor" in values:
        return {}
    larger = math.log(factor) / math.log(values[_LENGTH]) if factor > 1 else 0.0
    return {"attention_factor": math.sqrt(1 + larger)}


def _rope_written(cfg: ModelConfig) -> dict | None:
    """Our scaling in Hugging Face's words."""
    if cfg.rope.rope_scaling is None:
        return None
    given = cfg.rope.rope_scaling.model_dump(exclude_unset=True, exclude_none=True)
    kind = given["rope_type"]
    used = {key: value for key, value in given.items() if key in ("rope_type", *ROPE_KEYS[kind])}
    return {**used, "type": kind} if kind == "longrope" else used
