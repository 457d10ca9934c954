"""Frozen parameters in NF4: their declarations, and their arrays (`lora.base=nf4`).

The codes of a weight take the place of the parameter, with half its last input axis. Beside a
parameter `q` is `q_nf4`: {"absmax", "scales", "offset"}. To the rest of mjax these are frozen
parameters like others, which are sharded, gathered and digested by their declarations; only
`weight_in_nf4` puts them together. Invariant: their numbers are the same on every mesh.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.errors import UserError
from mjax.kernels.nf4.values import BLOCK, GROUP, Nf4, dequantize, quantize
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.rules import RULES, is_partly_read, tp_cuts
from mjax.sharding.spec import ParamSpec

MAGNITUDES_OF = "_nf4"  # ends the name of the entry that holds the magnitudes of a parameter

Path = tuple[str, ...]


def beside(path: Path) -> Path:
    """The entry of the magnitudes of a parameter."""
    return (*path[:-1], path[-1] + MAGNITUDES_OF)


def is_magnitude(path: Path) -> bool:
    """Whether a parameter holds magnitudes of another."""
    return len(path) > 1 and path[-2].endswith(MAGNITUDES_OF)


def codes_of(specs: dict) -> dict[Path, ParamSpec]:
    """The declarations of parameters that are codes, by path."""
    flat = flatten_dict(specs)
    found = {}
    for path in flat:
        if (*beside(path), "absmax") in flat:
            found[path] = flat[path]
    return found


# ---- declarations --------------------------------------------------------------------------------


def nf4_specs(specs: dict) -> dict:
    """Declarations in which frozen matmul weights of layers are codes with magnitudes.

    Raises `UserError` where blocks of 64 do not divide the inputs of one.
    """
    flat = flatten_dict(specs)
    for path, spec in list(flat.items()):
        if spec.matmul is None or not spec.is_stacked or not spec.frozen:
            continue
        _require_blocks(path, spec, 1)
        last = _last_input(spec)
        shape = *spec.shape[:last], spec.shape[last] // 2, *spec.shape[last + 1 :]
        flat[path] = replace(spec, shape=shape, held="uint8")
        for name, declared in _magnitudes_of(spec).items():
            flat[*beside(path), name] = declared
    return unflatten_dict(flat)


def wide_spec(spec: ParamSpec) -> ParamSpec:
    """The declaration of a weight from that of its codes, still in their dtype."""
    last = _last_input(spec)
    shape = *spec.shape[:last], 2 * spec.shape[last], *spec.shape[last + 1 :]
    return replace(spec, shape=shape)


def as_weights(specs: dict) -> dict:
    """Declarations with weights in the place of their codes, and without magnitudes."""
    kept = {path: spec for path, spec in flatten_dict(specs).items() if not is_magnitude(path)}
    for path, spec in codes_of(specs).items():
        kept[path] = wide_spec(spec)
    return unflatten_dict(kept)


def _magnitudes_of(spec: ParamSpec) -> dict[str, ParamSpec]:
    """The declarations of the magnitudes of a weight; `Nf4` has their shapes."""
    lead, shape, axes = spec.lead, spec.shape, spec.axes
    blocks, outputs = _width(spec) // BLOCK, shape[lead + spec.inputs :]
    pair = outputs[:1] if _is_paired(spec) else ()
    groups = -(-math.prod(outputs[len(pair) :]) * blocks // GROUP)
    of_blocks = axes[lead] if "tp" in RULES.get(axes[lead], ()) else None
    of_matrices = (*axes[:lead], *("pair",) * len(pair))

    def frozen(shape: tuple[int, ...], axes: tuple[str | None, ...], held: str) -> ParamSpec:
        kind = {"role": "matrix", "whole": spec.whole, "active": 0.0, "fp8": False}
        return ParamSpec(shape, axes, frozen=True, held=held, **kind)

    of_bits = (*axes[:lead], of_blocks, *spec.output_axes)
    return {
        "absmax": frozen((*shape[:lead], blocks, *outputs), of_bits, "uint8"),
        "scales": frozen((*shape[:lead], *pair, groups), (*of_matrices, None), "float32"),
        "offset": frozen((*shape[:lead], *pair), of_matrices, "float32"),
    }


def require_whole_blocks(specs: dict, parallel: Parallel) -> None:
    """Raise `UserError` where tp would cut a block of a weight in NF4, or read a part of one."""
    for path, spec in codes_of(specs).items():
        if is_partly_read(spec, parallel):
            raise UserError(
                f"lora.base=nf4: mesh.tp={parallel.tp} does not divide the heads of "
                f"{'.'.join(path)}; choose a tp that does, or lora.base=compute"
            )
        if _splits_inputs(spec, parallel):
            _require_blocks(path, wide_spec(spec), parallel.tp)


def _require_blocks(path: Path, spec: ParamSpec, tp: int) -> None:
    width, last = _width(spec), spec.shape[_last_input(spec)]
    if width % (BLOCK * tp) or last % 2:
        of_device = "" if tp == 1 else f" on each of mesh.tp={tp} devices"
        raise UserError(
            f"lora.base=nf4: {'.'.join(path)} has {width // tp} inputs{of_device}, which blocks of "
            f"{BLOCK} do not divide; choose another tp, or lora.base=compute"
        )


def _last_input(spec: ParamSpec) -> int:
    return spec.lead + spec.inputs - 1


def _width(spec: ParamSpec) -> int:
    """The inputs of each matrix of a weight."""
    return math.prod(spec.shape[spec.lead :][: spec.inputs])


def _is_paired(spec: ParamSpec) -> bool:
    return spec.output_axes[:1] == ("pair",)


def _splits_inputs(spec: ParamSpec, parallel: Parallel) -> bool:
    """Whether tp cuts the inputs of a weight."""
    return tp_cuts(spec, spec.axes[spec.lead :][: spec.inputs], parallel)


# ---- arrays --------------------------------------------------------------------------------------


def round_weight(value: jax.Array, path: Path, spec: ParamSpec) -> dict[Path, jax.Array]:
    """A weight in a float dtype -> its codes and magnitudes by path; `spec` declares the codes."""
    w = quantize(value, spec.lead, spec.inputs, _is_paired(spec))
    found = {path: w.codes}
    for name in ("absmax", "scales", "offset"):
        found[*beside(path), name] = getattr(w, name)
    return found


def round_base(params: dict, specs: dict, dtype: str) -> dict:
    """Canonical parameters, of which those that `specs` declare in NF4 are rounded.

    They are rounded to `dtype` first, as those that a run loads.
    """
    flat = flatten_dict(params)
    for path, spec in codes_of(specs).items():
        flat |= round_weight(flat[path].astype(dtype), path, spec)
    return unflatten_dict(flat)


def value_of_base(params: dict[Path, jax.Array], path: Path, spec: ParamSpec) -> jax.Array:
    """The value of a canonical parameter; in fp32 if it is in NF4."""
    if (*beside(path), "absmax") not in params:
        return params[path]
    parts = {name: params[*beside(path), name] for name in ("absmax", "scales", "offset")}
    w = weight_in_nf4(params[path], parts, spec, LOCAL)
    return dequantize(w, jnp.dtype(jnp.float32))


def weight_in_nf4(codes: jax.Array, magnitudes: dict, spec: ParamSpec, parallel: Parallel) -> Nf4:
    """A weight from the parts of it that a device holds, which lie as `spec` declares the codes."""
    is_split = tp_cuts(spec, spec.axes, parallel)
    return Nf4(
        codes,
        **magnitudes,
        inputs=spec.inputs,
        paired=_is_paired(spec),
        split=parallel if is_split else LOCAL,
        splits_inputs=_splits_inputs(spec, parallel),
    )
