"""Rotary position embedding: plain, linear, Llama-3, YaRN, LongRoPE, on all or part of a head.

Channel pairs are (i, i + R/2) of the R rotary channels, Hugging Face's layout. DeepSeek's are
(2i, 2i + 1), which `pairs_apart` brings into that layout. Learned positions, like words, are rows
of a table, which `look_up` reads. Sources: RoFormer (arXiv 2104.09864),
Llama 3.1's `rope_scaling`, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.languages.layer_pattern import BRANCHES, branches_of, stream_of
from mjax.config.schema.model import ModelConfig, RopeScaling
from mjax.models.base.branch import Rope
from mjax.models.base.context import Tokens
from mjax.sharding.collectives import LOCAL, Parallel


class Frequencies(NamedTuple):
    """Rotation of the channel pairs: float64 radians per token [R/2]; the factor on cos and sin."""

    per_token: np.ndarray
    factor: float


def frequencies(cfg: ModelConfig, word: str) -> Frequencies:
    """The frequencies of a kind of branch."""
    has_local_theta = BRANCHES[word].windowed and bool(cfg.rope.rope_local_theta)
    theta = cfg.rope.rope_local_theta if has_local_theta else cfg.rope.rope_theta
    dim = cfg.rotary_dim(word)
    channels = np.arange(0, dim, 2, dtype=np.float64)
    freq = theta ** (-channels / dim)
    scaling = cfg.rope.rope_scaling
    if scaling is None or has_local_theta:
        return Frequencies(freq, 1.0)
    if scaling.rope_type == "linear":
        return Frequencies(freq / scaling.factor, 1.0)
    if scaling.rope_type == "llama3":
        return Frequencies(_llama3(freq, scaling), 1.0)
    if scaling.rope_type == "longrope":
        freq = freq / np.asarray(scaling.short_factor)
        return Frequencies(freq, _longrope_factor(cfg, scaling))
    freq = _yarn(freq, scaling, theta, dim)
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


def rope_of_layers(
    cfg: ModelConfig, kinds: Sequence[str], tokens: Tokens, parallel: Parallel = LOCAL
) -> Rope:
    """The tables (cos, sin) of each branch in layers of these kinds that has rotary positions."""
    if cfg.position_embedding != "rope":
        return {}
    tables: Rope = {}
    for kind in kinds:
        own = tokens.of(stream_of(kind)) if cfg.architecture.has_streams else tokens
        if own is None:  # its keys are in caches
            continue
        for word in branches_of(kind):
            if BRANCHES[word].rotary and word not in tables:
                tables[word] = rope_tables(cfg, own.positions, word, parallel)
    return tables


def rope_tables(
    cfg: ModelConfig, positions_BS: jax.Array, word: str, parallel: Parallel = LOCAL
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of a kind of branch, fp32 [B, S, 1, R/2], of int32 positions [B, S].

    Under LongRoPE a sequence longer than the original context turns by the long factors throughout.
    `parallel` says over which devices its tokens may be split.
    """
    freq, factor = frequencies(cfg, word)
    freq = jnp.asarray(freq, jnp.float32)
    scaling = cfg.rope.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        last = parallel.pmax(positions_BS.max(-1), "cp")
        is_long = last >= scaling.original_max_position_embeddings
        ratio = np.asarray(scaling.short_factor) / np.asarray(scaling.long_factor)
        ratio = jnp.asarray(ratio, jnp.float32)
        freq = freq * jnp.where(is_long[:, None, None, None], ratio, 1.0)
    positions = positions_BS[..., None, None].astype(jnp.float32)
    angles = positions * freq
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


@jax.custom_vjp
def apply_rope(x_BSNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """[B, S, N, H] with the first R channels of each head rotated, in x's dtype, computed in fp32.

    The tables take no gradient.
    """
    cos, sin = tables
    return _rotate(x_BSNH, cos, sin)


def _rotate(x_BSNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    x = x_BSNH.astype(jnp.float32)
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    rotated = jnp.concatenate([rotated_first, rotated_second, rest], -1)
    return rotated.astype(x_BSNH.dtype)


def _apply_rope_forward(x, tables):
    cos, sin = tables
    return _rotate(x, cos, sin), tables


def _apply_rope_backward(tables, dy):
    """A rotation back: autodiff's transpose of slices and a concatenation is 2.5 times slower."""
    cos, sin = tables
    return _rotate(dy, cos, -sin), None


apply_rope.defvjp(_apply_rope_forward, _apply_rope_backward)


def pairs_apart(x: jax.Array) -> jax.Array:
    """Channels [..., R] whose pairs lie at (2i, 2i + 1) -> with pairs at (i, i + R/2).

    Queries and keys that are both reordered have the products that they had.
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return pairs.swapaxes(-1, -2).reshape(x.shape)


def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """table[rows]. The gradient of a row is a sum in fp32: many tokens are one word.

    GPUs add bf16 to one place by trying again and again: BERT's mask tokens took 60 of 199 ms, the
    positions of CLIP's patches 1 of 145.
    """
    wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    return jnp.take(wide, rows, axis=0).astype(table.dtype)
