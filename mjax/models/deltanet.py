"""Gated DeltaNet (arXiv 2412.06464), as Qwen3-Next has it: attention that is linear in the length.

The input becomes q, k, v and a gate z, and for each head of values b and a. A causal convolution
and SiLU go over q, k and v; q and k are then divided by their lengths. The gated delta rule
(`kernels/gated_delta.py`) runs with beta = sigmoid(b) and decays exp(-exp(A_log) softplus(a +
dt_bias)). Its output is normed in each head, multiplied by silu(z), and projected back. A head of
keys serves R consecutive heads of values. tp splits both together. cp passes states, and the
transition matrices of pieces (`recurrent_context.py`). Letters: G heads of keys, R heads of values
of each, H = G R, N channels of a key, P of a value, K taps.

Initial values are those of Megatron-LM and transformers: A uniform in [1, 16], dt_bias one, weights
of the convolution uniform within K ** -0.5.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.model_schema import DeltaNetConfig, ModelConfig
from mjax.kernels.causal_conv import causal_conv
from mjax.kernels.gated_delta import DeltaInputs, gated_delta, gated_delta_final, gated_delta_step
from mjax.models.branch import BranchInputs, BranchOutput, CacheSpec
from mjax.models.linear import column, row
from mjax.models.params import constant, declare, normal
from mjax.models.recurrent_mixer import RecurrentCache, RecurrentMixer, in_fp32, initial_decays
from mjax.models.weight import weight_of
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
        heads, values = sizes.linear_num_value_heads, sizes.linear_value_head_dim
        of_keys = sizes.linear_num_key_heads, sizes.linear_key_head_dim
        init = normal(cfg.initializer_range)
        projected = 2 * sizes.linear_key_head_dim + 2 * sizes.heads_a_key * values
        inner = self._projection("delta_in", projected, "qkvz")
        ba = self._projection("delta_ba", 2 * sizes.heads_a_key, "ba")
        self.inner = declare(rngs, inner, init)
        self.ba = declare(rngs, ba, init)
        axes = "heads", "head_dim"
        names = "linear_attn.q_conv.weight", "linear_attn.k_conv.weight"
        self._declare_conv(rngs, "qk_conv", (2, *of_keys), ("pair", *axes), *names)
        name = "linear_attn.v_conv.weight"
        self._declare_conv(rngs, "v_conv", (heads, values), axes, name)
        self._declare_precise(rngs, "A_log", heads, initial_decays, "linear_attn.A_log")
        self._declare_precise(rngs, "dt_bias", heads, constant(1.0), "linear_attn.dt_bias")
        gain = ParamSpec((values,), ("head_dim",), "norm", hf=("linear_attn.norm.weight",))
        self.norm = declare(rngs, gain, constant(1.0))
        out = ParamSpec(
            shape=(heads, values, cfg.hidden_size),
            axes=(*axes, "embed"),
            role="matrix",
            inputs=2,
            matmul="delta_proj",
            hf=("linear_attn.out_proj.weight",),
        )
        self.out = declare(rngs, out, normal(out_std))

    def _projection(self, matmul: str, width: int, letters: str) -> ParamSpec:
        """A projection of the input to `width` channels for each head of keys."""
        return ParamSpec(
            shape=(self.cfg.hidden_size, self.cfg.deltanet.linear_num_key_heads, width),
            axes=("embed", "heads", "head_dim"),
            role="matrix",
            matmul=matmul,
            hf=(f"linear_attn.in_proj_{letters}.weight",),
        )

    @jax.named_scope("deltanet")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: RecurrentCache | None = None
    ) -> BranchOutput:
        ctx, sizes = inputs.ctx, self.cfg.deltanet
        qkvz, ba = column(x, (weight_of(self.inner), weight_of(self.ba)), ctx)
        keys = 2 * sizes.linear_key_head_dim
        values = sizes.heads_a_key * sizes.linear_value_head_dim
        qk, v, z = jnp.split(qkvz, [keys, keys + values], axis=-1)
        qk = qk.reshape(*qk.shape[:-1], 2, -1).swapaxes(2, 3)
        v, z = (_by_value_head(each, sizes) for each in (v, z))
        _, y, cache = self._mix((qk, v), self._rates(ba), inputs, cache)
        y = self._gated_norm(y, z)
        return BranchOutput(row(y, weight_of(self.out), ctx), cache=cache)

    def _rates(self, ba: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the logarithm of the decay, beta), fp32 [B, S, H], of b and a [B, S, G, 2 R]."""
        heads = *ba.shape[:2], -1
        b, a = (v.reshape(heads) for v in jnp.split(in_fp32(ba), 2, axis=-1))
        decay = -jnp.exp(in_fp32(self.A_log[...]))
        steps = jax.nn.softplus(a + in_fp32(self.dt_bias[...]))
        return decay * steps, jax.nn.sigmoid(b)

    def _convolve(self, parts, rates, starts, histories, parallel) -> DeltaInputs:
        """What the rule reads of q and k [B, S, 2, G, N] and v [B, S, H, P]."""
        weights = self.qk_conv[...], self.v_conv[...]
        qk, v = (
            causal_conv(part, weight, starts=starts, history=history)
            for part, weight, history in zip(parts, weights, histories, strict=True)
        )
        q, k = _of_length_one(qk[:, :, 0], qk.shape[-1] ** -0.5), _of_length_one(qk[:, :, 1])
        return DeltaInputs(q, k, v, *rates)

    def _scan(self, read: DeltaInputs, starts, initial) -> tuple[jax.Array, jax.Array]:
        chunk = self.cfg.deltanet.chunk_size
        return gated_delta(read, chunk=chunk, starts=starts, initial=initial)

    def _summary(self, read: DeltaInputs, starts) -> tuple[jax.Array, jax.Array]:
        return gated_delta_final(read, self.cfg.deltanet.chunk_size, starts)

    def _step(self, read: DeltaInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = DeltaInputs(*(v[:, 0] for v in read))
        state, y = gated_delta_step(state, token)
        return y[:, None], state

    def _gated_norm(self, y: jax.Array, z: jax.Array) -> jax.Array:
        """RMSNorm over each head of y, times silu(z); its backward keeps y and z."""

        @jax.checkpoint
        def gated(y: jax.Array, z: jax.Array, gain: jax.Array) -> jax.Array:
            h = in_fp32(y)
            mean = jnp.mean(jnp.square(h), -1, keepdims=True)
            h = h * jax.lax.rsqrt(mean + self.cfg.norm_eps) * in_fp32(gain)
            return (h * jax.nn.silu(in_fp32(z))).astype(z.dtype)

        return gated(y, z, self.norm[...])

    @staticmethod
    def flops(cfg: ModelConfig, letter: str, seq_length: int) -> float:
        """24 * H * N * P, Megatron-LM's count: k k^T, v k^T, the decay of S and S q take 8 of the
        recurrence, and backward twice that.

        The form in chunks computes more, and its convolution and norm are not counted.
        """
        return 24.0 * cfg.deltanet.channels * cfg.deltanet.linear_key_head_dim

    @staticmethod
    def cache(cfg: ModelConfig, batch: int, length: int, tp: int = 1) -> RecurrentCache:
        """It does not grow with `length`."""
        sizes = cfg.deltanet
        before = batch, sizes.linear_conv_kernel_dim - 1
        keys = 2, sizes.linear_num_key_heads, sizes.linear_key_head_dim
        values = sizes.linear_num_value_heads, sizes.linear_value_head_dim
        state = batch, *values, sizes.linear_key_head_dim
        return RecurrentCache(
            histories=(
                CacheSpec((*before, *keys), (None, None, None, "heads", None)),
                CacheSpec((*before, *values), (None, None, "heads", None)),
            ),
            state=CacheSpec(state, (None, "heads", None, None), precise=True),
        )


def _by_value_head(x: jax.Array, sizes: DeltaNetConfig) -> jax.Array:
    """[B, S, G, R P] -> [B, S, H, P]."""
    return x.reshape(*x.shape[:2], -1, sizes.linear_value_head_dim)


@jax.checkpoint
def _of_length_one(x: jax.Array, scale: float = 1.0) -> jax.Array:
    """Vectors along the last axis divided by their lengths, times `scale`; in fp32."""
    wide = in_fp32(x)
    squares = jnp.sum(jnp.square(wide), -1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + _LENGTH_EPS) * scale).astype(x.dtype)
