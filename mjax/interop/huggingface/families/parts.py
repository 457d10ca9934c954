"""The vocabulary of families: two-way parts of a Hugging Face config.json.

`Part.read` takes its keys out of the dictionary and returns values of `ModelConfig` by their dotted
keys ("attention.head_dim"); `Part.write` is its inverse. Invariant: a part reads what it writes,
older spellings too, and raises `UserError` for a value that mjax cannot express.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mjax.config.languages.layer_pattern import BRANCHES, branches_of, pattern_of
from mjax.config.schema.keys import value_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError

REQUIRED = object()
HEAD_KEYS = "num_attention_heads num_key_value_heads head_dim attention_dropout"
# What GPT-2, BERT, ViT and CLIP have in common.
BIASED = {
    "position_embedding": "learned",
    "norm": "layernorm",
    "mlp_gated": False,
    "mlp_bias": True,
    "attention.attention_bias": True,
    "attention.attention_out_bias": True,
}


@dataclass(frozen=True)
class Part:
    """`read(config)` removes its keys from a config.json and returns ours; `write(cfg)`."""

    read: Callable[[dict], dict]
    write: Callable[[ModelConfig], dict]


def take(config: dict, key: str, default: Any = REQUIRED) -> Any:
    """Remove and return a key; a null counts as missing."""
    value = config.pop(key, None)
    if value is None and default is REQUIRED:
        raise UserError(f"config.json lacks {key!r}, which its model_type needs; add it")
    return default if value is None else value


def only(config: dict, key: str, *values: Any) -> None:
    """Remove a key that must be missing, null or one of `values`."""
    value = config.pop(key, None)
    if value is not None and value not in values:
        wanted = " or ".join(repr(v) for v in values if v is not None) or "null"
        raise UserError(f"config.json: {key}={value!r} is not supported (only {wanted})")


def say_unused(text: str) -> None:
    """Tell on standard error what a config.json has that is not used."""
    print(f"mjax: config.json: {text}", file=sys.stderr)


def alike(names: str, group: str = "") -> dict[str, str]:
    """{theirs: ours} of keys that are called alike; ours are in `group`, as in "attention."."""
    return {name: group + name for name in names.split()}


def same(fields: dict[str, str], defaults: dict[str, Any] | None = None) -> Part:
    """Keys (theirs: ours) of equal values; those in `defaults` may be missing."""
    defaults = defaults or {}

    def read(config: dict) -> dict:
        found = {}
        for theirs, ours in fields.items():
            value = take(config, theirs, defaults.get(theirs, REQUIRED))
            if value is not None:
                found[ours] = value
        return found

    return Part(read, lambda cfg: {hf: value_of(cfg, ours) for hf, ours in fields.items()})


def required(**values: Any) -> Part:
    """Keys that must be missing, null or have this value. An export leaves them out."""

    def read(config: dict) -> dict:
        for key, value in values.items():
            only(config, key, value)
        return {}

    return Part(read, lambda cfg: {})


def of_kind(kind: str) -> Part:
    """Layers of one kind, of which a config.json says nothing."""
    return Part(lambda config: {"layer_pattern": kind}, lambda cfg: {})


def called(part: Part, **names: str) -> Part:
    """A part some of whose keys the family calls otherwise: `names` has the family's by its own."""

    def read(config: dict) -> dict:
        for own, name in names.items():
            only(config, own)
            if config.get(name) is not None:
                config[own] = config.pop(name)
        return part.read(config)

    def write(cfg: ModelConfig) -> dict:
        return {names.get(key, key): value for key, value in part.write(cfg).items()}

    return Part(read, write)


def ignored(*keys: str) -> Part:
    """Keys that say nothing about the models of this family."""

    def read(config: dict) -> dict:
        for key in keys:
            config.pop(key, None)
        return {}

    return Part(read, lambda cfg: {})


# What transformers' router_aux_loss_coef weighs.
BALANCE = {"moe.router_aux_loss_type": "mean_over_layers"}

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(key: str, written: dict[str, str] | None = None, default: Any = REQUIRED) -> Part:
    """The activation under `key`; `written` overrides names on export."""

    def read(config: dict) -> dict:
        name = take(config, key, default)
        if name not in ACTIVATIONS:
            raise UserError(
                f"config.json: {key}={name!r} is not supported (only {', '.join(ACTIVATIONS)})"
            )
        return {"hidden_act": ACTIVATIONS[name]}

    names = {ours: hf for hf, ours in reversed(ACTIVATIONS.items())} | (written or {})
    return Part(read, lambda cfg: {key: names[cfg.hidden_act]})


