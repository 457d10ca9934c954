"""Guesses by a model's own layers of multi-token prediction, within the step that they follow.

Depth k reads at place i the output of the depth before, first the model's, and the embedding of
token i + k (`models/heads/multi_token.py`). It has a cache of its own. So a step runs each depth at
all of its places, and the output at a row's last place is a guess. The last depth gives further
ones: it goes on from place to place with its own outputs and guesses, as in vLLM. A guess is drawn
with the noise of its place, so an equal distribution gives an equal token.

Invariant: the first depth's caches hold what the text before says, but for the last place of a page
that was shared: its entry knows the token that followed in the other text. An entry of a deeper
depth, made with a guess that was wrong, stays. Both may cost guesses and never change a text.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.infer.drafting.repeated_texts import TextInWork
from mjax.models.base.branch import LayerCache
from mjax.models.base.context import Context, Tokens


class PredictedTokens:
    """Guesses that the last step of each row has made already."""

    def propose(self, samples: Sequence[TextInWork], most: int) -> list[list[int]]:
        return [sample.guesses[:most] for sample in samples]


class StepActivations(NamedTuple):
    """The model's output for a step's tokens, x [lanes * T, D], and these tokens, `ids`.

    ids: int32 [lanes * R, each] of decoding, [lanes, T] of prefill.
    """

    x: jax.Array
    ids: jax.Array


class RowEnds(NamedTuple):
    """The ends of a step's rows, [R] each.

    last: int32, the flat place of a row's last token that stays. position: its position.
    is_row: whether there is a row. draws: whether it draws the token after that, `drawn` int32.
    following: int32 [R, depths], the tokens after it, of rows that draw none.
    """

    last: jax.Array
    position: jax.Array
    is_row: jax.Array
    draws: jax.Array
    drawn: jax.Array
    following: jax.Array


class Guesser(NamedTuple):
    """All that guesses are made with besides a step's tokens.

    bind: gives the model for tokens. draw: f(x [R, D], n), the n-th token after those that are
    drawn. at: facts about one token of each row at positions int32 [R], -1: there is none.
    """

    bind: Callable[[Tokens], nnx.Module]
    ctx: Context
    draw: Callable[[jax.Array, int], jax.Array]
    at: Callable[[jax.Array], Tokens]

    def guess(
        self,
        x: jax.Array,
        ids: jax.Array,
        info: Tokens,
        ends: RowEnds,
        caches: Sequence[LayerCache],
        count: int,
    ) -> tuple[jax.Array, list[LayerCache]]:
        """(`count` tokens after the drawn one, int32 [R, count]; the new caches, one a depth).

        x [T, D]: the model's output for the step's tokens `ids` [B, S], which `info` is about.
        """
        found, new_caches, model = [], [], self.bind(info)
        ahead, x, token = ids, x.reshape(*ids.shape, -1), ends.drawn
        for depth, cache in enumerate(caches, 1):
            after = jnp.where(ends.draws, token, ends.following[:, depth - 1])
            ahead = _moved_on(ahead, after, ends)
            x, _, cache = model.predict(depth, x, ahead, info, self.ctx, cache)
            of_last = x.reshape(-1, x.shape[-1])[ends.last]
            token = self.draw(of_last, depth)
            found.append(token)
            new_caches.append(cache)
        depths = len(caches)
        for number in range(depths + 1, count + 1):
            info = self.at(jnp.where(ends.draws, ends.position + number - depths, -1))
            given = of_last[:, None], token[:, None], info, self.ctx, new_caches[-1]
            y, _, new_caches[-1] = self.bind(info).predict(depths, *given)
            of_last = y[:, 0]
            token = self.draw(of_last, number)
            found.append(token)
        return jnp.stack(found, 1), new_caches


def _moved_on(ids: jax.Array, after: jax.Array, ends: RowEnds) -> jax.Array:
    """The token after each of ids [B, S], which at the ends of rows is `after` [R]."""
    where = jnp.where(ends.is_row, ends.last, ids.size)
    ahead = jnp.roll(ids.reshape(-1), -1).at[where].set(after, mode="drop")
    return ahead.reshape(ids.shape)
