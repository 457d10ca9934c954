"""Gated DeltaNet (arXiv 2412.06464), as Qwen3-Next has it: attention that is linear in the length.

The input becomes q, k, v and a gate z, and for each head of values b and a. A causal convolution
and SiLU go over q, k and v; q and k are then divided by their lengths. The gated delta rule
(`kernels/recurrence/gated_delta.py`) runs with beta = sigmoid(b) and decays exp(-exp(A_log)
softplus(a + dt_bias)). Its output is normed in each head, multiplied by silu(z), and projected
back. A head of keys serves R consecutive heads of values. tp splits both together. cp passes
states, and the transition matrices of pieces (`recurrent_context.py`). Letters: G heads of keys, R
heads of values of each, H = G R, N channels of a key, P of a value, K taps.

Initial values are those of Megatron-LM and transformers: A uniform in [1, 16], dt_bias one, weights
of the convolution uniform within K ** -0.5.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels import choose
from mjax.kernels.elementwise import norm
from mjax.kernels.recurrence.causal_conv import causal_conv
from mjax.kernels.recurrence.gated_delta import (
    DeltaInputs,
    gated_delta,
    gated_delta_final,
    gated_delta_step,
)
from mjax.kernels.recurrence.token_step import StateSlots
from mjax.models.base.branch import BranchInputs, BranchOutput, CacheSpec, KernelChoices, Workload
from mjax.models.base.params import constant, declare, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import weight_of
from mjax.models.recurrent.recurrent_mixer import (
    PASSES_OF_SCAN,
    RecurrentCache,
    RecurrentMixer,
    Scanned,
    in_fp32,
    initial_decays,
)
from mjax.models.runtime.remat import from_arguments
from mjax.sharding.spec import ParamSpec

_LENGTH_EPS = 1e-6  # transformers' and flash-linear-attention's


class DeltaNet(RecurrentMixer):
    """[B, S/tp, D] -> [B, S/tp, D], within segments.

    `inner` is [D, G, 2 N + 2 R P]: q, k, v and z of a head of keys side by side, as Hugging Face
    has them. `ba` is [D, G, 2 R] likewise. `qk_conv` is [2, G, N, K], `v_conv` [H, P, K]. `A_log`
    and `dt_bias` are [H] and stay in fp32. `norm` [P] is one for all heads, `out` [H, P, D].
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        sizes = cfg.deltanet
        self.taps = sizes.linear_conv_kernel_dim
        keys = sizes.linear_num_key_heads, sizes.linear_key_head_dim
        values = sizes.linear_num_value_heads, sizes.linear_value_head_dim
        axes = "heads", "head_dim"
        init = normal(cfg.initializer_range)
        of_key, of_values = sizes.widths
        inner = self._projection("delta_in", "qkvz", of_key, of_key, of_values, of_values)
        ba = self._projection("delta_ba", "ba", sizes.heads_a_key, sizes.heads_a_key)
        self.inner = declare(rngs, inner, init)
        self.ba = declare(rngs, ba, init)
        of_qk = _names("q_conv.weight", "k_conv.weight")
        of_v = _names("v_conv.weight")
        self._declare_conv(rngs, "qk_conv", (2, *keys), ("pair", *axes), *of_qk)
        self._declare_conv(rngs, "v_conv", values, axes, *of_v)
        initial_values = {
            "A_log": initial_decays,
            "dt_bias": constant(1.0),
        }
        for name, initial in initial_values.items():
            self._declare_precise(rngs, name, values[0], initial, *_names(name))
        gain = ParamSpec(
            shape=values[1:],
            axes=axes[1:],
            role="norm",
            hf=_names("norm.weight"),
        )
        self.norm = declare(rngs, gain, constant(1.0))
        out = ParamSpec(
            shape=(*values, cfg.hidden_size),
            axes=(*axes, "embed"),
            role="matrix",
            inputs=2,
            matmul="delta_proj",
            hf=_names("out_proj.weight"),
        )
        self.out = declare(rngs, out, normal(out_std))

    def _projection(self, matmul: str, letters: str, *parts: int) -> ParamSpec:
        """Projections of the input to so many channels each for each head of keys."""
        heads = self.cfg.deltanet.linear_num_key_heads
        return ParamSpec(
            shape=(self.cfg.hidden_size, heads, sum(parts)),
            axes=("embed", "heads", "head_dim"),
            role="matrix",
            parts=parts,
            matmul=matmul,
            hf=_names(f"in_proj_{letters}.weight"),
        )

    @jax.named_scope("deltanet")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: RecurrentCache | None = None
    ) -> BranchOutput:
        ctx = inputs.ctx
        weights = weight_of(self.inner), weight_of(self.ba)
        qkvz, ba = column(x, weights, ctx)
        qk, v, z = self._parts_of(qkvz)
        rates = self._rates(ba)
        _, y, cache = self._mix((qk, v), rates, inputs, cache)
        y = self._gated_norm(y, z)
        y = row(y, weight_of(self.out), ctx)
        return BranchOutput(y, cache=cache)

    def _parts_of(self, qkvz: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q and k [B, S, 2, G, N], v and z [B, S, H, P], of [B, S, G, 2 N + 2 R P]."""
        sizes = self.cfg.deltanet
        keys, values = sizes.widths
        qk, v, z = jnp.split(qkvz, [2 * keys, 2 * keys + values], axis=-1)
        tokens = qkvz.shape[:2]
        qk = qk.reshape(*tokens, -1, 2, keys)
        qk = jnp.swapaxes(qk, 2, 3)
        by_head = *tokens, -1, sizes.linear_value_head_dim
        return qk, v.reshape(by_head), z.reshape(by_head)

    def _rates(self, ba: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the logarithm of the decay, beta), fp32 [B, S, H], of b and a [B, S, G, 2 R]."""
        rows, length = ba.shape[:2]
        by_head = rows, length, -1
        b, a = jnp.split(in_fp32(ba), 2, axis=-1)
        a = a.reshape(by_head)
        steps = a + in_fp32(self.dt_bias[...])
        decay = jnp.exp(in_fp32(self.A_log[...]))
        beta = jax.nn.sigmoid(b)
        log_decay = -decay * jax.nn.softplus(steps)
        return log_decay, beta.reshape(by_head)

    def _convolve(self, parts, rates, starts, histories, parallel) -> DeltaInputs:
        """Convolves q and k [B, S, 2, G, N] and v [B, S, H, P], and returns the rule's inputs."""
        qk, v = parts
        qk_before, v_before = histories
        qk = causal_conv(qk, self.qk_conv[...], starts=starts, history=qk_before)
        v = causal_conv(v, self.v_conv[...], starts=starts, history=v_before)
        q = _to_length(qk[:, :, 0], qk.shape[-1] ** -0.5)
        k = _to_length(qk[:, :, 1], 1.0)
        return DeltaInputs(q, k, v, *rates)

    def _scan(self, read: DeltaInputs, starts, initial) -> Scanned:
        chunk = self.cfg.deltanet.linear_chunk_size
        made = gated_delta(read, chunk=chunk, starts=starts, initial=initial)
        return Scanned(*made)

    def _summary(self, read: DeltaInputs, starts) -> tuple[jax.Array, jax.Array]:
        return gated_delta_final(read, self.cfg.deltanet.linear_chunk_size, starts)

    def _step(self, read: DeltaInputs, state: jax.Array, slots: StateSlots | None) -> Scanned:
        token = DeltaInputs(*(v[:, 0] for v in read))
        state, y = gated_delta_step(state, token, slots)
        return Scanned(y[:, None], state)

    def _gated_norm(self, y: jax.Array, z: jax.Array) -> jax.Array:
        """RMSNorm over each head of y, times silu(z)."""
        gain = in_fp32(self.norm[...])
        normed = norm.norm(y, gain, None, eps=self.cfg.norm_eps)
        return _gated(normed, z)

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        """24 * H * N * P, Megatron-LM's count: k k^T, v k^T, the decay of S and S q take 8 of the
        recurrence, and backward twice that.

        The form in chunks computes more, and its convolution and norm are not counted.
        """
        return 24.0 * cfg.deltanet.channels * cfg.deltanet.linear_key_head_dim

    @staticmethod
    def kernels(cfg: ModelConfig, work: Workload) -> KernelChoices:
        """The kernels of its convolution and its recurrence."""
        sizes = cfg.deltanet
        heads = sizes.linear_num_value_heads // work.parallel.tp
        shape = work.rows, work.length, heads, sizes.linear_value_head_dim
        of_chunk = {
            "width": sizes.linear_key_head_dim,
            "chunk": min(work.length, sizes.linear_chunk_size),
        }
        forked = {"forked": work.shared_prefixes}
        taps = sizes.linear_conv_kernel_dim
        conv = choose("causal_conv", work.dtype, shape, taps=taps, **forked)
        return {
            "causal conv": conv,
            "gated delta": choose("gated_delta", work.dtype, shape, **of_chunk, **forked),
        }

    @classmethod
    def memory_traffic(cls, cfg: ModelConfig, kernels: KernelChoices, seq_length: int) -> float:
        return PASSES_OF_SCAN * cfg.deltanet.channels  # not measured

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> RecurrentCache:
        """It does not grow with `length`."""
        sizes = cfg.deltanet
        before = batch, sizes.linear_conv_kernel_dim - 1
        keys = 2, sizes.linear_num_key_heads, sizes.linear_key_head_dim
        values = sizes.linear_num_value_heads, sizes.linear_value_head_dim
        of_keys = CacheSpec((*before, *keys), ("batch", None, None, "heads", None))
        of_values = CacheSpec((*before, *values), ("batch", None, "heads", None))
        state = batch, *values, sizes.linear_key_head_dim
        return RecurrentCache.spec((of_keys, of_values), state)


def _names(*names: str) -> tuple[str, ...]:
    """Hugging Face's names of parameters."""
    return tuple(f"linear_attn.{name}" for name in names)


@from_arguments
def _gated(y: jax.Array, z: jax.Array) -> jax.Array:
    """y * silu(z), computed in fp32."""
    gate = jax.nn.silu(in_fp32(z))
    return (in_fp32(y) * gate).astype(z.dtype)


def _to_length(x: jax.Array, length: float) -> jax.Array:
    """Vectors along the last axis, made as long as `length`; in fp32."""

    @from_arguments
    def divided(x: jax.Array) -> jax.Array:
        wide = in_fp32(x)
        squares = jnp.sum(jnp.square(wide), -1, keepdims=True)
        factor = length * jax.lax.rsqrt(squares + _LENGTH_EPS)
        return (wide * factor).astype(x.dtype)

    return divided(x)
