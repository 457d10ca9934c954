"""Rotary frequencies for contexts that are longer than the one a model was trained on first.

Linear, Llama-3 (Llama 3.1's `rope_scaling`), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.model import ModelConfig, RopeScaling
from mjax.sharding.collectives import Parallel


class Frequencies(NamedTuple):
    """Rotation of the channel pairs: float64 radians per token [R/2]; the factor on cos and sin."""

    per_token: np.ndarray
    factor: float | np.ndarray


def scaled_frequencies(cfg: ModelConfig, freq: np.ndarray, theta: float) -> Frequencies:
    """The frequencies that `model.rope.rope_scaling` makes of plain ones, float64 [R/2]."""
    scaling = cfg.rope.rope_scaling
    if scaling.rope_type == "linear":
        return Frequencies(freq / scaling.factor, 1.0)
    if scaling.rope_type == "llama3":
        return Frequencies(_llama3(freq, scaling), 1.0)
    if scaling.rope_type == "longrope":
        freq = freq / np.asarray(scaling.short_factor)
        return Frequencies(freq, _longrope_factor(cfg, scaling))
    freq = _yarn(freq, scaling, theta, 2 * len(freq))
    return Frequencies(freq, _yarn_factor(scaling))


def _llama3(freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    context = scaling.original_max_position_embeddings
    turns = context * freq / (2 * np.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return freq * (smooth + (1 - smooth) / scaling.factor)


def _yarn(freq: np.ndarray, scaling: RopeScaling, theta: float, dim: int) -> np.ndarray:
    context = scaling.original_max_position_embeddings

    def channel(turns: float) -> float:
        """The channel that turns this often over the original context."""
        tokens_per_radian = context / (2 * math.pi * turns)
        return dim * math.log(tokens_per_radian) / (2 * math.log(theta))

    low = channel(scaling.beta_fast)
    high = channel(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    distance = np.arange(dim // 2) - low
    ramp = np.clip(distance / max(high - low, 1e-3), 0, 1)
    return freq / scaling.factor * ramp + freq * (1 - ramp)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling, scaling.mscale) / _mscale(scaling, scaling.mscale_all_dim)
    return _mscale(scaling, 1.0)


def _mscale(scaling: RopeScaling, m: float) -> float:
    """YaRN's temperature, for the weight `m` of the logarithm."""
    if scaling.factor <= 1:
        return 1.0
    return 0.1 * m * math.log(scaling.factor) + 1.0


def mla_scale(cfg: ModelConfig) -> float:
    """The factor on the products of queries and keys in latent attention.

    DeepSeek's models scale cos and sin by mscale / mscale_all_dim only, and all products, those of
    channels without RoPE too, by the square of mscale_all_dim's temperature.
    """
    scale = cfg.mla.qk_head_dim**-0.5
    scaling = cfg.rope.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return scale
    return scale * _mscale(scaling, scaling.mscale_all_dim) ** 2


def _longrope_factor(cfg: ModelConfig, scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    context = scaling.original_max_position_embeddings
    factor = cfg.max_position_embeddings / context
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(context))


def longrope(
    freq: jax.Array, scaling: RopeScaling, positions_BS: jax.Array, parallel: Parallel
) -> jax.Array:
    """LongRoPE's frequencies of each row, fp32 [B, 1, 1, R/2], of those for short sequences.

    A sequence longer than the original context turns by the long factors throughout. `parallel`
    says over which devices its tokens may be split.
    """
    last = parallel.pmax(positions_BS.max(-1), "cp")
    is_long = last >= scaling.original_max_position_embeddings
    ratio = np.asarray(scaling.short_factor) / np.asarray(scaling.long_factor)
    ratio = jnp.asarray(ratio, jnp.float32)
    return freq * jnp.where(is_long[:, None, None, None], ratio, 1.0)
