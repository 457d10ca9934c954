"""Rotary position embedding: plain, linear, Llama-3, YaRN, LongRoPE, on all or part of a head.

Channel pairs are (i, i + R/2) of the R rotary channels, Hugging Face's layout. Sources: RoFormer
(arXiv 2104.09864), Llama 3.1's `rope_scaling`, YaRN (arXiv 2309.00071), LongRoPE (arXiv
2402.13753).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema import ModelConfig, RopeScaling
from mjax.sharding.collectives import LOCAL, Parallel


def rotary_dim(cfg: ModelConfig) -> int:
    """Number of rotated channels of each head."""
    return int(cfg.head_dim * cfg.partial_rotary_factor)


def frequencies(cfg: ModelConfig, local: bool) -> tuple[np.ndarray, float]:
    """Inverse frequencies [R/2] and the factor on cos and sin. `local`: sliding-window blocks."""
    theta = cfg.rope_local_theta if local and cfg.rope_local_theta else cfg.rope_theta
    dim = rotary_dim(cfg)
    freq = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = cfg.rope_scaling
    if scaling is None or (local and cfg.rope_local_theta):
        return freq, 1.0
    if scaling.rope_type == "linear":
        return freq / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(freq, scaling), 1.0
    if scaling.rope_type == "longrope":
        return freq / np.asarray(scaling.short_factor), _longrope_factor(cfg, scaling)
    return _yarn(freq, scaling, theta, dim), _yarn_factor(scaling)


def _llama3(freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    wavelengths = s.original_max_position_embeddings * freq / (2 * np.pi)  # turns over the context
    low, high = s.low_freq_factor, s.high_freq_factor
    smooth = np.clip((wavelengths - low) / (high - low), 0, 1)
    return freq * (smooth + (1 - smooth) / s.factor)


def _yarn(freq: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    def channel(turns: float) -> float:  # the channel that turns this often over the context
        turn_length = s.original_max_position_embeddings / (2 * math.pi * turns)
        return dim * math.log(turn_length) / (2 * math.log(theta))

    low, high = channel(s.beta_fast), channel(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return freq / s.factor * ramp + freq * (1 - ramp)


def _yarn_factor(s: RopeScaling) -> float:
    def mscale(m: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * m * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)


def _longrope_factor(cfg: ModelConfig, s: RopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    factor = cfg.max_position_embeddings / s.original_max_position_embeddings
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(s.original_max_position_embeddings))


def rope_tables(
    cfg: ModelConfig, positions_BS: jax.Array, local: bool, parallel: Parallel = LOCAL
) -> tuple[jax.Array, jax.Array]:
    """fp32 (cos, sin), each [B, S, 1, R/2]. Under LongRoPE a sequence (of which `parallel` may hold
    a part) that goes beyond the original length turns by the long factors throughout."""
    freq, factor = frequencies(cfg, local)
    freq = jnp.asarray(freq, jnp.float32)
    scaling = cfg.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        last = parallel.pmax(positions_BS.max(-1), "cp")[:, None, None, None]
        ratio = np.asarray(scaling.short_factor) / np.asarray(scaling.long_factor)
        is_long = last >= scaling.original_max_position_embeddings
        freq = freq * jnp.where(is_long, jnp.asarray(ratio, jnp.float32), 1.0)
    angles = positions_BS[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


@jax.custom_vjp
def apply_rope(x_BSNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first R channels of each head; the arithmetic is fp32, the dtype is kept. The
    tables take no gradient."""
    return _rotate(x_BSNH, *tables)


def _rotate(x_BSNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    x = x_BSNH.astype(jnp.float32)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x_BSNH.dtype)


def _turn_back(tables: tuple[jax.Array, jax.Array], d_y: jax.Array) -> tuple[jax.Array, None]:
    """What JAX would make of slices and a concatenation, XLA runs at two fifths of the speed."""
    cos, sin = tables
    return _rotate(d_y, cos, -sin), None


apply_rope.defvjp(lambda x, tables: (_rotate(x, *tables), tables), _turn_back)
