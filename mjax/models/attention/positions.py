"""Rotary position embedding (RoFormer, arXiv 2104.09864) on all or part of a head.

Channel pairs are (i, i + R/2) of the R rotary channels, Hugging Face's layout. Learned positions,
like words, are rows of a table, which `look_up` reads.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.languages.layer_pattern import BRANCHES, branches_of, stream_of
from mjax.config.schema.model import ModelConfig
from mjax.models.attention.rope_scaling import Frequencies, longrope, scaled_frequencies
from mjax.models.base.branch import Rope
from mjax.models.base.context import Tokens
from mjax.sharding.collectives import LOCAL, Parallel

_TOWER_THETA = 10000.0  # of towers with rotary positions


def frequencies(cfg: ModelConfig, word: str) -> Frequencies:
    """The frequencies of a kind of branch."""
    if BRANCHES[word].modality:  # half of the channel pairs turn by rows, half by columns
        channels = np.arange(0, cfg.rotary_dim(word) // 2, 2, dtype=np.float64)
        of_axis = _TOWER_THETA ** (-2 * channels / cfg.rotary_dim(word))
        return Frequencies(np.tile(of_axis, 2), 1.0)
    has_local_theta = BRANCHES[word].windowed and bool(cfg.rope.rope_local_theta)
    theta = cfg.rope.rope_local_theta if has_local_theta else cfg.rope.rope_theta
    dim = cfg.rotary_dim(word)
    channels = np.arange(0, dim, 2, dtype=np.float64)
    freq = theta ** (-channels / dim)
    if cfg.rope.rope_scaling is None or has_local_theta:
        found = Frequencies(freq, 1.0)
    else:
        found = scaled_frequencies(cfg, freq, theta)
    if not cfg.rope.rope_interleave or BRANCHES[word].rotary != "attention.head_dim":
        return found
    # Pairs of the whole head are put apart; those without RoPE stay as they are.
    still = cfg.attention.head_dim // 2 - len(freq)
    factor = np.full(len(freq), found.factor)
    factor = np.append(factor, np.ones(still))
    per_token = np.append(found.per_token, np.zeros(still))
    return Frequencies(per_token, factor)


def axis_of_pairs(cfg: ModelConfig, word: str) -> np.ndarray:
    """The axis of positions [B, S, A] that each channel pair of a branch turns by, int [R/2]."""
    pairs = cfg.rotary_dim(word) // 2
    if BRANCHES[word].modality:
        return np.arange(pairs) // (pairs // 2)
    sections = cfg.rope.mrope_section
    if not cfg.rope.mrope_interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    found = np.zeros(pairs, int)
    for axis in range(1, len(sections)):
        found[axis : 3 * sections[axis] : 3] = axis
    return found


def warmed(q: jax.Array, tokens: Tokens, cfg: ModelConfig) -> jax.Array:
    """Queries [B, S, N, H] times a temperature that grows with their position (Llama 4's)."""
    scaling = cfg.rope.rope_scaling
    if scaling is None or scaling.llama_4_scaling_beta is None:
        return q
    context = scaling.original_max_position_embeddings
    passed = jnp.log1p(tokens.positions // context)
    factor = 1 + scaling.llama_4_scaling_beta * passed
    factor = factor[..., None, None]
    return q * factor.astype(q.dtype)


def pairs_apart(x: jax.Array) -> jax.Array:
    """Channels [..., R] whose pairs lie at (2i, 2i + 1) -> with pairs at (i, i + R/2).

    Queries and keys that are both reordered have the products that they had.
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return pairs.swapaxes(-1, -2).reshape(x.shape)


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
                positions = own.positions if own.axes is None else own.axes
                tables[word] = rope_tables(cfg, positions, word, parallel)
    return tables


def rope_tables(
    cfg: ModelConfig, positions_BS: jax.Array, word: str, parallel: Parallel = LOCAL
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of a kind of branch, fp32 [B, S, 1, R/2], of int32 positions [B, S].

    Positions of several axes are [B, S, A] (`Tokens.axes`). `parallel` says over which devices a
    sequence's tokens may be split.
    """
    freq, factor = frequencies(cfg, word)
    freq = jnp.asarray(freq, jnp.float32)
    scaling = cfg.rope.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        freq = longrope(freq, scaling, positions_BS, parallel)
    if positions_BS.ndim == 2:
        positions_BS = positions_BS[..., None]
    else:
        positions_BS = positions_BS[..., axis_of_pairs(cfg, word)]
    positions = positions_BS[..., None, :].astype(jnp.float32)
    angles = positions * (-freq if cfg.rope.rope_reversed else freq)
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


def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """table[rows]. The gradient of a row is a sum in fp32: many tokens are one word.

    GPUs add bf16 to one place by trying again and again: BERT's mask tokens took 60 of 199 ms, the
    positions of CLIP's patches 1 of 145.
    """
    wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    return jnp.take(wide, rows, axis=0).astype(table.dtype)
