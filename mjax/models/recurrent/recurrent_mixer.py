"""Common parts of mixers with a state (`mamba.py`, `deltanet.py`): convolution, scan, cache.

Parts of the projected input go through a causal convolution, then a scan reads them with some rates
of each token (decays, steps). Over cp, states and the last tokens of pieces travel
(`recurrent_context.py`). In generation the cache holds the last tokens before the convolution, and
the state in fp32. Padding leaves it as it is. Letters: H heads, P channels of a head, N state, K
taps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.kernels.recurrence.causal_conv import last_tokens
from mjax.kernels.recurrence.token_step import StateSlots, states_in, with_states
from mjax.models.base.branch import BranchInputs, BranchModule, CacheSpec
from mjax.models.base.context import NewTokens
from mjax.models.base.params import Initializer, declare
from mjax.models.recurrent.recurrent_context import (
    document_starts,
    from_pieces,
    history_of,
    states_before,
    to_pieces,
)
from mjax.sharding.spec import ParamSpec

_LARGEST_DECAY = 16.0  # of the initial A

# [tokens, channels] that pass through memory: scan, convolution, gated norm, sums of gradients.
PASSES_OF_SCAN = 64

Parts = tuple[jax.Array, ...]  # [B, S, ...] each


class RecurrentCache(NamedTuple):
    """The state of rows after their last tokens; it does not grow with them.

    histories: the last K - 1 tokens of each part before the convolution, [B, K-1, ...].
    state: of the scan, fp32 [B, H, P, N].
    """

    histories: Parts
    state: jax.Array

    @staticmethod
    def spec(parts: tuple[CacheSpec, ...], state: tuple[int, ...]) -> "RecurrentCache":
        """The arrays of a cache, of the histories' and of the state's shape."""
        axes = ("batch", "heads", None, None)
        return RecurrentCache(parts, CacheSpec(state, axes, dtype="float32"))

    def slots(self, new: NewTokens) -> StateSlots | None:
        """The places of the rows in a cache that has more; None: it has just these."""
        return None


class Scanned(NamedTuple):
    """Output of a scan: y [B, S, H, P], and the state after the last token."""

    y: jax.Array
    state: jax.Array


class RecurrentMixer(BranchModule):
    """A mixer with a state, whose class says how many tokens the convolution sees (`taps`).

    It defines four methods. `_convolve(parts, rates, starts, histories, parallel)` gives what the
    scan reads, `_scan(read, starts, initial)` its outcome behind the state `initial` or none, and
    `_step(read, states, slots)` that of one token behind the states of its rows, which are all or
    lie in `slots`. `_summary(read, starts)` gives what a piece of a sequence leaves in the state,
    and what it leaves of a state before it.
    """

    taps: int

    def _mix(
        self,
        parts: Parts,
        rates: Parts,
        inputs: BranchInputs,
        cache: RecurrentCache | None,
    ) -> tuple[Any, jax.Array, RecurrentCache | None]:
        """(what the scan read, y [B, S, H, P], the new cache)."""
        if cache is None:
            return *self._mix_sequences(parts, rates, inputs), None
        new = inputs.tokens.new
        if new.count is not None:
            real = new.is_real(parts[0].shape[1])
            parts, rates = (tuple(_where_real(real, v) for v in vs) for vs in (parts, rates))
        slots = cache.slots(new)
        histories = tuple(states_in(history, slots) for history in cache.histories)
        read = self._convolve(parts, rates, None, histories, inputs.ctx.parallel)
        if parts[0].shape[1] == 1:
            made = self._step(read, cache.state, slots)
        else:
            made = self._scan(read, None, states_in(cache.state, slots))
            made = made._replace(state=with_states(cache.state, made.state, slots))
        kept = tuple(
            with_states(of_all, last_tokens(part, before, new.count), slots)
            for of_all, part, before in zip(cache.histories, parts, histories, strict=True)
        )
        return read, made.y, cache._replace(histories=kept, state=made.state)

    def _mix_sequences(
        self, parts: Parts, rates: Parts, inputs: BranchInputs
    ) -> tuple[Any, jax.Array]:
        """(what the scan read, y) of whole sequences; the former as pieces of them."""
        ctx = inputs.ctx
        starts = document_starts(inputs.tokens, ctx)
        parts, rates = (tuple(to_pieces(v, ctx) for v in vs) for vs in (parts, rates))
        histories = tuple(history_of(v, starts, self.taps - 1, ctx) for v in parts)
        read = self._convolve(parts, rates, starts, histories, ctx.parallel)
        initial = None
        if ctx.parallel.cp > 1:
            initial = states_before(*self._summary(read, starts), ctx)
        made = self._scan(read, starts, initial)
        return read, from_pieces(made.y, ctx)

    def _declare_conv(
        self,
        rngs: nnx.Rngs,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *hf: str,
    ) -> None:
        """The weights of the convolution of a part, whose channels have these axes."""
        spec = ParamSpec((*shape, self.taps), (*axes, "taps"), "conv", hf=hf)
        setattr(self, name, declare(rngs, spec, _uniform(self.taps**-0.5)))

    def _declare_precise(
        self, rngs: nnx.Rngs, name: str, heads: int, init: Initializer, hf: str
    ) -> None:
        """A number a head, in fp32."""
        spec = ParamSpec(
            shape=(heads,),
            axes=("heads",),
            role="scalar",
            hf=(hf,),
            precise=True,
        )
        setattr(self, name, declare(rngs, spec, init))


def in_fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def initial_decays(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """log A, with A uniform in [1, 16]."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, _LARGEST_DECAY))


def _where_real(real: jax.Array, x: jax.Array) -> jax.Array:
    """x [B, S, ...] with zeros for padding."""
    channels = tuple(range(2, x.ndim))
    return jnp.where(jnp.expand_dims(real, channels), x, 0)


def _uniform(bound: float) -> Initializer:
    """Draws uniform within +-bound."""

    def draw(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw
