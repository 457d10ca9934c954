"""Writes a folder of rounded weights, tensor by tensor, as compressed-tensors and vLLM read it.

Matrices of attention, MLPs, experts and other mixers are rounded. Embedding, head, routers and what
a pattern names stay in bfloat16; config.json lists them by name. Invariant: the matrices that
servers fuse into one (q, k and v; gate and up) are rounded all or none, and share the number that
such a server keeps only once.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.companion_files import UNREAD
from mjax.checkpoint.base.safetensors import pack, said_in, unpack
from mjax.checkpoint.base.source import Source, flat
from mjax.config.languages.layer_pattern import stack_index, stack_of
from mjax.errors import UserError
from mjax.interop.huggingface.entries import CodedTensors, bytes_of_entry
from mjax.interop.huggingface.exported_files import side_files
from mjax.interop.huggingface.families.engine import family_of, slots
from mjax.interop.huggingface.families.family import Slot, inputs_first
from mjax.interop.huggingface.files import export, tensor_shapes
from mjax.interop.huggingface.float8 import SCALE
from mjax.interop.huggingface.model_card import with_card
from mjax.interop.huggingface.names import in_form
from mjax.interop.quantized.activation_aware import InputMoments
from mjax.interop.quantized.scale_choice import Matrix, limit_of_fused, round_matrix
from mjax.interop.quantized.schemes import Scheme
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec

# Projections that servers make one matrix of, by the last word of their modules.
_FUSED_BY_SERVERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True)
class Options:
    """Choices of `write_quantized`.

    ignore: patterns of modules that stay as they are. choice: one of `WAYS_TO_SCALE`.
    moments: of the inputs of matmuls on a text.
    """

    ignore: tuple[str, ...] = ()
    choice: str = "max"
    moments: InputMoments = field(default_factory=dict)
    max_shard_bytes: int = 5 * 10**9
    license: str | None = None


@dataclass(frozen=True)
class RoundingPlan:
    """The matrices of a model that are rounded.

    shapes: of the tensors that are. places: their first slots and declarations.
    kept: the modules of other matrices.
    """

    shapes: dict[str, tuple[int, int]]
    places: dict[str, tuple[tuple[str, ...], Slot, ParamSpec]]
    kept: list[str]


def write_quantized(
    source: Source, ckpt: str | Path, folder: Path, scheme: Scheme, options: Options
) -> str:
    """Write the weights of a source to a folder; what it has in words. `ckpt` is where it is from.

    Raises `UserError` with nothing written.
    """
    cfg, specs = source.cfg, definition_of(source.cfg).specs
    extras = side_files(cfg, ckpt, "bfloat16", source.unread())
    extras = with_card(extras, cfg, ckpt, options.license)
    aside = extras.get(UNREAD, pack({}))
    plan = plan_of(source, scheme, options.ignore, aside)
    matrices = [name for name, tensor in unpack(aside).items() if tensor.ndim == 2]
    kept = ["lm_head", *plan.kept, *(name.removesuffix(".weight") for name in matrices)]
    config = json.loads(extras["config.json"])
    config["quantization_config"] = scheme.config(list(dict.fromkeys(kept)))
    extras["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    coded = partial(_coded_tensors, source, plan, scheme, options)
    places, size = slots(cfg, specs), options.max_shard_bytes
    export(source.read, cfg, specs, places, folder, "bfloat16", size, extras, coded)
    entries = [scheme.entries(shape).values() for shape in plan.shapes.values()]
    stored = sum(map(bytes_of_entry, chain(*entries)))
    bits = 8 * stored / sum(map(math.prod, plan.shapes.values()))
    return f"{len(plan.shapes)} matrices of {bits:.2f} bits a weight"


def plan_of(
    source: Source, scheme: Scheme, ignore: Iterable[str], aside: bytes | None = None
) -> RoundingPlan:
    """The matrices that a scheme rounds. Raises `UserError` for others, and useless patterns.

    `aside`: the file of tensors that the model does not read.
    """
    cfg, specs = source.cfg, definition_of(source.cfg).specs
    if family_of(cfg).layouts.get("matrix") is inputs_first:
        raise UserError("no scheme has GPT-2's transposed Conv1D matrices; export it as bfloat16")
    if cfg.architecture.has_streams:
        raise UserError("a model of several streams (towers) is not built; import its text alone")
    of, used = flat(specs), set()
    places = in_form(slots(cfg, specs), said_in(aside or pack({})))
    shapes = tensor_shapes(cfg, specs, places)
    plan = RoundingPlan({}, {}, [])
    for path, found in places.items():
        for slot in found:
            name, spec = slot.tensor, of[path]
            module = name.removesuffix(".weight")
            if len(shapes[name]) < 2 or spec.role in ("embedding", "head") or name in plan.shapes:
                continue
            hits = {pattern for pattern in ignore if fnmatchcase(module, pattern)}
            used |= hits
            if hits or spec.role != "matrix" or (len(shapes[name]) != 2 and not slot.lead):
                plan.kept.append(module)
                continue
            if slot.lead:
                raise UserError(
                    f"{name} stacks experts in one tensor, which compressed-tensors does not "
                    "cover; export the model as bfloat16"
                )
            plan.shapes[name] = shapes[name]
            plan.places[name] = path, slot, spec
    unused = [pattern for pattern in ignore if pattern not in used]
    if unused:
        near = next(iter(plan.shapes), "model.layers.0.mlp.up_proj").removesuffix(".weight")
        raise UserError(f"--ignore {unused[0]!r} names no module; names are like {near}")
    if not plan.shapes:
        raise UserError("nothing is left to round: --ignore names every matrix")
    for name in plan.shapes:
        _require_whole_blocks(name, plan, scheme)
    return plan


def _require_whole_blocks(name: str, plan: RoundingPlan, scheme: Scheme) -> None:
    """Raise `UserError` for a matrix that blocks do not fill, or one fused with others left out."""
    shape, sides = plan.shapes[name], scheme.sides(plan.shapes[name])
    if any(n % side for n, side in zip(shape, sides, strict=True)):
        words = (other.split(".")[-2] for other in _names_of_fused(name))
        options = " ".join(f"--ignore '*.{word}'" for word in words)
        raise UserError(
            f"{name} {shape} is no multiple of blocks of {sides}; leave it out with {options}, or "
            "take another scheme"
        )
    modules = {other.removesuffix(".weight") for other in _names_of_fused(name)}
    left_out = modules.intersection(plan.kept)
    if left_out:
        raise UserError(
            f"--ignore names {min(left_out)} and not {name.removesuffix('.weight')}, which servers "
            "fuse into one matrix; name both or none"
        )


def _names_of_fused(name: str) -> list[str]:
    start, word, end = re.fullmatch(r"(.*?)([^.]*)(\.weight)", name).groups()
    words = next((words for words in _FUSED_BY_SERVERS if word in words), (word,))
    return [f"{start}{other}{end}" for other in words]


def _coded_tensors(
    source: Source,
    plan: RoundingPlan,
    scheme: Scheme,
    options: Options,
    tensor: Callable[[str, np.dtype], np.ndarray],
) -> CodedTensors:
    """The stored tensors of each matrix and what makes them."""
    kinds, limits = source.cfg.layer_kinds, {}
    rows = zip(map(stack_of, kinds), stack_index(kinds), strict=True)
    layers = {row: number for number, row in enumerate(rows)}

    def matrix(name: str) -> Matrix:
        path, slot, spec = plan.places[name]
        layer = layers.get((path[0], *slot.batch[:1]))
        return Matrix(name, tensor(name, SCALE), options.moments.get((layer, spec.matmul)))

    def parts(name: str) -> dict[str, np.ndarray]:
        if scheme.shares and name not in limits:
            fused = [other for other in _names_of_fused(name) if other in plan.shapes]
            limit = limit_of_fused([matrix(other) for other in fused], scheme, options.choice)
            limits.update(dict.fromkeys(fused, limit))
        rounded = round_matrix(matrix(name), scheme, options.choice, limits.get(name, 0.0))
        return named(name, rounded.parts)

    def named(name: str, of_matrix: Mapping[str, object]) -> dict:
        prefix = name.removesuffix("weight")
        return {prefix + part: value for part, value in of_matrix.items()}

    entries = {name: named(name, scheme.entries(shape)) for name, shape in plan.shapes.items()}
    return CodedTensors(entries, parts)
