"""Mamba-2 (arXiv 2405.21060): a state-space mixer whose state decays as each token says.

The input becomes z, x, B, C and dt. A causal convolution and SiLU go over x, B and C, the scan
(`kernels/recurrence/ssd.py`) over x with steps softplus(dt + dt_bias). Its output plus D times x is
gated by silu(z), normed over each group of heads, and projected back. Heads are split over tp, and
groups where tp divides them. If it does not, a device projects only the groups that its heads
use, the gradient rule sums the parts, and the norm sums its squares over tp. cp passes states
(`recurrent_context.py`). The cache holds the last tokens before the convolution, and the state in
fp32. Letters: H heads, P channels of a head, G groups, N state, K taps.

Initial values are those of Megatron-LM and state-spaces/mamba: A uniform in [1, 16], steps uniform
in their logarithm, D one, weights of the convolution uniform within K ** -0.5.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.mixers import MambaConfig
from mjax.config.schema.model import ModelConfig
from mjax.kernels import choose
from mjax.kernels.recurrence.causal_conv import causal_conv
from mjax.kernels.recurrence.ssd import SsdInputs, ssd, ssd_final, ssd_step
from mjax.kernels.recurrence.token_step import StateSlots
from mjax.models.base.branch import BranchInputs, BranchOutput, CacheSpec, KernelChoices, Workload
from mjax.models.base.context import Context
from mjax.models.base.params import Initializer, constant, declare, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import weight_of
from mjax.models.recurrent.recurrent_context import from_pieces
from mjax.models.recurrent.recurrent_mixer import (
    PASSES_OF_SCAN,
    RecurrentCache,
    RecurrentMixer,
    Scanned,
    in_fp32,
    initial_decays,
)
from mjax.models.runtime.remat import from_arguments
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import held_groups
from mjax.sharding.spec import ParamSpec


class Mixed(NamedTuple):
    """Input and output of the scan: x and y [B, S, H, P]."""

    x: jax.Array
    y: jax.Array


class Mamba(RecurrentMixer):
    """[B, S/tp, D] -> [B, S/tp, D], within segments.

    `inner` is [D, 2, H, P] (z, x), `bc` [D, 2, G, N] (B, C), `dt` [D, H], `out` [H, P, D].
    `x_conv` is [H, P, K], `bc_conv` [2, G, N, K], their biases lack K. `A_log`, `D` and `dt_bias`
    are [H] and stay in fp32. `norm` is [H, P].
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        sizes = cfg.mamba
        self.taps = sizes.conv_kernel
        width, init = cfg.hidden_size, normal(cfg.initializer_range)
        heads, groups = _heads_axes(sizes), _groups_axes(sizes)
        inner = _matrix("ssm_in", width, heads.in_pairs(), "z_proj", "x_proj")
        bc = _matrix("ssm_bc", width, groups.in_pairs(), "b_proj", "c_proj")
        dt = _matrix("ssm_dt", width, Channels(heads.sizes[:1], heads.axes[:1]), "dt_proj")
        self.inner = declare(rngs, inner, init)
        self.bc = declare(rngs, bc, init)
        self.dt = declare(rngs, dt, init)
        self._declare_convolution(rngs)
        initial_values = {
            "A_log": initial_decays,
            "D": constant(1.0),
            "dt_bias": _initial_steps(sizes),
        }
        for name, values in initial_values.items():
            self._declare_precise(rngs, name, sizes.mamba_num_heads, values, f"mamba.{name}")
        if sizes.mamba_rms_norm:
            gain = ParamSpec(
                shape=heads.sizes,
                axes=heads.axes,
                role="norm",
                hf=("mamba.norm.weight",),
            )
            self.norm = declare(rngs, gain, constant(1.0))
        out = ParamSpec(
            shape=(*heads.sizes, width),
            axes=(*heads.axes, "embed"),
            role="matrix",
            inputs=2,
            matmul="ssm_proj",
            hf=("mamba.out_proj.weight",),
        )
        self.out = declare(rngs, out, normal(out_std))

    def _declare_convolution(self, rngs: nnx.Rngs) -> None:
        sizes = self.cfg.mamba
        heads, groups = _heads_axes(sizes), _groups_axes(sizes)
        channels = {
            "x": (*heads, ("x_conv",)),
            "bc": (*groups.in_pairs(), ("b_conv", "c_conv")),
        }
        for name, (shape, axes, hf) in channels.items():
            weights = tuple(f"mamba.{one}.weight" for one in hf)
            self._declare_conv(rngs, f"{name}_conv", shape, axes, *weights)
            if sizes.use_conv_bias:
                biases = tuple(f"mamba.{one}.bias" for one in hf)
                spec = ParamSpec(shape, axes, "bias", hf=biases)
                setattr(self, f"{name}_conv_bias", declare(rngs, spec, constant(0.0)))

    @jax.named_scope("mamba")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: RecurrentCache | None = None
    ) -> BranchOutput:
        ctx = inputs.ctx

        def own(w: jax.Array) -> jax.Array:
            return self._own_groups(w, 2, ctx.parallel)

        bc = weight_of(self.bc).of_outputs(own)
        weights = weight_of(self.inner), bc, weight_of(self.dt)
        zx, bc, dt = column(x, weights, ctx)
        zx, bc, dt = self._scaled_parts(zx, bc, dt)
        z, x = _of_pair(zx)
        rates = (self._steps(dt),)
        read, y, cache = self._mix((x, bc), rates, inputs, cache)
        mixed = Mixed(from_pieces(read.x, ctx), y)
        y = self._gated_norm(mixed, z, ctx)
        y = row(y, weight_of(self.out), ctx)
        multiplier = self.cfg.mamba.ssm_out_multiplier
        if multiplier is not None:
            y = y * multiplier
        return BranchOutput(y, cache=cache)

    def _scaled_parts(
        self, zx: jax.Array, bc: jax.Array, dt: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The parts of the projected input times Falcon-H1's multipliers."""
        sizes = self.cfg.mamba
        if sizes.ssm_in_multiplier is None and sizes.ssm_multipliers is None:
            return zx, bc, dt
        of_parts = jnp.asarray(sizes.ssm_multipliers or [1.0] * 5, zx.dtype)
        of_parts = of_parts * (sizes.ssm_in_multiplier or 1.0)
        of_zx, of_bc, of_dt = jnp.split(of_parts, [2, 4])
        return zx * of_zx[:, None, None], bc * of_bc[:, None, None], dt * of_dt

    def _steps(self, dt: jax.Array) -> jax.Array:
        """The steps [B, S, H], fp32."""
        bias = in_fp32(self.dt_bias[...])
        dt = jax.nn.softplus(in_fp32(dt) + bias)
        limit = self.cfg.mamba.time_step_limit
        return dt if limit is None else jnp.clip(dt, *limit)

    def _scan(self, read: SsdInputs, starts, initial) -> Scanned:
        chunk = self.cfg.mamba.chunk_size
        made = ssd(read, chunk=chunk, starts=starts, initial=initial)
        return Scanned(*made)

    def _summary(self, read: SsdInputs, starts) -> tuple[jax.Array, jax.Array]:
        return ssd_final(read, starts)

    def _step(self, read: SsdInputs, state: jax.Array, slots: StateSlots | None) -> Scanned:
        token = SsdInputs(
            x=read.x[:, 0],
            dt=read.dt[:, 0],
            a=read.a,
            b=read.b[:, 0],
            c=read.c[:, 0],
        )
        state, y = ssd_step(state, token, slots)
        return Scanned(y[:, None], state)

    def _convolve(self, parts, rates, starts, histories, parallel: Parallel) -> SsdInputs:
        """Convolves x [B, S, H, P] and bc [B, S, 2, G, N]; returns the scan's inputs."""
        x, bc = parts
        x_bias = bc_bias = None
        bc_conv = self._own_groups(self.bc_conv[...], 1, parallel)
        if self.cfg.mamba.use_conv_bias:
            x_bias = self.x_conv_bias[...]
            bc_bias = self._own_groups(self.bc_conv_bias[...], 1, parallel)
        x_before, bc_before = histories
        x = causal_conv(x, self.x_conv[...], x_bias, starts=starts, history=x_before)
        bc = causal_conv(bc, bc_conv, bc_bias, starts=starts, history=bc_before)
        a = -jnp.exp(in_fp32(self.A_log[...]))
        b, c = _of_pair(bc)
        return SsdInputs(x, *rates, a, b, c)

    def _own_groups(self, w: jax.Array, axis: int, parallel: Parallel) -> jax.Array:
        """The groups of `w` along `axis` that this device's heads use.

        They are one, or those that it holds. If its heads begin within a group and end in
        another one, each head gets a copy of its group.
        """
        sizes = self.cfg.mamba
        if sizes.n_groups % parallel.tp == 0:
            return w
        group = self._group_of_heads(parallel)
        if (sizes.mamba_num_heads // sizes.n_groups) % len(group) == 0:
            return jax.lax.dynamic_slice_in_dim(w, group[0], 1, axis)
        return jnp.take(w, group, axis=axis)

    def _group_of_heads(self, parallel: Parallel) -> jax.Array:
        """The number of the group of each of this device's heads."""
        sizes = self.cfg.mamba
        heads = sizes.mamba_num_heads // parallel.tp
        first = parallel.index("tp") * heads
        return (first + jnp.arange(heads)) // (sizes.mamba_num_heads // sizes.n_groups)

    def _gated_norm(self, mixed: Mixed, z: jax.Array, ctx: Context) -> jax.Array:
        """RMSNorm over each group of heads of (y + D x) silu(z); its backward keeps y, x and z."""

        @from_arguments
        def gated(mixed: Mixed, z: jax.Array, d: jax.Array, gain: jax.Array | None) -> jax.Array:
            passed_by = in_fp32(mixed.x) * in_fp32(d)[:, None]
            h = in_fp32(mixed.y) + passed_by
            h = h * jax.nn.silu(in_fp32(z))
            if gain is None:
                return h.astype(z.dtype)
            squares = jnp.sum(jnp.square(h), -1)
            mean = self._mean_of_groups(squares, ctx.parallel)
            factor = jax.lax.rsqrt(mean + self.cfg.norm_eps)
            h = h * factor[..., None] * in_fp32(gain)
            return h.astype(z.dtype)

        gain = self.norm[...] if self.cfg.mamba.mamba_rms_norm else None
        return gated(mixed, z, self.D[...], gain)

    def _mean_of_groups(self, sums: jax.Array, parallel: Parallel) -> jax.Array:
        """Sums of heads [B, S, H] -> for each head the mean over the channels of its group."""
        sizes = self.cfg.mamba
        if sizes.n_groups % parallel.tp == 0:
            groups = sizes.n_groups // parallel.tp
            grouped = sums.reshape(*sums.shape[:2], groups, -1)
            of_groups = jnp.sum(grouped, -1)
            heads = grouped.shape[-1]
            total = jnp.repeat(of_groups, heads, axis=-1)
        else:
            group = self._group_of_heads(parallel)
            own = jax.nn.one_hot(group, sizes.n_groups)
            exactly = {"precision": "highest"}
            of_groups = jnp.einsum("bsh,hg->bsg", sums, own, **exactly)
            of_groups = parallel.psum(of_groups, "tp")
            total = jnp.einsum("bsg,hg->bsh", of_groups, own, **exactly)
        return total * (sizes.n_groups / sizes.channels)

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        """21 * H * P * N: Megatron-LM counts 7 of the scan's recurrence, and twice that backward.

        The form in chunks computes more, and its convolution and norm are not counted.
        """
        return 21.0 * cfg.mamba.channels * cfg.mamba.state_size

    @staticmethod
    def kernels(cfg: ModelConfig, work: Workload) -> KernelChoices:
        """The kernels of its convolution and its scan."""
        sizes = cfg.mamba
        heads = sizes.mamba_num_heads // work.parallel.tp
        shape = work.rows, work.length, heads, sizes.mamba_head_dim
        forked = {"forked": work.shared_prefixes}
        conv = choose("causal_conv", work.dtype, shape, taps=sizes.conv_kernel, **forked)
        return {
            "causal conv": conv,
            "ssd": choose("ssd", work.dtype, shape, state=sizes.state_size, **forked),
        }

    @classmethod
    def memory_traffic(cls, cfg: ModelConfig, kernels: KernelChoices, seq_length: int) -> float:
        return PASSES_OF_SCAN * cfg.mamba.channels

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> RecurrentCache:
        """It does not grow with `length`."""
        sizes = cfg.mamba
        before = batch, sizes.conv_kernel - 1
        heads = sizes.mamba_num_heads, sizes.mamba_head_dim
        bc = 2, held_groups(sizes.n_groups, heads[0], tp), sizes.state_size
        state = batch, *heads, sizes.state_size
        of_heads = CacheSpec((*before, *heads), ("batch", None, "heads", None))
        of_groups = CacheSpec((*before, *bc), ("batch", None, None, "groups", None))
        return RecurrentCache.spec((of_heads, of_groups), state)


def _of_pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two of a pair [B, S, 2, ...]."""
    return x[:, :, 0], x[:, :, 1]


# ---- declarations --------------------------------------------------------------------------------


class Channels(NamedTuple):
    """The sizes and logical axes of channels."""

    sizes: tuple[int, ...]
    axes: tuple[str, ...]

    def in_pairs(self) -> "Channels":
        """Returns the channels of two such projections side by side."""
        return Channels((2, *self.sizes), ("pair", *self.axes))


def _heads_axes(sizes: MambaConfig) -> Channels:
    return Channels((sizes.mamba_num_heads, sizes.mamba_head_dim), ("heads", "head_dim"))


def _groups_axes(sizes: MambaConfig) -> Channels:
    return Channels((sizes.n_groups, sizes.state_size), ("groups", "state"))


def _matrix(matmul: str, width: int, outputs: Channels, *hf: str) -> ParamSpec:
    """A projection of the input."""
    return ParamSpec(
        shape=(width, *outputs.sizes),
        axes=("embed", *outputs.axes),
        role="matrix",
        matmul=matmul,
        hf=tuple(f"mamba.{name}.weight" for name in hf),
    )


def _initial_steps(sizes: MambaConfig) -> Initializer:
    """softplus^-1(dt), with dt uniform in its logarithm."""
    low, high = math.log(sizes.time_step_min), math.log(sizes.time_step_max)

    def draw(key, shape, dtype):
        steps = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
        steps = jnp.maximum(steps, sizes.time_step_floor)
        return steps + jnp.log(-jnp.expm1(-steps))

    return draw
