"""The losses of a student's layers: their outputs beside those of layers of the teacher.

The student's output is mapped by a matrix of the objective where the teacher has another width. A
token's loss is a mean over entries and over the pairs of layers, so equal models have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.preference import DistillConfig
from mjax.errors import UserError
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec

_LEAST_NORM = 1e-6  # of a vector whose direction counts


@dataclass(frozen=True)
class LayerPairs:
    """The layers that are compared, and how.

    student, teacher: the numbers of the layers, pair by pair.
    weights: of each kind of loss.
    specs: declarations of the matrices [D, teacher's D], one a pair; {} where widths are equal.
    """

    student: tuple[int, ...] = ()
    teacher: tuple[int, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    specs: Mapping[str, ParamSpec] = ()

    def losses(
        self,
        outputs: jax.Array,
        matrices: Mapping[str, jax.Array],
        of_teacher: jax.Array,
        mask: jax.Array,
        parallel: Parallel,
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """The weighted sum over tokens of mask * loss, fp32 [], equal on all tp devices.

        outputs [N, B, S/tp, D] are the student's; of_teacher [B, S, N, D'] and mask fp32 [B, S] are
        whole along tp. Pairs that are not `counted` [N] are left out.
        """
        of_teacher, mask = parallel.shard_seq(of_teacher), parallel.shard_seq(mask)
        total = jnp.zeros(mask.shape, jnp.float32)
        for number, layer in enumerate(self.student):
            x = outputs[number]
            if self.specs:
                x = jnp.einsum("bsd,de->bse", x, matrices[_matrix_name(layer)])
            y = of_teacher[:, :, number]
            for kind, weight in self.weights:
                found = HIDDEN_LOSSES[kind](x.astype(jnp.float32), y.astype(jnp.float32))
                part = weight / len(self.student) * found
                total += part if counted is None else jnp.where(counted[number], part, 0)
        return parallel.psum(jnp.sum(jnp.where(mask == 0, 0, total * mask)), "tp")


def layer_pairs(settings: DistillConfig, student: ModelConfig, teacher: ModelConfig) -> LayerPairs:
    """The pairs of a run. Raises `UserError` for a layer that the teacher lacks."""
    pairs = sorted(settings.hidden_layers.items())
    if not pairs:
        return LayerPairs(specs={})
    of_student, of_teacher = zip(*pairs, strict=True)
    last = teacher.num_hidden_layers - 1
    if max(of_teacher) > last:
        raise UserError(
            f"distill.hidden_layers names layer {max(of_teacher)} of the teacher, whose last is "
            f"{last}; give {{layer of the student: layer of the teacher}}"
        )
    widths, specs = (student.hidden_size, teacher.hidden_size), {}
    if widths[0] != widths[1]:
        spec = ParamSpec(widths, ("embed", "teacher_width"), "matrix")
        specs = {_matrix_name(layer): spec for layer in of_student}
    weights = tuple(settings.hidden_losses.items())
    return LayerPairs(of_student, of_teacher, weights, specs)


def _matrix_name(layer: int) -> str:
    return f"layer_{layer}"


def cosine_loss(x: jax.Array, y: jax.Array) -> jax.Array:
    """1 - the cosine of vectors [..., D]."""
    product = jnp.sum(x * y, -1)
    squares = jnp.sum(x * x, -1) * jnp.sum(y * y, -1)
    return 1 - product * jax.lax.rsqrt(jnp.maximum(squares, _LEAST_NORM**2))


def mean_square(x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean square difference of vectors [..., D]."""
    return jnp.mean(jnp.square(x - y), -1)


HIDDEN_LOSSES = {"cosine": cosine_loss, "mse": mean_square}
