"""Which parameters of a model get adapters (`lora` of the config), and how weights meet them.

The adapter of a parameter `q` is an entry `q_lora` beside it, {"a", "b"} and with DoRA "magnitude"
(`models/base/adapter.py`). Several adapters of it have an axis of slots, and "scales". To the rest
of mjax these are parameters like others: they are sharded, gathered, trained and saved by their
declarations. Only here do they join the weight. All other parameters are frozen, and stored in the
dtype of the computation: there are no masters of them.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema.lora import LoraConfig
from mjax.errors import UserError
from mjax.kernels.matmul.adapter_slots import TokenSlots
from mjax.kernels.nf4.parameters import MAGNITUDES_OF, nf4_specs, weight_in_nf4
from mjax.models.base.adapter import Adapter, InputDropout, TokenPlaces, adapted_value
from mjax.models.base.weight import Weight, WeightOrArray, is_weight
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.rules import tp_cuts
from mjax.sharding.spec import ParamSpec, is_named, is_spec, require_named

OF_PEFT = " (PEFT's q_proj is q; k_proj, v_proj are kv; gate_proj, up_proj up; o_proj attn_proj)"
ADAPTER = "_lora"  # ends the name of the entry that holds the adapter of a parameter

Path = tuple[str, ...]


def is_of_adapter(path: Path) -> bool:
    """Whether a parameter is a part of an adapter."""
    return len(path) > 1 and path[-2].endswith(ADAPTER)


def base_of(path: Path) -> Path:
    """The parameter that the adapter at `path` belongs to."""
    return (*path[:-2], path[-2].removesuffix(ADAPTER))


def part_path(path: Path, name: str) -> Path:
    """The path of an array of the adapter of the weight at `path`."""
    return (*path[:-1], path[-1] + ADAPTER, name)


def part_shapes(spec: ParamSpec, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of an adapter of that rank, by name."""
    lead, inputs = spec.lead, spec.lead + spec.inputs
    halves = (2,) if "pair" in spec.output_axes else ()
    leading, outputs = spec.shape[:lead], spec.shape[inputs:]
    return {
        "a": (*spec.shape[:inputs], *halves, rank),
        "b": (*leading, rank, *outputs),
        "magnitude": (*leading, 1, *outputs),
    }