def gemma_activation() -> Part:
    """Gemma's, whose first files say gelu and mean its tanh form.

    Releases of transformers differ in which of two keys they read, so a second one must agree.
    """
    tanh = "gelu_pytorch_tanh"
    one = activation("hidden_act", default=tanh)

    def read(config: dict) -> dict:
        if config.get("hidden_act") in (None, "gelu"):
            config["hidden_act"] = tanh
        only(config, "hidden_activation", config["hidden_act"])
        return one.read(config)

    return Part(read, one.write)


def shape(hidden_act: Part | None = None, **defaults: Any) -> Part:
    """The sizes that most families call by the same names; `defaults` are for keys left out.

    The activation is under its usual key, if no part of its own reads it.
    """
    hidden_act = hidden_act or activation("hidden_act")
    common = dict(num_key_value_heads=None, head_dim=None, tie_word_embeddings=False)
    common |= dict(rms_norm_eps=1e-6, initializer_range=0.02, attention_dropout=0.0)
    names = """vocab_size hidden_size intermediate_size num_hidden_layers max_position_embeddings
        tie_word_embeddings initializer_range"""
    fields = alike(names) | alike(HEAD_KEYS, "attention.") | {"rms_norm_eps": "norm_eps"}
    sizes = same(fields, common | defaults)
    return Part(
        lambda config: sizes.read(config) | hidden_act.read(config),
        lambda cfg: sizes.write(cfg) | hidden_act.write(cfg),
    )


def biases(attention: str | bool = "attention_bias", out: bool = True, mlp: bool = False) -> Part:
    """A key for biases on q, k, v (and, with `out`, the output), or their constant value; `mlp`:
    the family has mlp_bias."""

    def read(config: dict) -> dict:
        if isinstance(attention, bool):
            only(config, "attention_bias", attention)
        qkv = take(config, attention, False) if isinstance(attention, str) else attention
        fields = {"attention.attention_bias": qkv, "attention.attention_out_bias": qkv and out}
        return fields | ({"mlp_bias": take(config, "mlp_bias", False)} if mlp else {})

    def write(cfg: ModelConfig) -> dict:
        values = {attention: cfg.attention.attention_bias} if isinstance(attention, str) else {}
        return values | ({"mlp_bias": cfg.mlp_bias} if mlp else {})

    return Part(read, write)


def one_bias_key(default: bool) -> Part:
    """`use_bias`: biases of all projections or of none."""

    def read(config: dict) -> dict:
        fields = ("attention.attention_bias", "attention.attention_out_bias", "mlp_bias")
        return dict.fromkeys(fields, take(config, "use_bias", default))

    return Part(read, lambda cfg: {"use_bias": cfg.mlp_bias})


# ---- windows and other layer kinds -------------------------------------------------------------


def one_window() -> Part:
    """`sliding_window` of all layers; null, or left out: none."""

    def read(config: dict) -> dict:
        window = config.pop("sliding_window", None)
        kind = "full+mlp" if window is None else "window+mlp"
        return {"attention.sliding_window": window, "layer_pattern": kind}

    return Part(read, lambda cfg: {"sliding_window": cfg.attention.sliding_window})


def layer_types(
    older: Callable[[dict, int], list[bool]],
    nope: bool = False,
    kinds: tuple[str, str] = ("full+mlp", "window+mlp"),
) -> Part:
    """Per-layer `layer_types`, read before `shape`; where a config.json lacks them,
    `older(config, layers)` tells which layers have the window. `nope`: `no_rope_layers` has a 0
    for layers without rotary positions. `kinds`: of a layer without the window, and with it."""
    full, windows = kinds

    def read(config: dict) -> dict:
        # Without layer_types, SmolLM3's window is of the layers that RoPE does not turn.
        if nope and config.get("use_sliding_window") and not config.get("layer_types"):
            only(config, "sliding_window")
        windowed, window = _windows(config, older)
        layers = len(windowed)
        kinds = [windows if w else full for w in windowed]
        if nope:
            every = config.pop("no_rope_layer_interval", None) or 4
            turned = config.pop("no_rope_layers", None)
            turned = turned or [int((i + 1) % every != 0) for i in range(layers)]
            if any(w and not t for w, t in zip(windowed, turned, strict=True)):
                raise UserError("config.json: a windowed layer without RoPE is not supported")
            kinds = [k if t else "nope+mlp" for k, t in zip(kinds, turned, strict=True)]
        return {
            "layer_pattern": pattern_of(kinds),
            "attention.sliding_window": window if windows in kinds else None,
        }

    def write(cfg: ModelConfig) -> dict:
        kinds = cfg.layer_kinds
        names = {windows: "sliding_attention"}
        out = {"layer_types": [names.get(kind, "full_attention") for kind in kinds]}
        out |= {"sliding_window": cfg.attention.sliding_window}
        if older is optional_window:
            out |= {"use_sliding_window": windows in kinds}
        return out | (
            {"no_rope_layers": [int(kind != "nope+mlp") for kind in kinds]} if nope else {}
        )

    return Part(read, write)


