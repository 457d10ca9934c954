"""Activation-aware scales (AWQ, arXiv 2306.00978): inputs that are large keep more of their bits.

A channel of a norm's output is divided by s and the weights that read it are multiplied with s, so
that the model computes what it did. s is the root of the channel's mean square on a text, to a
power in [0, 1]. The power of each norm is the one of least error: the squares of what rounding
changes, each input weighted by its mean square. Invariant: only a norm whose output nothing but its
own branch reads is folded; everything that reads it is multiplied, routers too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from mjax.checkpoint.base.source import Index, Path, Source, flat
from mjax.config.languages.layer_pattern import BRANCHES, branch_groups, stack_index, stack_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec

POWERS = np.arange(0, 11) / 10
# The mean squares of inputs [in], by layer and matmul.
InputMoments = Mapping[tuple[int, str], np.ndarray]
NormName = tuple[str, str]  # stack and branch
# s [D], by stack, branch and row of the stack.
ChannelFactors = Mapping[tuple[str, str, int], np.ndarray]


def stream_readers(cfg: ModelConfig) -> dict[NormName, list[Path]]:
    """The weights that read the residual stream by way of a norm, by stack and branch."""
    found: dict[NormName, list[Path]] = {}
    for path, spec in flat(definition_of(cfg).specs).items():
        if _axis_of_stream(spec) is not None:
            found.setdefault((path[0], path[1]), []).append(path)
    return found


def require_norms(cfg: ModelConfig) -> None:
    """Raise `UserError` where a branch has no norm before it whose gain it alone reads."""
    specs = flat(definition_of(cfg).specs)
    for kind in cfg.layer_kinds:
        for group in branch_groups(kind):
            branch = BRANCHES[group[0]].name
            norm = stack_of(kind), f"{branch}_norm", "gain"
            if len(group) > 1 or norm not in specs:
                raise UserError(
                    f"--activation-aware: layers of {cfg.model_type} have no norm before {branch} "
                    "whose gain it alone reads; leave the option out"
                )


def of_all_readers(
    cfg: ModelConfig, moments: InputMoments, factors: ChannelFactors | None = None
) -> InputMoments:
    """Mean squares with those of all matmuls that read the same, each divided by its factor."""
    specs, found = flat(definition_of(cfg).specs), dict(moments)
    for number, norm, row, paths in _norms_of_layers(cfg):
        keys = [(number, specs[path].matmul) for path in paths if specs[path].matmul]
        squares = next((moments[key] for key in keys if key in moments), None)
        if squares is not None:
            factor = (factors or {}).get((*norm, row), np.float32(1))
            squares = squares / np.square(factor)
            found |= dict.fromkeys(keys, squares)
    return found


def _norms_of_layers(cfg: ModelConfig) -> Iterator[tuple[int, NormName, int, list[Path]]]:
    """Yield (number of the layer, norm, row of its stack, what reads it)."""
    readers = stream_readers(cfg)
    rows = zip(cfg.layer_kinds, stack_index(cfg.layer_kinds), strict=True)
    for number, (kind, row) in enumerate(rows):
        for norm, paths in readers.items():
            if norm[0] == stack_of(kind):
                yield number, norm, row, paths


def folded(source: Source, factors: ChannelFactors) -> Source:
    """The same function with factors moved from norms to the weights that read them."""
    specs = flat(definition_of(source.cfg).specs)
    norm_of: dict[Path, NormName] = {}
    for (stack, branch), paths in stream_readers(source.cfg).items():
        of_norm = [(stack, f"{branch}_norm", leaf) for leaf in ("gain", "bias")]
        norm_of |= dict.fromkeys([*paths, *of_norm], (stack, branch))

    def read(path: Path, index: Index) -> np.ndarray:
        values = source.read(path, index)
        if path not in norm_of:
            return values
        axis = _axis_of_stream(specs[path])
        values = values.astype(np.float32)
        for at, row in enumerate(range(index[0].start, index[0].stop)):
            factor = factors.get((*norm_of[path], row))
            if factor is None:
                continue
            if axis is None:
                stored_less = path[-1] == "gain" and source.cfg.norm_zero_centered
                values[at] = (values[at] + stored_less) / factor[index[1]] - stored_less
            else:
                sides = [1] * (values.ndim - 1)
                sides[axis - 1] = -1
                values[at] *= factor[index[axis]].reshape(sides)
        return values

    return replace(source, read=read)


def choose_factors(
    source: Source, moments: InputMoments, rounded: Callable[[np.ndarray], np.ndarray]
) -> dict[tuple[str, str, int], np.ndarray]:
    """The factors of all norms whose outputs' mean squares are known.

    `rounded`: a matrix fp32 [out, in] -> its rounded numbers. Raises as `require_norms`.
    """
    require_norms(source.cfg)
    specs, found = flat(definition_of(source.cfg).specs), {}
    for number, norm, row, paths in _norms_of_layers(source.cfg):
        known = (moments.get((number, specs[path].matmul)) for path in paths)
        squares = next((each for each in known if each is not None), None)
        if squares is None:
            continue
        size = np.sqrt(np.maximum(squares, np.finfo(np.float32).tiny))
        size = size / np.exp(np.log(size).mean())
        tried = np.clip(size ** POWERS[:, None], 1e-4, 1e4).astype(np.float32)
        errors = np.zeros(len(POWERS))
        for path in paths:
            if specs[path].role == "matrix":
                for w in _matrices(source, path, specs[path], row):
                    changes = (rounded(w * s) / s - w for s in tried)
                    errors += [float((np.square(c) * squares).sum()) for c in changes]
        found[(*norm, row)] = tried[errors.argmin()]
    return found


def _matrices(source: Source, path: Path, spec: ParamSpec, row: int) -> Iterator[np.ndarray]:
    """Yield the matrices [out, in] of a layer's parameter, those of experts one at a time."""
    axis = _axis_of_stream(spec)
    index = [slice(0, n) for n in spec.shape]
    index[0] = slice(row, row + 1)
    for expert in range(spec.shape[1] if spec.is_of_experts else 1):
        if spec.is_of_experts:
            index[1] = slice(expert, expert + 1)
        block = source.read(path, tuple(index)).astype(np.float32)
        block = np.moveaxis(block, axis, -1)
        yield block.reshape(-1, block.shape[-1])


def _axis_of_stream(spec: ParamSpec) -> int | None:
    """The axis of the entries of the residual stream that a weight reads, or None."""
    if spec.role not in ("matrix", "router") or spec.axes[0] != "layers":
        return None
    reads = spec.axes[spec.lead : spec.lead + spec.inputs]
    return spec.lead if reads == ("embed",) else None
