"""Text from a decoder: prefill the cache with the prompt, then one token per step, all jitted.

Runs on whatever devices the parameters live on: the model is an ordinary function of global
arrays here, so XLA partitions it by the parameters' shardings. Sampling is greedy or by
temperature; the serving engine is a later piece.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema import ModelConfig
from mjax.errors import UserError
from mjax.models.context import Context, tokens_of
from mjax.models.params import Definition


def generate(
    definition: Definition,
    params: dict,
    cfg: ModelConfig,
    prompt: list[int],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "float32",
) -> list[int]:
    """The `new_tokens` ids that follow `prompt`; `temperature` 0 is greedy."""
    total = len(prompt) + new_tokens
    if not prompt or total > cfg.max_position_embeddings:
        raise UserError(
            f"generate: a prompt of {len(prompt)} and {new_tokens} new tokens do not fit "
            f"1..model.max_position_embeddings={cfg.max_position_embeddings}; shorten either"
        )
    run = _compiled(definition, cfg, new_tokens, temperature, jnp.dtype(dtype))
    ids = run(params, np.asarray([prompt], np.int32), jax.random.key(seed))
    return np.asarray(ids)[0].tolist()


def empty_cache(cfg: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> tuple:
    """Zeroed keys and values of all layers, each [L, B, T, K, H]."""
    shape = (cfg.num_hidden_layers, batch, length, cfg.num_key_value_heads, cfg.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def _compiled(definition: Definition, cfg: ModelConfig, new_tokens: int, temperature, dtype):
    ctx = Context(attention="xla")

    def forward(model, ids_BS, start, cache):
        columns = start + jnp.arange(ids_BS.shape[1], dtype=jnp.int32)
        info = tokens_of(ids_BS.shape, columns=columns)
        x, _, cache = model.hidden(ids_BS, info, ctx, cache)
        return model.logits(x[:, -1]), cache

    def pick(logits, key):
        if temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    @jax.jit
    def run(params, prompt, key):
        model = definition.bind(jax.tree.map(lambda p: p.astype(dtype), params))
        length = prompt.shape[1] + new_tokens
        cache = empty_cache(cfg, prompt.shape[0], length, dtype)
        logits, cache = forward(model, prompt, 0, cache)

        def body(carry, key):
            token, at, cache = carry
            logits, cache = forward(model, token[:, None], at, cache)
            return (pick(logits, key), at + 1, cache), token

        keys = jax.random.split(key, new_tokens)
        start = pick(logits, keys[0]), jnp.int32(prompt.shape[1]), cache
        (last, _, _), out = jax.lax.scan(body, start, keys[1:])
        return jnp.concatenate([out, last[None]]).T

    return run