def _windows(config: dict, older: Callable[[dict, int], list[bool]]) -> tuple[list[bool], Any]:
    """(which layers have the window, the window) of `layer_types`, or as `older` says."""
    layers = config["num_hidden_layers"]
    windowed = older(config, layers)  # takes its keys out
    types = config.pop("layer_types", None)
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != layers:
            what = f"has {unknown[0]!r}" if unknown else f"names {len(types)} layers"
            raise UserError(f"config.json: layer_types {what}, num_hidden_layers={layers}")
        windowed = [t == "sliding_attention" for t in types]
    window = take(config, "sliding_window", None)
    return [w and window is not None for w in windowed], window


# A layer, by whether it has a window and whether it has experts.
_LAYER_KINDS = {
    (False, False): "full+mlp",
    (True, False): "window+mlp",
    (False, True): "full+experts",
    (True, True): "window+experts",
}


def expert_layers(older: Callable[[dict, int], list[bool]], typed: bool) -> Part:
    """Qwen's: experts in each `decoder_sparse_step`-th layer but `mlp_only_layers`.

    Windows are as in `layer_types`; without `typed` the family has one for all layers or none.
    Reads before `shape`.
    """

    def read(config: dict) -> dict:
        windowed, window = _windows(config, older)
        step = take(config, "decoder_sparse_step", 1)
        dense = take(config, "mlp_only_layers", [])
        kinds = []
        for i, has_window in enumerate(windowed):
            has_experts = i not in dense and (i + 1) % step == 0
            kinds.append(_LAYER_KINDS[has_window, has_experts])
        return {
            "layer_pattern": pattern_of(kinds),
            "attention.sliding_window": window if any(windowed) else None,
        }

    def write(cfg: ModelConfig) -> dict:
        kinds = cfg.layer_kinds
        windowed = [BRANCHES[branches_of(kind)[0]].windowed for kind in kinds]
        names = {True: "sliding_attention", False: "full_attention"}
        out = {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, kind in enumerate(kinds) if "mlp" in branches_of(kind)],
            "sliding_window": cfg.attention.sliding_window,
            "use_sliding_window": any(windowed),
        }
        return out | ({"layer_types": [names[w] for w in windowed]} if typed else {})

    return Part(read, write)


def window_of_all(config: dict, layers: int) -> list[bool]:
    """Qwen3-MoE."""
    config.pop("max_window_layers", None)
    used = config.pop("use_sliding_window", None)
    if not used:
        config["sliding_window"] = None
    return [bool(used)] * layers


def every_second_below(config: dict, layers: int) -> list[bool]:
    """Qwen2-MoE: every second layer before max_window_layers."""
    used, first = config.pop("use_sliding_window", None), config.pop("max_window_layers", 28)
    if not used:
        config["sliding_window"] = None
    return [bool(used) and i % 2 == 0 and i < first for i in range(layers)]


def optional_window(config: dict, layers: int) -> list[bool]:
    """Qwen2, Qwen3, SmolLM3 before layer_types: the window from layer max_window_layers on."""
    used, first = config.pop("use_sliding_window", None), config.pop("max_window_layers", None)
    if not used:
        config["sliding_window"] = None
    return [bool(used) and i >= (first or 0) for i in range(layers)]


def every_second(config: dict, layers: int) -> list[bool]:
    """Gemma 2."""
    return [i % 2 == 0 for i in range(layers)]


