"""The declaration of a parameter: all that the rest of mjax needs to know about it.

A module declares each weight once: global shape, logical axis names, role, and whether a matmul
reads it. Sharding (`sharding/rules.py`) reads the axes. The optimizer reads the role and the matrix
view. Recomputation, FP8 and running sums of gradients read the name of the matmul. Checkpoints and
Hugging Face conversion read the Hugging Face name. Nothing is ever inferred from a parameter's
rank, because stacking layers changes ranks (DESIGN section 3).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.languages.remat import matmul_names
from mjax.config.schema.model import ROLES
from mjax.config.schema.run import PrecisionConfig
from mjax.errors import UserError

# Logical axes that enumerate independent matrices: layers of a stack, the two halves of a fused
# projection (gate and up, key and value), experts.
ENUMERATING_AXES = frozenset({"layers", "pair", "experts"})


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of a global parameter.

    `inputs` is the number of input axes (fan-in) among those that do not enumerate matrices.

    `parts` are the sizes along the last axis of projections that lie side by side there, if there
    are several. Each is a matrix of its own.

    `matmul` is the name of the matmul of a block that reads the parameter
    (`models/base/tensor_parallel.py`), or None. Its output and the scales of its 8-bit recipe go by
    that name.

    `active` is the share of the parameter that a token is multiplied with, for counting FLOPs.

    `hf` holds its Hugging Face names in Llama's words, one for each entry of a `pair` axis. They
    are names within the layer if the parameter is a layer's. `{expert}` stands for the number of an
    expert where Hugging Face stores experts separately. `interop/huggingface/families/table.py`
    turns them into the names of a family.

    A `frozen` parameter is not trained. `held` is the dtype in which a base of adapters is stored
    and read: there is no master of it. `scale` multiplies the product with an adapter's second
    matrix, and `dropout` is that of what its first one reads. A `precise` one is read in fp32,
    whatever others are. One without `fp8` is not rounded to 8 bits; `recipe` is the name of what
    rounds it, or None for that of the run. A `whole` one is not split over tp, whatever its axes.

    No gradient moves a parameter that `counts`. Its cotangent counts the tokens of each of its
    entries, and the step moves it by that (`models/runtime/buffers.py`). It lies whole on each
    device, in fp32.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: str
    inputs: int = 1
    parts: tuple[int, ...] = ()
    matmul: str | None = None
    active: float = 1.0
    hf: tuple[str, ...] = ()
    frozen: bool = False
    held: str | None = None
    scale: float = 1.0
    dropout: float = 0.0
    counts: bool = False
    fp8: bool = True
    recipe: str | None = None
    precise: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes) and self.role in ROLES, self
        assert not self.parts or sum(self.parts) == self.shape[-1], self
        assert self.matmul is None or self.matmul in matmul_names(), self

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer moves it."""
        return not (self.frozen or self.counts)

    def dtype(self, others: jnp.dtype | str) -> jnp.dtype:
        """The dtype to hold it in where `others` have that dtype."""
        if self.held is not None:
            return jnp.dtype(self.held)
        in_fp32 = self.counts or self.precise
        return jnp.dtype(jnp.float32 if in_fp32 else others)

    @property
    def held_bytes(self) -> int:
        """The bytes of an element of a base of adapters; 0 of other parameters."""
        return jnp.dtype(self.held).itemsize if self.held else 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def takes_fp8(self) -> bool:
        """Whether FP8 recipes round the parameter: weights of matmuls."""
        return self.fp8 and self.matmul is not None

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a matrix, or more, for each expert."""
        return "experts" in self.axes

    @property
    def is_stacked(self) -> bool:
        """Whether it is a parameter of all layers of a stack."""
        return self.axes[:1] == ("layers",)

    @property
    def lead(self) -> int:
        """How many axes enumerate matrices before their inputs: layers, experts."""
        return next(i for i, axis in enumerate(self.axes) if axis not in ENUMERATING_AXES)

    @property
    def output_axes(self) -> tuple[str | None, ...]:
        """The axes after the inputs, that of a pair among them."""
        return self.axes[self.lead + self.inputs :]

    def stacked(self, layers: int) -> "ParamSpec":
        """The same parameter of that many layers, stacked on a leading `layers` axis."""
        return replace(self, shape=(layers, *self.shape), axes=("layers", *self.axes))

    def matrix_view(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Positions of the (enumerating, input, output) axes: a matrix for each enumerated one."""
        batch = tuple(i for i, axis in enumerate(self.axes) if axis in ENUMERATING_AXES)
        rest = tuple(i for i in range(len(self.axes)) if i not in batch)
        return batch, rest[: self.inputs], rest[self.inputs :]


