"""Recipes that scale blocks: DeepSeek-V3's 128-blocks, MXFP8, NVFP4; methods as of `PerTensor`.

| recipe | activations, gradients | weights | format | scales |
|---|---|---|---|---|
| block128 | 1 x 128 | 128 x 128 | E4M3, gradients by key E5M2 | fp32, powers of two by default |
| mxfp8 | 1 x 32 | 1 x 32 | the same | E8M0, rounded up by default |
| nvfp4 | 1 x 16 | 16 x 16 | E2M1 | E4M3 under an fp32 scale of the tensor |

Blocks lie along what a product contracts. So an activation and a gradient are rounded twice, each
time from the unrounded tensor: along features for the forward product and the gradient of the
input, along tokens for the gradient of the weight. A weight in square blocks is rounded once, one
in rows of blocks twice. Weights travel in the dtype of the computation and are rounded by each
matmul. Invariant: the rounding is that of the device which has such products; the products are
those of the rounded numbers: in plain JAX, for 128-blocks on Hopper by our kernels, for the other
two on Blackwell by cuDNN. Source: Transformer Engine 2.20 (common/recipe).
"""

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mjax.errors import UserError
from mjax.kernels.base.chooser import KERNEL_SIDE, Choice, choose
from mjax.kernels.base.device_facts import has_triton, on_blackwell, on_hopper
from mjax.kernels.fp8.block_rounding import round_both_ways, round_square
from mjax.kernels.fp8.blocks import (
    FORMATS,
    Blocks,
    NumberFormat,
    ScaleRule,
    free_scales,
    multiply_blocks,
    round_blocks,
    round_within_groups,
    rounded_down,
    rounded_up,
    scales_of_powers,
)
from mjax.kernels.fp8.four_bits import (
    SIDE_OF_16,
    GradientPlaces,
    mix_tokens,
    noise_of,
    round_four_bits,
    tokens_of_gradient,
)
from mjax.kernels.fp8.quantize import amax_of, weight_amax
from mjax.kernels.fp8.scaled_matmul import multiply_scaled
from mjax.sharding.collectives import LOCAL, Parallel

log = logging.getLogger(__name__)

OperandRole = Literal["input", "weight", "gradient"]

# How a recipe runs, by the kernel of its products.
RUN_BY = {"xla": ", emulated", "mosaic": " by our kernels", "cudnn": " by cuDNN, rounded by XLA"}


class TwoRoundings(NamedTuple):
    """A tensor [M, N] rounded in blocks along both axes; `plain` is None once nothing reads it.

    plain: [M, N], along features. turned: [N, M], along tokens. used: fp32 [2], zeros; nothing
    remembers the maxima.
    """

    plain: Blocks | None
    turned: Blocks
    used: jax.Array


