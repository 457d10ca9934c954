"""Recipes of FP8: all that matmuls, the state, the memory estimate and the plan ask of one.

A recipe is a frozen value. It rounds what the three products of a matmul read, multiplies what it
rounded, and says what it keeps from step to step. `recipe_of` is the only place that knows the
values of `precision.fp8`. To add a recipe, write a class with the methods of `PerTensor`, give it a
row of `RECIPES` and a value of the key. Invariant: nothing else asks which recipe a run has.

Recipes for activations and gradients follow Transformer Engine, one scale a tensor:

- current: the scale comes from the maximum of the tensor itself, shared over tp;
- delayed: the scale comes from the largest maximum of the last steps, kept as `history` [L, 2, H]
  of each matmul. The maxima that a step saw are the *gradient* of its scales (Flax's
  overwrite-with-gradient). They are joined by maximum where gradients add: `remember` joins them
  over the mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.config.schema.run import PrecisionConfig
from mjax.errors import UserError
from mjax.kernels.base.chooser import Choice, choose
from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8 import transformer_engine
from mjax.kernels.fp8.block_recipes import Block128, BlockScaled, MxFp8, NvFp4
from mjax.kernels.fp8.four_bits import GradientPlaces
from mjax.kernels.fp8.quantize import (
    SCALES,
    amax_of,
    current_scales,
    delayed_scales,
    dot8,
    quantize_stack,
    quantize_to,
    remember,
    scale_of,
    weight_amax,
)
from mjax.sharding.collectives import LOCAL, Parallel

# What a recipe may compute in one function of its own, instead of matmul by matmul.
Block = Literal["gated mlp", "gated experts"]


class Rounded8(NamedTuple):
    """An operand in 8 bits.

    values: [M, K]. used: fp32 [2], its scale and its largest magnitude.
    transposed: [K, M], where one pass gave both; then a backward keeps no other.
    """

    values: jax.Array | None
    used: jax.Array
    transposed: jax.Array | None = None


class Gradient8(NamedTuple):
    """A gradient in 8 bits, as both products of the backward read it.

    values: [M, N]. transposed: [N, M]. used: fp32 [2], its scale and its largest magnitude.
    """

    values: jax.Array
    transposed: jax.Array
    used: jax.Array


@dataclass(frozen=True)
class PerTensor:
    """One scale a tensor, inputs and weights in e4m3, gradients in e5m2.

    `scales` are fp32 [3] of a matmul: of x, of the weight and of the gradient of y. `backend` has
    the kernels: "xla" or "te".
    """

    backend: str = "xla"

    name: ClassVar[str]
    # Whether the scales of activations and gradients are known before the tensor is.
    knows_scales: ClassVar[bool]
    # Whether the state holds something for the recipe from step to step.
    remembers: ClassVar[bool] = False
    # The shape of `scales` of a matmul.
    scales_shape: ClassVar[tuple[int, ...]] = (3,)
    # Bytes of an entry of a weight as matmuls read it.
    weight_bytes: ClassVar[float] = 1.0
    # Whether weights are rounded to bytes where they are stored, and a tensor has one scale.
    stores_weights: ClassVar[bool] = True
    scales_tensors: ClassVar[bool] = True
    # Whether `round_gradient` asks for the places of the gradient's elements.
    needs_places: ClassVar[bool] = False

    # ---- what matmuls ask --------------------------------------------------------------------

    def round_input(
        self, x: jax.Array, scales: jax.Array, parallel: Parallel, amax: jax.Array | None = None
    ) -> Rounded8:
        """Rounds x [M, K] for the forward product and for the weight's gradient.

        `amax`: the largest magnitude of x over tp, if known.
        """
        parallel = parallel if amax is None else LOCAL
        if not self.knows_scales and self.gradient_kernel(x.dtype, x.shape).name == "triton":
            x8, used = self.round_by(gate.to_fp8_both, x, scales[0], E4M3, parallel, amax)
            return Rounded8(x8.plain, checkpoint_name(used, SCALES), x8.transposed)
        return self._rounded(x, scales[0], E4M3, parallel, amax)

    def kept_input(self, x8: Rounded8) -> Rounded8:
        """The part of a rounded input that the backward reads."""
        return x8 if x8.transposed is None else x8._replace(values=None)

    def round_weight(self, value: jax.Array, scales: jax.Array, contracted: int) -> jax.Array:
        """Rounds a weight, where no bits of it were stored, for a product over an axis of it."""
        return quantize_to(value, scales[1], E4M3)

    def store_weights(self, stack: jax.Array, scales: jax.Array) -> jax.Array:
        """Rounds weights of L layers [L, ...] where they are stored: bits uint8, to be gathered."""
        return quantize_stack(stack, scales)

    def stored_weight(self, bits: jax.Array) -> jax.Array:
        """The 8-bit numbers that stored bits are, in any shape."""
        return lax.bitcast_convert_type(bits, E4M3)

    def round_gradient(
        self,
        g: jax.Array,
        scales: jax.Array,
        parallel: Parallel,
        places: GradientPlaces | None = None,
    ) -> Gradient8:
        """Rounds the gradient g [M, N] of y for both products of the backward.

        `places` of its elements key rounding at random.
        """
        scale = scales[2]
        if self.gradient_kernel(g.dtype, g.shape).name == "triton":
            g8, used = self.round_by(gate.to_fp8_both, g, scale, E5M2, parallel)
            return Gradient8(g8.plain, g8.transposed, used)
        g = lax.optimization_barrier(g)  # or each reader computes it again, as a gate's two halves
        g8 = self._rounded(g, scale, E5M2, parallel)
        return Gradient8(g8.values, g8.values.T, g8.used)

    def product(
        self, x8: Rounded8, w8: jax.Array, contracted: int, scales: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """[M, N] in `dtype`: x8 [M, K] times a weight whose axis `contracted` is K."""
        operands = x8.used[0], scales[1]
        return dot8(x8.values, w8, (1, contracted), operands, dtype, backend=self.backend)

    def input_gradient(
        self, g8: Gradient8, w8: jax.Array, scales: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """[M, K] in `dtype`: the gradient times the transpose of a weight [K, N]."""
        operands = g8.used[0], scales[1]
        return dot8(g8.values, w8, (1, 1), operands, dtype, precise=True, backend=self.backend)

    def weight_gradient(
        self, x8: Rounded8, g8: Gradient8, dtype: jnp.dtype, total: jax.Array | None
    ) -> jax.Array:
        """[K, N] in `dtype`: the transpose of x8 times the gradient, added to a `total` if any."""
        operands, how = (x8.used[0], g8.used[0]), {"precise": True, "backend": self.backend}
        turned = x8.transposed is not None
        values, axis = (x8.transposed, 1) if turned else (x8.values, 0)
        made = dot8(values, g8.transposed, (axis, 1), operands, dtype, **how)
        return made if total is None else total + made

    def sum_dtype(self, sums: jnp.dtype, gradient: jnp.dtype) -> jnp.dtype:
        """The dtype of a weight's gradient that a running sum takes."""
        return gradient if self.backend == "te" else sums  # TE's matmul of fp32 is untried

    def round_by(
        self,
        rounding: Callable[..., gate.Rounded],
        x: jax.Array,
        scale: jax.Array,
        dtype: jnp.dtype,
        parallel: Parallel,
        amax: jax.Array | None = None,
    ) -> tuple[gate.Rounded, jax.Array]:
        """(x [M, K] by a `rounding` of `gate.py`, its scale and maximum fp32 [2]); any backend."""
        if not self.knows_scales:
            amax = amax_of(x) if amax is None else amax
            scale = self.scale_for(amax, scale, dtype, parallel)
        rounded = rounding(x, scale, dtype)
        return rounded, jnp.stack([scale, rounded.amax if self.knows_scales else amax])

    def _rounded(
        self,
        x: jax.Array,
        scale: jax.Array,
        dtype: jnp.dtype,
        parallel: Parallel,
        amax: jax.Array | None = None,
    ) -> Rounded8:
        """Rounds x; `scale` is what the recipe knows of it."""
        use_te = self.backend == "te"
        if use_te and self.knows_scales:  # in one pass
            x8, amax = transformer_engine.quantize_by_te(x, scale, dtype)
            return Rounded8(x8, checkpoint_name(jnp.stack([scale, amax]), SCALES))
        amax = amax_of(x) if amax is None else amax
        scale = self.scale_for(amax, scale, dtype, parallel)
        used = checkpoint_name(jnp.stack([scale, amax]), SCALES)
        if use_te:
            return Rounded8(transformer_engine.quantize_by_te(x, used[0], dtype)[0], used)
        return Rounded8(quantize_to(x, used[0], dtype), used)

    def scale_for(
        self, amax: jax.Array, known: jax.Array, dtype: jnp.dtype, parallel: Parallel
    ) -> jax.Array:
        """The scale of a tensor by its maximum, or by what is `known` of it."""
        raise NotImplementedError

    # ---- what the state asks -----------------------------------------------------------------

    def step_scales(
        self,
        weights: dict,
        dtype: jnp.dtype,
        state: dict,
        tokens: jax.Array | int,
        parallel: Parallel,
    ) -> dict:
        """Scales [L, *`scales_shape`] of a step.

        weights: the stored shards of stacks [L, ...], which matmuls read in `dtype`. state: what
        the last steps left, if the recipe remembers it. tokens: those that count in the step.
        """
        return self._scales_of(weight_amax(weights, dtype, parallel), state, tokens)

    def _scales_of(self, amax: dict, state: dict, tokens: jax.Array | int) -> dict:
        raise NotImplementedError

    def first_state(self, weights: dict, steps: int) -> dict:
        """The state of stacked weights [L, ...] before the first step; it looks `steps` back."""
        raise NotImplementedError

    def next_state(self, state: dict, seen: dict, parallel: Parallel) -> tuple[dict, jax.Array]:
        """(the state after a step that saw these maxima here, whether all of them are finite)."""
        raise NotImplementedError

    # ---- what the plan asks ------------------------------------------------------------------

    def supports(self, block: Block) -> bool:
        """Whether the recipe computes a block in one function.

        Kernels of experts round by scales that are known before.
        """
        return self.knows_scales if block == "gated experts" else self.backend == "xla"

    def gradient_kernel(self, dtype: jnp.dtype, shape: tuple[int, ...]) -> Choice:
        """The kernel that rounds a tensor [M, N] and its transpose."""
        return choose("quantize", dtype, shape, backend=self.backend)

    def require(self, device: jax.Device, rounds_experts: bool = False) -> None:
        """Raise `UserError` for a GPU that does not multiply 8 bits; CPUs emulate XLA's matmuls."""
        capability = getattr(device, "compute_capability", None)
        if device.platform in ("gpu", "cuda") and float(capability) < 8.9:
            raise UserError(
                f"precision.fp8: {device.device_kind} has compute capability {capability}, FP8 "
                "needs 8.9 (Ada, Hopper, Blackwell); set precision.fp8=none"
            )
        if self.backend == "te":
            transformer_engine.require_te(device)

    def __str__(self) -> str:
        return f"{self.name} scaling by {self.backend}"


