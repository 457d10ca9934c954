"""The declaration of a parameter: everything the rest of mjax needs to know about it.

A module declares each weight once, with `declare`: global shape, logical axis names, initialiser,
role. Sharding (`sharding/rules.py`) reads the axes, the optimiser reads the role and the matrix
view, checkpoints and Hugging Face conversion read the name. Nothing is ever inferred from a
parameter's rank, because stacking layers changes ranks (DESIGN section 3).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

# Logical axes that enumerate independent matrices: layers of a scanned stack, the two halves of a
# fused projection (gate and up, key and value), experts.
BATCH_AXES = frozenset({"layers", "pair", "experts"})

ROLES = ("matrix", "embedding", "head", "norm", "bias", "scalar")


@dataclass(frozen=True)
class ParamSpec:
    """What a parameter is, globally. `inputs`: how many non-batch axes are contracted (fan-in)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: str
    inputs: int = 1

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes) and self.role in ROLES, self

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stacked(self, n: int) -> "ParamSpec":
        """The same parameter for `n` layers, stacked on a leading `layers` axis."""
        return replace(self, shape=(n, *self.shape), axes=("layers", *self.axes))

    def matrix_view(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Positions of (batch, input, output) axes: a matrix per batch entry."""
        batch = tuple(i for i, a in enumerate(self.axes) if a in BATCH_AXES)
        rest = tuple(i for i, a in enumerate(self.axes) if a not in BATCH_AXES)
        return batch, rest[: self.inputs], rest[self.inputs :]


Init = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def normal(std: float) -> Init:
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def constant(value: float) -> Init:
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def declare(rngs: nnx.Rngs, spec: ParamSpec, init: Init) -> nnx.Param:
    """An fp32 parameter that carries its declaration as metadata `spec`."""
    return nnx.Param(init(rngs.params(), spec.shape, jnp.float32), spec=spec)