def adapter_scale(alpha: float, rank: int, rslora: bool) -> float:
    """The factor of an adapter's product."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def specs_of_run(specs: dict, lora: LoraConfig, dtype: str) -> dict:
    """Declarations of a model as a run stores it: with adapters, and perhaps a base in NF4."""
    adapted = adapted_specs(specs, lora, dtype)
    return nf4_specs(adapted) if lora.rank and lora.base == "nf4" else adapted


def adapted_specs(specs: dict, lora: LoraConfig, dtype: str) -> dict:
    """Declarations with those of adapters; what is not trained is `held` in `dtype`.

    Raises `UserError` where a pattern names nothing, or something that takes no adapter.
    """
    if not lora.rank:
        return specs
    flat, adapted = flatten_dict(specs), {}
    _require_patterns(lora, specs)
    for path, spec in flat.items():
        adapted[path] = spec
        if any(is_named(pattern, path, spec) for pattern in lora.trained):
            continue
        held = "float32" if spec.precise or spec.counts else dtype
        adapted[path] = replace(spec, frozen=True, held=held)
        if _is_target(lora.targets, path, spec):
            for name, declared in _declared(path, spec, lora).items():
                adapted[part_path(path, name)] = declared
    is_whole = not any(spec.frozen for spec in adapted.values())
    if is_whole or (lora.targets and not any(map(is_of_adapter, adapted))):
        raise UserError(
            f"lora.trained={lora.trained} leaves no weight to adapters; name less there, or set "
            "lora.rank=0 to train all weights"
        )
    return unflatten_dict(adapted)


def adapter_sides(a: ParamSpec, b: ParamSpec) -> tuple[int, int]:
    """The (inputs, outputs) of each matrix that an adapter of these arrays belongs to."""
    inputs, outputs = a.matrix_view()[1], b.matrix_view()[2]
    return math.prod(a.shape[i] for i in inputs), math.prod(b.shape[i] for i in outputs)


def _is_target(patterns: Sequence[str], path: Path, spec: ParamSpec) -> bool:
    return any(_takes_adapter(pattern, path, spec) for pattern in patterns)


def _takes_adapter(pattern: str, path: Path, spec: ParamSpec) -> bool:
    """Whether a pattern names a matrix that takes an adapter; of tables only a role does."""
    if spec.matmul is None:
        return pattern == spec.role and spec.role in ("embedding", "head")
    return pattern == spec.matmul or is_named(pattern, path, spec)


def _require_patterns(lora: LoraConfig, specs: dict) -> None:
    """Raise `UserError` where a pattern of a key names no parameter that takes an adapter."""
    if not lora.targets and not lora.trained:
        raise UserError("lora.targets=[] leaves nothing to train; name matmuls, or lora.trained")
    require_named("lora.trained", lora.trained, specs)
    flat = flatten_dict(specs)
    is_tied = not any(spec.role == "head" for spec in flat.values())
    if is_tied and {"embedding", "head"} & set(lora.targets):
        raise UserError(
            "lora.targets: embedding and head share a table (model.tie_word_embeddings), which "
            "takes no adapter; leave both out, or name embedding in lora.trained"
        )
    for key in ("targets", "rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            if not any(_takes_adapter(pattern, path, spec) for path, spec in flat.items()):
                matmuls = sorted({spec.matmul for spec in flat.values() if spec.matmul})
                hint = OF_PEFT if pattern.endswith("_proj") else ""
                raise UserError(
                    f"lora.{key}: {pattern!r} names no matrix here that takes an adapter{hint}; "
                    f"matmuls are {', '.join(matmuls)} (--dry-run lists their names), tables are "
                    "the roles embedding and head"
                )


def _first(patterns: dict, path: Path, spec: ParamSpec, default: float) -> float:
    """The value of the first pattern that names a parameter."""
    return next(
        (v for pattern, v in patterns.items() if _takes_adapter(pattern, path, spec)), default
    )


def _declared(path: Path, spec: ParamSpec, lora: LoraConfig) -> dict[str, ParamSpec]:
    """The declarations of the adapter of one parameter."""
    rank = int(_first(lora.rank_pattern, path, spec, lora.rank))
    alpha = _first(lora.alpha_pattern, path, spec, lora.alpha)
    lead, inputs = spec.axes[: spec.lead], spec.axes[: spec.lead + spec.inputs]
    halves = ("pair",) if "pair" in spec.output_axes else ()
    shapes = part_shapes(spec, rank)
    active = spec.active if spec.matmul else 0.0
    plain = {"role": "matrix", "precise": spec.precise, "fp8": False, "active": active}
    declared = {
        "a": ParamSpec(
            shape=shapes["a"],
            axes=(*inputs, *halves, None),
            inputs=spec.inputs,
            **plain,
        ),
        "b": ParamSpec(
            shape=shapes["b"],
            axes=(*lead, None, *spec.output_axes),
            scale=adapter_scale(alpha, rank, lora.rslora),
            dropout=lora.dropout,
            **plain,
        ),
    }
    most = min(adapter_sides(declared["a"], declared["b"]))
    if lora.init == "pissa" and spec.matmul and rank > most:
        raise UserError(
            f"lora.init=pissa: {'.'.join(path)} has {most} singular values, fewer than a rank of "
            f"{rank}; lower lora.rank, or give it another in lora.rank_pattern"
        )
    if lora.dora:
        declared["magnitude"] = ParamSpec(
            shape=shapes["magnitude"],
            axes=(*lead, None, *spec.output_axes),
            **plain | {"role": "scalar"},
        )
    return declared


# ---- weights and their adapters in a step --------------------------------------------------------


def join_adapters(
    weights: dict,
    specs: dict,
    parallel: Parallel = LOCAL,
    places: TokenPlaces | None = None,
) -> tuple[dict, dict]:
    """(weights that hold their adapters, their declarations), without entries of adapters.

    `weights` are those of a module, `specs` declare them, perhaps as a stack of layers. `places`
    are those of its tokens, in training with dropout.
    """
    joined, declared = {}, {}
    for name, entry in weights.items():
        spec = specs[name]
        if name.endswith((ADAPTER, MAGNITUDES_OF)):
            continue
        if not is_spec(spec):
            joined[name], declared[name] = join_adapters(entry, spec, parallel, places)
            continue
        if name + MAGNITUDES_OF in weights:
            join = functools.partial(_in_nf4, spec=spec, parallel=parallel)
            entry = _each_layer(join, entry, weights[name + MAGNITUDES_OF])
        if name + ADAPTER in weights:
            facts = {"spec": spec, "of_adapter": specs[name + ADAPTER], "parallel": parallel}
            join = functools.partial(_with_adapter, **facts, places=places)
            entry = _each_layer(join, entry, weights[name + ADAPTER])
        joined[name], declared[name] = entry, spec
    return joined, declared


def _each_layer(join: Callable, base: WeightOrArray | list, beside: dict) -> Weight | list[Weight]:
    """`join(base, beside)`, or where layers are in lists that of each layer."""
    if not isinstance(base, list):
        return join(base, beside)
    layers = []
    for i, layer in enumerate(base):
        own = {name: rows[i] for name, rows in beside.items()}
        layers.append(join(layer, own))
    return layers


def _in_nf4(base: WeightOrArray, magnitudes: dict, spec: ParamSpec, parallel: Parallel) -> Weight:
    """A weight from its codes and their magnitudes."""
    if not is_weight(base):
        base = Weight(base, name=spec.matmul, inputs=spec.inputs)
    value = weight_in_nf4(base.value, magnitudes, spec, parallel)
    return replace(base, value=value)


def _with_adapter(
    base: WeightOrArray,
    beside: dict,
    spec: ParamSpec,
    of_adapter: dict,
    parallel: Parallel,
    places: TokenPlaces | None,
) -> WeightOrArray:
    """A weight with its adapter; of a table the sum."""
    inputs, outputs = spec.axes[spec.lead : spec.lead + spec.inputs], spec.output_axes
    is_split = tp_cuts(spec, inputs, parallel)
    dropout, rate = None, of_adapter["b"].dropout
    if places is not None and rate and spec.matmul:
        number = zlib.crc32("/".join(spec.hf).encode())  # the same on every mesh
        places = places._replace(key=jax.random.fold_in(places.key, number))
        dropout = InputDropout(places, rate, parallel, cuts_inputs=is_split)
    adapter = Adapter(
        beside["a"],
        beside["b"],
        beside.get("magnitude"),
        dropout,
        beside.get("scales"),
        scale=of_adapter["b"].scale,
        halves=1 + outputs.index("pair") if "pair" in outputs else None,
        split=parallel if is_split else LOCAL,
    )
    if spec.matmul is None:
        return adapted_value(base, adapter)
    if not is_weight(base):
        base = Weight(base, name=spec.matmul, inputs=spec.inputs)
    return replace(base, adapter=adapter)


def has_slots(specs: dict) -> bool:
    """Whether declarations are of a model with several adapters, of which tokens choose."""
    return any(is_of_adapter(path) and path[-1] == "scales" for path in flatten_dict(specs))


def with_slots(weights: dict, numbers: jax.Array, parallel: Parallel) -> dict:
    """Weights of a module whose adapters, where they are several, know the slots of its tokens."""
    slots = TokenSlots(numbers, parallel)

    def one(w: WeightOrArray) -> WeightOrArray:
        if not is_weight(w) or w.adapter is None:
            return w
        return replace(w, adapter=replace(w.adapter, slots=slots))

    return jax.tree.map(one, weights, is_leaf=is_weight)