def all_but_every(usual: int) -> Callable[[dict, int], list[bool]]:
    """Gemma 3, OLMo 3, EXAONE 4: each `sliding_window_pattern`-th layer sees all, else `usual`."""

    def windowed(config: dict, layers: int) -> list[bool]:
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        said = [config.pop(name, None) for name in names]
        period = said[0] or said[1] or usual
        if isinstance(period, str) and period == "L" * (len(period) - 1) + "G":
            period = len(period)
        return [(i + 1) % period != 0 for i in range(layers)]

    return windowed


# ---- one family's own --------------------------------------------------------------------------


def gemma_scales(scalar: bool) -> Part:
    """Embeddings times sqrt(hidden_size); `scalar`: attention by query_pre_attn_scalar. Reads
    before `shape`."""

    def read(config: dict) -> dict:
        fields = {"embedding_multiplier": config["hidden_size"] ** 0.5}
        if scalar:
            value, own = take(config, "query_pre_attn_scalar"), config.get("head_dim", 256)
            fields["attention.attention_multiplier"] = None if value == own else value**-0.5
        return fields

    def write(cfg: ModelConfig) -> dict:
        if not scalar:
            return {}
        multiplier = cfg.attention.attention_multiplier
        value = multiplier and round(multiplier**-2, 6)
        value = int(value) if value and value == int(value) else value  # readers want an integer
        return {"query_pre_attn_scalar": value or cfg.attention.head_dim}

    return Part(read, write)


def softcaps() -> Part:
    fields = alike("attn_logit_softcapping", "attention.") | alike("final_logit_softcapping")
    return same(fields, dict.fromkeys(fields))


def two_dropouts(rate: float) -> Part:
    """Phi-3 and GPT-2 drop residual branches and embeddings apart; we at one rate.

    `rate` is the family's for keys left out.
    """

    def read(config: dict) -> dict:
        rates = take(config, "resid_pdrop", rate), take(config, "embd_pdrop", rate)
        if rates[0] != rates[1]:
            raise UserError(f"config.json: resid_pdrop, embd_pdrop={rates} differ: not supported")
        return {"hidden_dropout": rates[0]}

    return Part(
        read, lambda cfg: {"resid_pdrop": cfg.hidden_dropout, "embd_pdrop": cfg.hidden_dropout}
    )


def residual_dropout(key: str) -> Part:
    """A rate for residual branches in training, which is not taken: ours drops embeddings, too."""

    def read(config: dict) -> dict:
        rate = config.pop(key, None)
        if rate:
            say_unused(f"{key}={rate} is not taken: model.hidden_dropout drops embeddings, too")
        return {}

    return Part(read, lambda cfg: {key: 0.0})


def experts(count: str, **defaults: Any) -> Part:
    """The router and experts; their number is written as `count` and read in either spelling.

    `defaults` of a family are for keys left out. Without a `moe_intermediate_size` every layer has
    experts, whose width stands as intermediate_size (Mixtral, OLMoE). Reads before `shape`.
    """
    names = {"num_experts_per_tok", "router_aux_loss_coef", *defaults} - {"num_experts"}
    keys = same(alike(" ".join(sorted(names)), "moe."), defaults)
    has_width = "moe_intermediate_size" in defaults

    def read(config: dict) -> dict:
        numbers = [config.pop(key, None) for key in ("num_experts", "num_local_experts")]
        fields = {"moe.num_experts": numbers[0] or numbers[1] or defaults["num_experts"]}
        fields |= keys.read(config) | BALANCE
        if not has_width:
            only(config, "sliding_window")
            fields |= {"moe.moe_intermediate_size": config["intermediate_size"]}
            fields |= {"layer_pattern": "full+experts"}
        return fields

    def write(cfg: ModelConfig) -> dict:
        width = {} if has_width else {"intermediate_size": cfg.moe.moe_intermediate_size}
        return {count: cfg.moe.num_experts} | keys.write(cfg) | width

    return Part(read, write)


def gpt2_shape() -> Part:
    """GPT-2's own names, besides `two_dropouts`."""
    keys = same(
        alike("vocab_size initializer_range tie_word_embeddings")
        | {
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "attention.num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "norm_eps",
            "n_inner": "intermediate_size",
            "attn_pdrop": "attention.attention_dropout",
        },
        {"tie_word_embeddings": True, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5}
        | {"attn_pdrop": 0.1},
    )

    def read(config: dict) -> dict:
        config["n_inner"] = take(config, "n_inner", 4 * config["n_embd"])
        return keys.read(config)

    return Part(read, keys.write)