def is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


def count_parameters(specs: dict) -> int:
    """Parameters in a tree of `ParamSpec`, vocabulary padding included."""
    return sum(spec.size for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def rounded_specs(specs: dict, precision: PrecisionConfig) -> dict:
    """Declarations with the recipe of each weight: none of experts unless they are asked for."""

    def recipe_of_weight(path: Sequence[str], spec: ParamSpec) -> str:
        if spec.is_of_experts and not precision.fp8_experts:
            return "none"
        given = (name for pattern, name in precision.fp8_rules if is_named(pattern, path, spec))
        return next(given, precision.fp8)

    flat = flatten_dict(specs)
    for path, spec in flat.items():
        recipe = recipe_of_weight(path, spec)
        flat[path] = replace(spec, fp8=spec.fp8 and recipe != "none", recipe=recipe)
    return unflatten_dict(flat)


# ---- parts of a model ----------------------------------------------------------------------------


def is_named(pattern: str, path: Sequence[str], spec: ParamSpec) -> bool:
    """Whether a pattern names a parameter: its role, or its dotted name, * for anything."""
    return pattern == spec.role or fnmatchcase(".".join(path), pattern)


def require_named(key: str, patterns: Iterable[str], specs: dict) -> None:
    """Raise `UserError` where a pattern of the config key `key` names no parameter."""
    flat = flatten_dict(specs)
    for pattern in patterns:
        if not any(is_named(pattern, path, spec) for path, spec in flat.items()):
            raise UserError(
                f"{key}: {pattern!r} is no role of a parameter here and matches no name; "
                f"roles are {', '.join(ROLES)}, names are like {'.'.join(max(flat, key=len))} "
                "(--dry-run lists them)"
            )


def freeze(specs: dict, patterns: Sequence[str]) -> dict:
    """Declarations in which the parameters that a pattern names are frozen.

    A pattern is a role, or a dotted name in which * stands for anything. Raises `UserError` where
    one names nothing, or where nothing is left to train.
    """
    require_named("train.freeze", patterns, specs)
    flat = flatten_dict(specs)
    for path, spec in flat.items():
        is_frozen = any(is_named(pattern, path, spec) for pattern in patterns)
        flat[path] = replace(spec, frozen=spec.frozen or is_frozen)
    if not any(spec.is_trained for spec in flat.values()):
        raise UserError("train.freeze: it names every parameter; leave some to train")
    return unflatten_dict(flat)


def trained_only(tree: dict, specs: dict) -> dict:
    """The entries of `tree`, a tree like `specs`, whose parameters are trained."""
    flat_specs, entries = flatten_dict(specs), flatten_dict(tree).items()
    return unflatten_dict({path: e for path, e in entries if flat_specs[path].is_trained})


def frozen_only(tree: dict, specs: dict) -> dict:
    """The entries of `tree`, a tree like `specs`, whose parameters are frozen."""
    flat_specs, entries = flatten_dict(specs), flatten_dict(tree).items()
    return unflatten_dict({path: e for path, e in entries if flat_specs[path].frozen})


def count_frozen(specs: dict) -> int:
    """Frozen parameters in a tree of `ParamSpec`."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(spec.size for spec in leaves if spec.frozen)
