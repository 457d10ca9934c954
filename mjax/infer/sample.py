"""From logits to a token: rules, penalties, temperature, top-k, top-p, min-p, one draw a row.

Pure and jittable. Every row has settings and noise of its own (`sampling/noise.py`), so its token
does not depend on its neighbors. A program leaves out steps that no row of a batch needs (`Draws`,
parts of `DrawRows` that are None).

Order: bias, penalties (repetition as in arXiv 1909.05858, frequency, presence), forbidden tokens,
temperature, top-k, top-p (arXiv 1904.09751), min-p (arXiv 2407.01082). Each works on what the one
before has left. It is the order of Hugging Face; vLLM applies min-p before top-k and top-p, which
differs only where top-p and min-p are both set.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from mjax.errors import UserError
from mjax.infer.sampling.limits import Settings, likeliest, within_limits
from mjax.infer.sampling.noise import noise
from mjax.kernels.loss.logits import below_largest, log_prob_of
from mjax.models.runtime.token_blocks import each_in_blocks

# The least number above 0 that fp32 computes with, and the largest: beyond them lie 0 and infinity.
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

_LOGITS = 2**26  # fp32 numbers that scores of prompts make at a time


@dataclass(frozen=True)
class Sampling:
    """How one row draws its tokens; the defaults are greedy and switch every limit off.

    temperature 0: the likeliest token, whatever the limits; top_k 0: all tokens; top_p: the fewest
    tokens that reach this probability; min_p: tokens of at least this fraction of the likeliest
    one's; repetition_penalty > 1 makes tokens of the prompt and the text so far less likely.
    presence_penalty is taken from logits of tokens of the text so far, frequency_penalty as often
    as each is in it; the prompt does not count.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        legal = {
            "temperature": (0 <= self.temperature < float("inf"), ">= 0"),
            "top_k": (0 <= self.top_k < 2**31 and self.top_k % 1 == 0, "an integer in [0, 2^31)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "> 0"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
        }
        for name, (fine, rule) in legal.items():
            if not fine:
                raise UserError(f"sampling: {name}={getattr(self, name)}; it must be {rule}")

    @property
    def penalizes(self) -> bool:
        """Whether its logits depend on the tokens before."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)


def settings_of(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Settings of a batch: one array [R] a field."""
    columns = zip(*map(astuple, rows), strict=True)
    kinds = {"top_k": np.int32}
    named = zip(fields(Sampling), columns, strict=True)
    return {f.name: np.asarray(c, kinds.get(f.name, np.float32)) for f, c in named}


@dataclass(frozen=True)
class Draws:
    """Computations that some row of a batch needs to choose its token; static.

    random: a draw, at a temperature above 0.
    limited: top-k, top-p or min-p before its draw.
    penalties: of tokens before; `DrawRows.counts` are given.
    top: so many of the likeliest tokens are wanted, with their log-probabilities.
    in_blocks: log-probabilities are of blocks of rows (`models/runtime/token_blocks.py`).

    The host knows all but how large a nucleus is. It decides a branch, which the device takes by
    itself within a CUDA graph. XLA has no loops in graphs by default: its host would wait for the
    predicate of one, and launch each step after the end of the one before.
    """

    random: bool = False
    limited: bool = False
    penalties: bool = False
    top: int = 0
    in_blocks: bool = False

    def covers(self, other: "Draws") -> bool:
        """Whether these computations include all of `other`."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine >= theirs for mine, theirs in pairs)


def draws_of(rows: Sequence[Sampling], top: int = 0) -> Draws:
    """The computations that the rows of a batch need."""
    hot = [row for row in rows if row.temperature > 0]
    limits = [row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in hot]
    return Draws(bool(hot), any(limits), any(row.penalizes for row in rows), top)


@register_dataclass
@dataclass(frozen=True)
class RowRules:
    """Tokens that rows favor or forbid; a part that no row needs is None.

    bias_ids, bias_values: int32 and fp32 [R, B], added to the logits of these tokens; id -1: none.
    allowed: uint32 [R, W], bit i of word w allows token 32 w + i; tokens beyond are forbidden.
    banned: int32 [R, E], forbidden tokens; -1: none.
    """

    bias_ids: jax.Array | np.ndarray | None = None
    bias_values: jax.Array | np.ndarray | None = None
    allowed: jax.Array | np.ndarray | None = None
    banned: jax.Array | np.ndarray | None = None


@register_dataclass
@dataclass(frozen=True)
class TokenCounts:
    """Tokens of rows so far, which penalties read.

    prompt: bool [R, V], whether a token is in the prompt.
    outputs: int32 [R, V], how often a token follows the prompt.
    """

    prompt: jax.Array
    outputs: jax.Array


@register_dataclass
@dataclass(frozen=True)
class DrawRows:
    """All that decides the tokens of rows besides their logits.

    settings: the fields of `Sampling`, each [R].
    seed, index, position: uint32, int32, int32 [R], the arguments of `noise`.
    counts: None if `Draws.penalties` is false.
    """

    settings: Settings
    seed: jax.Array
    index: jax.Array
    position: jax.Array
    counts: TokenCounts | None = None
    rules: RowRules = RowRules()


@register_dataclass
@dataclass(frozen=True)
class Drawn:
    """A token of each row.

    token: int32 [R].
    logprob: fp32 [R], the model's own: that of scoring the finished text.
    processed: fp32 [R], under the distribution that the token was drawn from. At temperature 0 it
    is that of temperature 1 without limits, after rules and penalties.
    top_ids, top_logprobs: int32 and fp32 [R, `Draws.top`], the likeliest tokens of the model, the
    likeliest first; None if none are wanted.
    """

    token: jax.Array
    logprob: jax.Array
    processed: jax.Array
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


class Scored(NamedTuple):
    """Log-probabilities of given tokens, and of the likeliest ones; fields as in `Drawn`."""

    logprob: jax.Array
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def draw_tokens(logits: jax.Array, rows: DrawRows, draws: Draws) -> Drawn:
    """A token of each row of logits fp32 [R, V]; `draws` covers what `rows` ask for."""
    z = biased(logits, rows.rules)
    if draws.penalties:
        z = penalized(z, rows.counts, rows.settings)
    z = forbidden(z, rows.rules)
    token = jnp.argmax(z, -1).astype(jnp.int32)
    left = below_largest(z)
    if draws.random:
        hot = rows.settings["temperature"] > 0
        # At the least temperature differences to the likeliest become 0 or minus infinity.
        divisor = jnp.maximum(rows.settings["temperature"], _LEAST)
        temperature = jnp.where(hot, divisor, 1.0)[:, None]
        left = left / temperature
        if draws.limited:
            # A greedy row keeps one token, so it never makes the device search all logits.
            top_k = jnp.where(hot, rows.settings["top_k"], 1)
            stays = within_limits(z, temperature, rows.settings | {"top_k": top_k})
            left = jnp.where(stays | ~hot[:, None], left, -jnp.inf)
        gumbel = noise(rows.seed, rows.index, rows.position, z.shape[-1])
        token = jnp.where(hot, jnp.argmax(left + gumbel, -1).astype(jnp.int32), token)
    own = scored(logits, token, draws.top)
    found = own.logprob, log_prob_of(left, token)
    if draws.in_blocks:
        differences = below_largest(logits), left
        found = tuple(each_in_blocks(log_prob_of, each, token) for each in differences)
    return Drawn(token, *found, own.top_ids, own.top_logprobs)


def scored(logits: jax.Array, token: jax.Array, top: int) -> Scored:
    """Log-probabilities of tokens int32 [R] and of the `top` likeliest by logits fp32 [R, V]."""
    own = below_largest(logits)
    found = Scored(log_prob_of(own, token))
    if not top:
        return found
    _, ids = likeliest(logits, top)
    return found._replace(top_ids=ids, top_logprobs=jax.vmap(log_prob_of, (None, 1), 1)(own, ids))


def scored_in_parts(
    x: jax.Array,
    labels: jax.Array,
    top: int,
    logits: Callable[[jax.Array], jax.Array],
    vocabulary: int,
) -> Scored:
    """How likely labels [T] are after x [T, D]; logits exist for a part of them at a time."""
    tokens, width = x.shape
    most = max(_LOGITS // vocabulary, 1)
    size = math.gcd(tokens, 1 << (most.bit_length() - 1))

    def of_part(part: tuple[jax.Array, jax.Array]) -> Scored:
        x, labels = part
        return scored(logits(x), labels, top)

    x = x.reshape(-1, size, width)
    labels = labels.reshape(-1, size)
    found = jax.lax.map(of_part, (x, labels))
    return jax.tree.map(jnp.concatenate, found)


def biased(logits: jax.Array, rules: RowRules) -> jax.Array:
    """Logits [R, V] with the bias of their rows."""
    if rules.bias_ids is None:
        return logits
    return logits.at[_token_places(rules.bias_ids, logits)].add(rules.bias_values, mode="drop")


def forbidden(logits: jax.Array, rules: RowRules) -> jax.Array:
    """Logits [R, V], those of forbidden tokens at minus infinity."""
    if rules.allowed is not None:
        logits = jnp.where(_flags(rules.allowed, logits.shape[-1]), logits, -jnp.inf)
    if rules.banned is not None:
        logits = logits.at[_token_places(rules.banned, logits)].set(-jnp.inf, mode="drop")
    return logits


def _flags(words: jax.Array, size: int) -> jax.Array:
    """The first `size` bits of each row of words uint32 [R, W], bool; false beyond the words."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    bits = bits.reshape(len(words), -1)[:, :size]
    return jnp.pad(bits, ((0, 0), (0, size - bits.shape[1]))) == 1


def _token_places(ids: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places of tokens [R, E] in logits; those of -1 are beyond them."""
    return jnp.arange(len(ids))[:, None], jnp.where(ids < 0, logits.shape[-1], ids)


def penalized(logits: jax.Array, counts: TokenCounts, settings: Settings) -> jax.Array:
    """Logits [R, V] less the penalties of tokens that were before.

    The repetition penalty moves a logit towards minus infinity: it divides what is positive and
    multiplies what is negative.
    """
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    repetition, presence, frequency = (settings[name][:, None] for name in names)
    factor = jnp.maximum(repetition, _LEAST)
    changed = jnp.where(logits < 0, logits * factor, logits / factor)
    is_output = counts.outputs > 0
    logits = jnp.where(counts.prompt | is_output, jnp.clip(changed, -_LARGEST, _LARGEST), logits)
    return logits - presence * is_output - frequency * counts.outputs


def kept_drafts(drafts: jax.Array, tokens: jax.Array) -> jax.Array:
    """How many drafts int32 [R, k] of each row stay, int32 [R].

    tokens: int32 [R, k + 1], drawn in the places of the drafts and after them, each as if all
    drafts before were the text. A draft stays if the token drawn there is equal and all before it
    stay. With `noise` the row is the one that no drafts give: the kept drafts and the next token.
    """
    return jnp.cumprod(drafts == tokens[:, :-1], axis=1, dtype=jnp.int32).sum(1)