@dataclass(frozen=True)
class BlockScaled:
    """A scale a block.

    gradients: the format of gradients. scales: `precision.fp8_scales`. emulates: whether GPUs may
    multiply in plain JAX. block: another side of blocks than the recipe's own, or None.
    """

    gradients: str = "e4m3"
    scales: str = "power_of_two"
    emulates: bool = False
    block: int | None = None

    name: ClassVar[str]
    # `side` by default, and whether blocks of weights are square.
    own_side: ClassVar[int]
    square: ClassVar[bool]
    # Terms after which a sum is added to the total; None: all of them.
    promoted: ClassVar[int | None] = None
    # The hardware that has such products.
    hardware: ClassVar[str]

    knows_scales: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    scales_shape: ClassVar[tuple[int, ...]] = (3,)
    weight_bytes: ClassVar[float] = 2.0
    stores_weights: ClassVar[bool] = False
    scales_tensors: ClassVar[bool] = False
    needs_places: ClassVar[bool] = False

    @property
    def side(self) -> int:
        """Elements of a block along what is contracted."""
        return self.own_side if self.block is None else self.block

    # ---- what matmuls ask ------------------------------------------------------------------------

    def round_input(
        self, x: jax.Array, scales: jax.Array, parallel: Parallel, amax: jax.Array | None = None
    ) -> TwoRoundings:
        """Rounds x [M, K] for the forward product and for the weight's gradient."""
        return self._both_ways(x, "input", parallel)

    def kept_input(self, x8: TwoRoundings) -> TwoRoundings:
        """The part of a rounded input that the backward reads."""
        return x8._replace(plain=None)

    def round_weight(self, value: jax.Array, scales: jax.Array, contracted: int) -> Blocks:
        """Rounds a weight [K, N] for a product that contracts an axis, which becomes the last."""
        matrix = value.T if contracted == 0 else value
        block = (self.side if self.square else 1), self.side
        return self._rounded(matrix, block, "weight")

    def round_gradient(
        self,
        g: jax.Array,
        scales: jax.Array,
        parallel: Parallel,
        places: GradientPlaces | None = None,
    ) -> TwoRoundings:
        """Rounds the gradient g [M, N] of y for both products of the backward."""
        return self._both_ways(g, "gradient", parallel)

    def product(
        self, x8: TwoRoundings, w8: Blocks, contracted: int, scales: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """[M, N] in `dtype`: x8 [M, K] times a weight that was rounded for it, [N, K]."""
        return self._multiply(x8.plain, w8, dtype)

    def input_gradient(
        self, g8: TwoRoundings, w8: Blocks, scales: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """[M, K] in `dtype`: the gradient times the transpose of a weight [K, N]."""
        return self._multiply(g8.plain, w8, dtype)

    def weight_gradient(
        self, x8: TwoRoundings, g8: TwoRoundings, dtype: jnp.dtype, total: jax.Array | None
    ) -> jax.Array:
        """[K, N] in `dtype`: the transpose of x8 times the gradient, added to a `total` if any."""
        return self._multiply(x8.turned, g8.turned, dtype, total)

    def sum_dtype(self, sums: jnp.dtype, gradient: jnp.dtype) -> jnp.dtype:
        """The dtype of a weight's gradient that a running sum takes."""
        return sums

    # ---- what grouped matmuls of experts ask -----------------------------------------------------

    def round_experts(
        self,
        x: jax.Array,
        sizes: jax.Array | None,
        role: OperandRole,
        sides: tuple[int, int],
        *,
        plain: bool = True,
        turned: bool = True,
    ) -> tuple[jax.Array | Blocks | None, jax.Array | Blocks | None]:
        """Rows [M, C] of experts as products over C, and over each one's rows, read them.

        sides: the inputs and outputs of the experts' weights. plain, turned: whether each is
        wanted; the first needs no sizes. They are numbers in x's dtype, or `Blocks` for kernels.
        """
        rows = self._rows(x, role, LOCAL).numbers().astype(x.dtype) if plain else None
        facts = sizes, self.side, self._rule, self._format(role)
        return rows, round_within_groups(x, *facts) if turned else None

    def read_rows(self, x: Blocks, sides: tuple[int, int]) -> jax.Array | Blocks:
        """`round_experts` of rows that came in E4M3, by a power of two for each 1 x 128."""
        return x.numbers()

    def weights_of_experts(self, value: jax.Array, contracted: int) -> jax.Array | Blocks:
        """Weights [E, K, N] as a product over an axis of each reads them: numbers."""

        def one(matrix: jax.Array) -> jax.Array:
            numbers = BlockScaled.round_weight(self, matrix, None, contracted).numbers()
            return (numbers.T if contracted == 0 else numbers).astype(value.dtype)

        return jax.vmap(one)(value)

    # ---- parts -----------------------------------------------------------------------------------

    def _both_ways(self, x: jax.Array, role: OperandRole, parallel: Parallel) -> TwoRoundings:
        """x [M, C] in blocks along its last axis, and its transpose so."""
        plain = self._rows(x, role, parallel)
        return TwoRoundings(plain, self._rows(x.T, role, parallel), jnp.zeros(2))

    def _multiply(
        self, a: Blocks, b: Blocks, dtype: jnp.dtype, total: jax.Array | None = None
    ) -> jax.Array:
        """The product [M, N] in `dtype` of a [M, K] and the transpose of b [N, K], added to any."""
        made = multiply_blocks(a, b, dtype, self.promoted)
        return made if total is None else total + made

    def _rows(self, x: jax.Array, role: OperandRole, parallel: Parallel) -> Blocks:
        """x [R, C] in blocks along its last axis."""
        return self._rounded(x, (1, self.side), role)

    def _rounded(self, x: jax.Array, block: tuple[int, int], role: OperandRole) -> Blocks:
        return round_blocks(x, block, self._rule, self._format(role), self.scales != "free")

    def _format(self, role: OperandRole) -> NumberFormat:
        return FORMATS[self.gradients if role == "gradient" else "e4m3"]

    @property
    def _rule(self) -> ScaleRule:
        return free_scales if self.scales == "free" else scales_of_powers

    # ---- what the state asks ---------------------------------------------------------------------

    def step_scales(
        self,
        weights: dict,
        dtype: jnp.dtype,
        state: dict,
        tokens: jax.Array | int,
        parallel: Parallel,
    ) -> dict:
        """Scales [L, 3] of a step, which say nothing: blocks are scaled where they are rounded."""
        return jax.tree.map(lambda w: jnp.zeros((w.shape[0], 3)), weights)

    def first_state(self, weights: dict, steps: int) -> dict:
        raise NotImplementedError(f"{self.name} remembers nothing")

    def next_state(self, state: dict, seen: dict, parallel: Parallel) -> tuple[dict, jax.Array]:
        raise NotImplementedError(f"{self.name} remembers nothing")

    # ---- what the plan asks ----------------------------------------------------------------------

    def supports(self, block: str) -> bool:
        """Whether the recipe computes a block in one function."""
        return False

    def gradient_kernel(self, dtype: jnp.dtype, shape: tuple[int, ...]) -> Choice:
        """The kernel that rounds a gradient [M, N], or multiplies in sizes (M, K, N)."""
        raise NotImplementedError(f"{self.name} has no kernels")

    def require(self, device: jax.Device, rounds_experts: bool = False) -> None:
        """Raise `UserError` for a GPU, unless it may emulate; CPUs always do."""
        if device.platform != "cpu" and not self.emulates:
            raise UserError(
                f"precision.fp8={self.name}: {device.device_kind} has no kernels of it here "
                f"(products in hardware need {self.hardware}); set "
                "precision.fp8_emulate=true to multiply the rounded numbers in plain JAX, slower "
                "than precision.fp8=none, or precision.fp8=delayed"
            )
        log.warning("precision.fp8: %s: rounded exactly, multiplied in plain JAX", self)

    def __str__(self) -> str:
        whole = 1, self.side, self.side
        return self.name + RUN_BY[self.gradient_kernel(jnp.dtype("bfloat16"), whole).name]


@dataclass(frozen=True)
class Block128(BlockScaled):
    """DeepSeek-V3's: sums leave the tensor cores after every 128 terms (arXiv 2412.19437, 3.3)."""

    name: ClassVar[str] = "block128"
    own_side: ClassVar[int] = 128
    square: ClassVar[bool] = True
    promoted: ClassVar[int | None] = 128
    hardware: ClassVar[str] = "Hopper, jax >= 0.11, jax-triton and blocks of 128"

    def round_weight(self, value: jax.Array, scales: jax.Array, contracted: int) -> Blocks:
        if self.gradient_kernel(value.dtype, (1, *value.shape)).name == "xla":
            return super().round_weight(value, scales, contracted)
        return round_square(value, self._format("weight"), self.scales == "free", contracted == 0)

    def _both_ways(self, x: jax.Array, role: OperandRole, parallel: Parallel) -> TwoRoundings:
        if self.gradient_kernel(x.dtype, x.shape).name == "xla":
            return super()._both_ways(x, role, parallel)
        plain, turned = round_both_ways(x, self._format(role), self.scales == "free")
        return TwoRoundings(plain, turned, jnp.zeros(2))

    def _multiply(
        self, a: Blocks, b: Blocks, dtype: jnp.dtype, total: jax.Array | None = None
    ) -> jax.Array:
        if self.gradient_kernel(dtype, (*a.values.shape, len(b.values))).name == "xla":
            return super()._multiply(a, b, dtype, total)
        from mjax.kernels.fp8.block_mosaic import multiply_on_hopper

        return multiply_on_hopper(a, b, dtype, total)

    def round_experts(self, x, sizes, role, sides, **ways):
        if self.gradient_kernel(x.dtype, (1, *sides)).name == "xla":
            return super().round_experts(x, sizes, role, sides, **ways)
        return round_both_ways(x, self._format(role), self.scales == "free", sizes, **ways)

    def read_rows(self, x, sides):
        if self.gradient_kernel(x.wide, (1, *sides)).name == "xla":
            return super().read_rows(x, sides)
        return x

    def round_rows(self, x: jax.Array) -> Blocks:
        """Rounds x [M, C] along its last axis alone."""
        if self.gradient_kernel(x.dtype, x.shape).name == "xla":
            return self._rows(x, "input", LOCAL)
        return round_both_ways(x, self._format("input"), self.scales == "free", turned=False)[0]

    def weights_of_experts(self, value, contracted):
        if self.gradient_kernel(value.dtype, value.shape).name == "xla":
            return super().weights_of_experts(value, contracted)
        return round_square(value, self._format("weight"), self.scales == "free", contracted == 0)

    def gradient_kernel(self, dtype: jnp.dtype, shape: tuple[int, ...]) -> Choice:
        """The kernels that round a matrix [M, N], or multiply so, of sizes (M, K, N)."""
        return choose("block_matmul", dtype, shape, side=self.side, emulates=self.emulates)

    def require(self, device: jax.Device, rounds_experts: bool = False) -> None:
        if self.emulates or self.side != KERNEL_SIDE or not (on_hopper(device) and has_triton()):
            super().require(device, rounds_experts)


class ScaledInHardware(BlockScaled):
    """Blocks that the tensor cores of Blackwell scale."""

    hardware: ClassVar[str] = "Blackwell of compute capability 10.0 or 10.3, and jax >= 0.11"

    def _multiply(
        self, a: Blocks, b: Blocks, dtype: jnp.dtype, total: jax.Array | None = None
    ) -> jax.Array:
        if self.gradient_kernel(dtype, (*a.values.shape, len(b.values))).name == "xla":
            return super()._multiply(a, b, dtype, total)
        made = multiply_scaled(a, b, dtype)
        return made if total is None else total + made

    def gradient_kernel(self, dtype: jnp.dtype, shape: tuple[int, ...]) -> Choice:
        """The kernel that multiplies; XLA rounds."""
        facts = {"side": self.side, "emulates": self.emulates, "scaled": True}
        return choose("block_matmul", dtype, shape, **facts)

    def require(self, device: jax.Device, rounds_experts: bool = False) -> None:
        if self.emulates or not on_blackwell(device):
            super().require(device, rounds_experts)
        elif rounds_experts:
            raise UserError(
                f"precision.fp8_experts: cuDNN has no grouped products of {self.name}; set "
                "precision.fp8_experts=false, or precision.fp8_emulate=true to multiply the "
                "rounded numbers in plain JAX, slower than precision.fp8=none"
            )
        else:
            log.warning("precision.fp8: %s: tested on CPUs, not yet run on a Blackwell GPU", self)
        if self.scales == "floor":
            log.warning("precision.fp8_scales=floor: training diverged so elsewhere (2506.08027)")


@dataclass(frozen=True)
class MxFp8(ScaledInHardware):
    """OCP's microscaling format, with scales rounded up unless `scales` is "floor"."""

    name: ClassVar[str] = "mxfp8"
    own_side: ClassVar[int] = 32
    square: ClassVar[bool] = False

    @property
    def _rule(self) -> ScaleRule:
        return rounded_down if self.scales == "floor" else rounded_up


@dataclass(frozen=True)
class NvFp4(ScaledInHardware):
    """NVIDIA's four bits (`four_bits.py`); the tensor's scale is shared over tp."""

    name: ClassVar[str] = "nvfp4"
    own_side: ClassVar[int] = SIDE_OF_16
    square: ClassVar[bool] = True
    needs_places: ClassVar[bool] = True

    def round_input(
        self, x: jax.Array, scales: jax.Array, parallel: Parallel, amax: jax.Array | None = None
    ) -> TwoRoundings:
        turned = self._rows(mix_tokens(x.T), "input", parallel)
        return TwoRoundings(self._rows(x, "input", parallel), turned, jnp.zeros(2))

    def round_weight(self, value: jax.Array, scales: jax.Array, contracted: int) -> Blocks:
        matrix = value.T if contracted == 0 else value
        return round_four_bits(matrix, (self.side, self.side), scales[1])

    def round_gradient(
        self,
        g: jax.Array,
        scales: jax.Array,
        parallel: Parallel,
        places: GradientPlaces | None = None,
    ) -> TwoRoundings:
        tokens = tokens_of_gradient(places, len(g), parallel)
        plain = self._rows(g, "gradient", parallel, noise_of(places, tokens, 0))
        turned = mix_tokens(g.T)
        added = jnp.arange(turned.shape[1] - len(g), dtype=jnp.uint32)  # of tokens that fill up
        noise = noise_of(places, jnp.concatenate([tokens, ~added]), 1).T
        return TwoRoundings(plain, self._rows(turned, "gradient", parallel, noise), jnp.zeros(2))

    def _rows(self, x, role, parallel, noise=None) -> Blocks:
        amax = parallel.pmax(amax_of(x), "tp")
        return round_four_bits(x, (1, self.side), amax, noise)

    def step_scales(self, weights, dtype, state, tokens, parallel) -> dict:
        """Scales [L, 3]: in the middle the largest magnitudes of weights over the whole mesh."""

        def one(amax: jax.Array) -> jax.Array:
            return jnp.stack([jnp.zeros_like(amax), amax, jnp.zeros_like(amax)], -1)

        return jax.tree.map(one, weight_amax(weights, dtype, parallel))
