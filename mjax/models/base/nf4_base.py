"""A base of adapters in NF4 (`lora.base=nf4`, QLoRA, arXiv 2305.14314).

Matmul weights of layers that are not trained are stored in 4 bits (`kernels/matmul/nf4.py`). The
codes take the place of the parameter, with half its last input axis. Beside a parameter `q` is
`q_nf4`: {"absmax", "scales", "offset"}. To the rest of mjax these are frozen parameters like
others; only `joined_nf4` puts them together. Invariant: their numbers are the same on every mesh.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.errors import UserError
from mjax.kernels.matmul.nf4 import BLOCK, GROUP, Nf4, dequantize, quantize
from mjax.models.base.weight import Weight, is_weight
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.rules import RULES, is_partly_read
from mjax.sharding.spec import ParamSpec

NF4 = "_nf4"  # ends the name of the entry that holds the magnitudes of a parameter

Path = tuple[str, ...]


def is_of_nf4(path: Path) -> bool:
    """Whether a parameter holds magnitudes of another."""
    return len(path) > 1 and path[-2].endswith(NF4)


def codes_of(specs: dict) -> dict[Path, ParamSpec]:
    """The declarations of parameters that are stored as codes, by path."""
    flat = flatten_dict(specs)
    paths = {(*path[:-2], path[-2].removesuffix(NF4)) for path in flat if is_of_nf4(path)}
    return {path: flat[path] for path in sorted(paths)}


def nf4_specs(specs: dict) -> dict:
    """Declarations in which frozen matmul weights of layers are codes with magnitudes.

    Raises `UserError` where blocks of 64 do not divide the inputs of one.
    """
    flat = flatten_dict(specs)
    for path, spec in list(flat.items()):
        if spec.matmul is None or not spec.is_stacked or not spec.frozen:
            continue
        _require_blocks(path, spec, 1)
        last = spec.lead + spec.inputs - 1
        shape = *spec.shape[:last], spec.shape[last] // 2, *spec.shape[last + 1 :]
        flat[path] = replace(spec, shape=shape, held="uint8")
        for name, declared in _magnitudes_of(spec).items():
            flat[*path[:-1], path[-1] + NF4, name] = declared
    return unflatten_dict(flat)


def _magnitudes_of(spec: ParamSpec) -> dict[str, ParamSpec]:
    """The declarations of the magnitudes of a weight; `Nf4` has their shapes."""
    lead, first = spec.lead, spec.lead + spec.inputs
    blocks, outputs = _width(spec) // BLOCK, spec.shape[first:]
    count, pair = math.prod(outputs), ()
    if _is_paired(spec):
        count, pair = count // outputs[0], outputs[:1]
    groups = -(-count * blocks // GROUP)
    of_inputs = spec.axes[lead] if _is_cut(spec.axes[lead : lead + 1]) else None
    of_pair = ("pair",) * len(pair)
    leading, axes = spec.shape[:lead], spec.axes[:lead]
    plain = {"role": "matrix", "frozen": True, "fp8": False, "whole": spec.whole, "active": 0.0}
    return {
        "absmax": ParamSpec(
            shape=(*leading, blocks, *outputs),
            axes=(*axes, of_inputs, *spec.output_axes),
            held="uint8",
            **plain,
        ),
        "scales": ParamSpec(
            shape=(*leading, *pair, groups), axes=(*axes, *of_pair, None), held="float32", **plain
        ),
        "offset": ParamSpec(
            shape=(*leading, *pair), axes=(*axes, *of_pair), held="float32", **plain
        ),
    }


def require_whole_blocks(specs: dict, parallel: Parallel) -> None:
    """Raise `UserError` where tp would cut a block of a weight in NF4, or read a part of one."""
    for path, spec in codes_of(specs).items():
        if is_partly_read(spec, parallel):
            raise UserError(
                f"lora.base=nf4: mesh.tp={parallel.tp} does not divide the heads of "
                f"{'.'.join(path)}; choose a tp that does, or lora.base=compute"
            )
        if _splits_inputs(spec):
            _require_blocks(path, wide_spec(spec), parallel.tp)


def wide_spec(spec: ParamSpec) -> ParamSpec:
    """The declaration of a weight from that of its codes, still in their dtype."""
    last = spec.lead + spec.inputs - 1
    shape = *spec.shape[:last], 2 * spec.shape[last], *spec.shape[last + 1 :]
    return replace(spec, shape=shape)


def _require_blocks(path: Path, spec: ParamSpec, tp: int) -> None:
    width, last = _width(spec), spec.shape[spec.lead + spec.inputs - 1]
    if width % (BLOCK * tp) or last % 2:
        of_device = "" if tp == 1 else f" on each of mesh.tp={tp} devices"
        raise UserError(
            f"lora.base=nf4: {'.'.join(path)} has {width // tp} inputs{of_device}, which blocks of "
            f"{BLOCK} do not divide; choose another tp, or lora.base=compute"
        )


def _width(spec: ParamSpec) -> int:
    """The inputs of each matrix of a weight."""
    return math.prod(spec.shape[spec.lead :][: spec.inputs])


def _is_paired(spec: ParamSpec) -> bool:
    return spec.output_axes[:1] == ("pair",)


def _splits_inputs(spec: ParamSpec) -> bool:
    """Whether tp cuts the inputs of a weight."""
    return not spec.whole and _is_cut(spec.axes[spec.lead :][: spec.inputs])


def _is_cut(axes: tuple[str | None, ...]) -> bool:
    """Whether tp cuts an array along one of its axes."""
    return any("tp" in RULES[axis] for axis in axes if axis)


# ---- values --------------------------------------------------------------------------------------


def in_nf4(value: jax.Array, path: Path, spec: ParamSpec) -> dict[Path, jax.Array]:
    """A weight in a float dtype -> its codes and magnitudes by path; `spec` declares the codes."""
    w = quantize(value, spec.lead, spec.inputs, _is_paired(spec))
    beside = *path[:-1], path[-1] + NF4
    return {
        path: w.codes,
        (*beside, "absmax"): w.absmax,
        (*beside, "scales"): w.scales,
        (*beside, "offset"): w.offset,
    }


def round_base(params: dict, specs: dict, dtype: str) -> dict:
    """Parameters whose base is rounded to `dtype` and then to codes where `specs` declare them."""
    flat = flatten_dict(params)
    for path, spec in codes_of(specs).items():
        flat |= in_nf4(flat[path].astype(dtype), path, spec)
    return unflatten_dict(flat)


def value_of_base(params: dict[Path, jax.Array], path: Path, spec: ParamSpec) -> jax.Array:
    """The value of a canonical parameter that adapters are beside, from codes in fp32."""
    beside = *path[:-1], path[-1] + NF4
    if (*beside, "absmax") not in params:
        return params[path]
    parts = {name: params[*beside, name] for name in ("absmax", "scales", "offset")}
    return dequantize(_nf4(params[path], parts, spec, LOCAL), jnp.dtype(jnp.float32))


def joined_nf4(
    base: Weight | jax.Array | list, beside: dict, spec: ParamSpec, parallel: Parallel
) -> Weight | list[Weight]:
    """A weight from its codes and magnitudes, or a list of those of layers."""
    if isinstance(base, list):
        layers = []
        for i, layer in enumerate(base):
            own = {name: rows[i] for name, rows in beside.items()}
            layers.append(joined_nf4(layer, own, spec, parallel))
        return layers
    if not is_weight(base):
        base = Weight(base, name=spec.matmul, inputs=spec.inputs)
    return replace(base, value=_nf4(base.value, beside, spec, parallel))


def _nf4(codes: jax.Array, beside: dict, spec: ParamSpec, parallel: Parallel) -> Nf4:
    is_split = not spec.whole and _is_cut(spec.axes)
    return Nf4(
        codes,
        **beside,
        inputs=spec.inputs,
        paired=_is_paired(spec),
        split=parallel if is_split else LOCAL,
        splits_inputs=_splits_inputs(spec),
    )
