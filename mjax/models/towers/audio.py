"""How sounds enter a model: Whisper's two convolutions over log-mel frames (arXiv 2212.04356).

The first is over three frames, the second over three of its outputs at every second frame. So a
token depends on five frames, and is a function of these numbers alone: both convolutions are
products of what a row holds for a token, and tokens are cut over the mesh as those of texts are. A
third of the first products is computed twice. The module belongs to the edges of the model.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.models.attention.positions import look_up
from mjax.models.base.context import Context, Tokens
from mjax.models.base.params import declare, declare_bias, normal
from mjax.sharding.spec import ParamSpec


class FrameEmbedding(nnx.Module):
    """[B, S, 5*M] frames of tokens -> [B, S/tp, D], positions added.

    `cfg` has the sizes of the tower. `first` is [M, 3, D], `second` [D, 3, D]. `positions` begin
    as sinusoids.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        width, audio = cfg.hidden_size, cfg.audio
        init = normal(cfg.initializer_range)
        first = ParamSpec(
            shape=(audio.num_mel_bins, 3, width),
            axes=("patch", "patch", "embed"),
            role="matrix",
            inputs=2,
            active=2.0,  # a token has two frames
            hf=("model.embed_frames.conv1.weight",),
        )
        second = replace(
            first,
            shape=(width, 3, width),
            active=1.0,
            hf=("model.embed_frames.conv2.weight",),
        )
        self.first = declare(rngs, first, init)
        self.first_bias = declare_bias(rngs, (width,), ("embed",), "model.embed_frames.conv1.bias")
        self.second = declare(rngs, second, init)
        self.second_bias = declare_bias(rngs, (width,), ("embed",), "model.embed_frames.conv2.bias")
        positions = ParamSpec(
            shape=(audio.max_source_positions, width),
            axes=("positions", "embed"),
            role="embedding",
            hf=("model.embed_sound_positions.weight",),
        )
        self.positions = declare(rngs, positions, sinusoids)

    @jax.named_scope("frames")
    def __call__(self, frames: jax.Array, tokens: Tokens, ctx: Context, grid: int) -> jax.Array:
        """`grid`: the tokens of a sound, which have the first positions."""
        parallel = ctx.parallel
        first, second = self.first[...], self.second[...]
        frames = parallel.shard_seq(frames).astype(first.dtype)
        positions = parallel.shard_seq(tokens.positions)
        frames = frames.reshape(*frames.shape[:2], 5, -1)
        x = self.second_bias[...]
        for tap in range(3):
            behind = tap + 3
            window = frames[:, :, tap:behind]
            h = jnp.einsum("bstm,mtd->bsd", window, first)
            h = jax.nn.gelu(h + self.first_bias[...], approximate=False)
            if tap == 0:  # before the first frame is padding, which is zero
                h = jnp.where(positions[..., None] == 0, 0, h)
            x = x + h @ second[:, tap]
        x = jax.nn.gelu(x, approximate=False)
        table = self.positions[:grid]
        assert len(table) == grid, "more frames than model.audio.max_source_positions * 2"
        return x + look_up(table, positions)


def sinusoids(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Whisper's positions [T, D]: sines, then cosines, of wavelengths from 2 pi to 20,000 pi."""
    length, width = shape
    half = width // 2
    exponents = jnp.arange(half) / max(half - 1, 1)
    angles = jnp.outer(jnp.arange(length), 1e4**-exponents)
    parts = [jnp.sin(angles), jnp.cos(angles)]
    return jnp.concatenate(parts, axis=1).astype(dtype)


def rows_of_frames(mels: np.ndarray | jax.Array, length: int) -> np.ndarray | jax.Array:
    """Log-mel frames [B, F, M] -> rows [B, length, 5*M]: the frames of each token, then padding.

    Token t has the frames 2t - 2 to 2t + 2; those outside are zero.
    """
    xp = np if isinstance(mels, np.ndarray) else jnp
    batch, frames, bins = mels.shape
    count = frames // 2
    none = (0, 0)
    padded = xp.pad(mels, (none, (2, 1), none))
    starts = 2 * np.arange(count)
    places = np.add.outer(starts, np.arange(5))
    rows = padded[:, places].reshape(batch, count, 5 * bins)
    padding = (0, length - count)
    return xp.pad(rows, (none, padding, none))
