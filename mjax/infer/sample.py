"""From logits to a token: penalty, temperature, top-k, top-p, min-p, one draw per row.

Pure and jittable; every row has settings and a key of its own, so a row's token does not depend on
its neighbors. A program leaves out steps that no row of a batch needs (`Draws`). Order and rules
are Hugging Face's: repetition penalty (arXiv 1909.05858), temperature, top-k, top-p (arXiv
1904.09751), min-p (arXiv 2407.01082), each over what the one before has left. Tokens of equal
logits are kept or dropped together.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from mjax.errors import UserError

# The least number above 0 that fp32 computes with, and the largest: beyond them lie 0 and infinity.
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

Settings = dict[str, jax.Array]  # the fields of `Sampling`, each [B]


@dataclass(frozen=True)
class Sampling:
    """How one row draws its tokens; the defaults are greedy and switch every limit off.

    temperature 0: the likeliest token, whatever the limits; top_k 0: all tokens; top_p: the fewest
    tokens that reach this probability; min_p: tokens of at least this fraction of the likeliest
    one's; repetition_penalty > 1 makes tokens of the prompt and the text so far less likely.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        legal = {
            "temperature": (0 <= self.temperature < float("inf"), ">= 0"),
            "top_k": (0 <= self.top_k < 2**31 and self.top_k % 1 == 0, "an integer in [0, 2^31)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "> 0"),
        }
        for name, (fine, rule) in legal.items():
            if not fine:
                raise UserError(f"sampling: {name}={getattr(self, name)}; it must be {rule}")


def settings_of(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Settings of a batch: one array [B] a field."""
    columns = zip(*map(astuple, rows), strict=True)
    kinds = {"top_k": np.int32}
    named = zip(fields(Sampling), columns, strict=True)
    return {f.name: np.asarray(c, kinds.get(f.name, np.float32)) for f, c in named}


@dataclass(frozen=True)
class Draws:
    """Computations that some row of a batch needs to choose its token; static.

    random: a draw, at a temperature above 0.
    limited: top-k, top-p or min-p before its draw.

    The device could find out by itself, but XLA's host waits for the predicate of a branch. Each
    step would be launched after the end of the one before, with the device idle meanwhile.
    """

    random: bool = False
    limited: bool = False


def draws_of(rows: Sequence[Sampling]) -> Draws:
    """The computations that the rows of a batch need."""
    hot = [row for row in rows if row.temperature > 0]
    limits = [row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in hot]
    return Draws(bool(hot), any(limits))


def sample(
    logits: jax.Array, keys: jax.Array, settings: Settings, seen: jax.Array, draws: Draws
) -> tuple[jax.Array, jax.Array]:
    """logits fp32 [B, V], keys [B], seen bool [B, V] -> tokens int32 [B], log-probs fp32 [B].

    `draws` covers what `settings` ask for (`draws_of`). A log-probability is the model's own,
    before penalty, temperature and limits: that of scoring the finished text.
    """
    z = penalised(logits, seen, settings["repetition_penalty"])
    token = jnp.argmax(z, -1).astype(jnp.int32)
    if draws.random:
        hot = settings["temperature"] > 0
        # Differences to the likeliest, which at the least temperature are 0 or minus infinity.
        divisor = jnp.maximum(jnp.where(hot, settings["temperature"], 1.0), _LEAST)
        left = (z - z.max(-1, keepdims=True)) / divisor[:, None]
        if draws.limited:
            left = limited(left, settings)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, z.shape[1:]))(keys)
        drawn = jnp.argmax(left + noise, -1).astype(jnp.int32)
        token = jnp.where(hot, drawn, token)
    chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, -1)


def penalised(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Logits [B, V] of seen tokens moved toward minus infinity: over penalty [B] where positive,
    times it where negative."""
    p = jnp.maximum(penalty, _LEAST)[:, None]
    changed = jnp.clip(jnp.where(logits < 0, logits * p, logits / p), -_LARGEST, _LARGEST)
    return jnp.where(seen, changed, logits)


def limited(z: jax.Array, settings: Settings) -> jax.Array:
    """Logits [B, V] with all tokens outside top-k, top-p and min-p at minus infinity.

    All three keep a head of the sorted row: one sort finds the least logit that stays.
    """
    top_k = settings["top_k"][:, None]
    top_p = settings["top_p"][:, None]
    min_p = settings["min_p"][:, None]
    falling = -jnp.sort(-z, axis=-1)
    size = falling.shape[-1]
    count = jnp.where(top_k > 0, top_k, size)
    last = jnp.clip(count, 1, size) - 1
    least = jnp.take_along_axis(falling, last, 1)
    probs = jax.nn.softmax(jnp.where(falling >= least, falling, -jnp.inf), -1)
    sums = jnp.cumsum(probs, -1)
    above = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))  # of likelier tokens
    in_top_p = (above < top_p) | (top_p >= 1)
    in_min_p = probs >= min_p * probs[:, :1]
    keep = in_top_p & (probs > 0) & in_min_p
    keep = keep.at[:, 0].set(True)
    threshold = jnp.where(keep, falling, jnp.inf).min(-1, keepdims=True)
    return jnp.where(z >= threshold, z, -jnp.inf)