@dataclass(frozen=True)
class Current(PerTensor):
    """Scales from the maximum of the tensor itself, over tp of the mesh."""

    name: ClassVar[str] = "current"
    knows_scales: ClassVar[bool] = False

    def scale_for(self, amax, known, dtype, parallel):
        return scale_of(parallel.pmax(amax, "tp"), dtype)

    def _scales_of(self, amax: dict, state: dict, tokens: jax.Array | int) -> dict:
        return jax.tree.map(current_scales, amax)


@dataclass(frozen=True)
class Delayed(PerTensor):
    """Scales from the maxima of the last steps, which the state remembers."""

    name: ClassVar[str] = "delayed"
    remembers: ClassVar[bool] = True
    knows_scales: ClassVar[bool] = True

    def scale_for(self, amax, known, dtype, parallel):
        return known

    def first_state(self, weights: dict, steps: int) -> dict:
        return jax.tree.map(lambda w: jnp.zeros((w.shape[0], 2, steps), jnp.float32), weights)

    def next_state(self, state: dict, seen: dict, parallel: Parallel) -> tuple[dict, jax.Array]:
        return remember(state, seen, parallel)

    def _scales_of(self, amax: dict, state: dict, tokens: jax.Array | int) -> dict:
        return jax.tree.map(lambda a, history: delayed_scales(a, history, tokens), amax, state)


Recipe = PerTensor | BlockScaled

RECIPES: dict[str, type[Recipe]] = {
    kind.name: kind for kind in (Current, Delayed, Block128, MxFp8, NvFp4)
}


def recipe_of(precision: PrecisionConfig, name: str | None = None) -> Recipe | None:
    """The recipe of a `name`, by default that of `precision.fp8`; None if it is "none"."""
    name = precision.fp8 if name is None else name
    if name == "none":
        return None
    kind = RECIPES[name]
    if issubclass(kind, PerTensor):
        return kind(precision.fp8_backend)
    gradients = "e5m2" if precision.fp8_format == "hybrid" else "e4m3"
    return kind(gradients, precision.fp8_scales, precision.fp8_emulate, precision.fp8_block)
