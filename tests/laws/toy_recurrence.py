"""A toy mixer: a linear recurrence s[t] = a * s[t-1] + u[t], which documents reset.

It is all that a new mixer needs besides a row in the table of branches: parameters with names of
matmuls, its computation on any tp, its cache and its FLOPs. `test_branches.py` trains it.
"""

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import Branch
from mjax.kernels.recurrence.token_step import states_in, with_states
from mjax.models.base.branch import BranchInputs, BranchModule, BranchOutput, CacheSpec
from mjax.models.base.params import constant, declare, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import weight_of
from mjax.models.recurrent.recurrent_mixer import RecurrentCache
from mjax.sharding.spec import ParamSpec

ROW = Branch(
    module="tests.laws.toy_recurrence:Recurrence",
    name="recurrence",
    shape="recurrence",
    role="recurrent",
    sizes=("intermediate_size",),
    matmuls=("rec_in", "rec_out"),
)


class Recurrence(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D] by F channels, of which a device has F/tp."""

    def __init__(self, cfg, out_std, rngs):
        width, channels = cfg.hidden_size, cfg.intermediate_size
        inner = ParamSpec((width, channels), ("embed", "mlp"), "matrix", matmul="rec_in")
        outer = ParamSpec((channels, width), ("mlp", "embed"), "matrix", matmul="rec_out")
        self.inner = declare(rngs, inner, normal(cfg.initializer_range))
        self.outer = declare(rngs, outer, normal(out_std))
        self.decay = declare(rngs, ParamSpec((channels,), ("mlp",), "scalar"), constant(0.5))

    def __call__(
        self, x, inputs: BranchInputs, cache: RecurrentCache | None = None
    ) -> BranchOutput:
        tokens, ctx = inputs.tokens, inputs.ctx
        (u,) = column(x, (weight_of(self.inner),), ctx)
        decay = jnp.broadcast_to(jax.nn.sigmoid(self.decay[...]).astype(u.dtype), u.shape)
        if tokens.segments is not None and cache is None:
            starts = jnp.diff(tokens.segments, axis=1, prepend=tokens.segments[:, :1]) != 0
            decay = jnp.where(starts[..., None], 0, decay)
        if cache is not None:
            if tokens.new.count is not None:  # padding comes last and leaves the state as it is
                real = tokens.new.is_real(u.shape[1])
                u = jnp.where(real[..., None], u, 0)
                decay = jnp.where(real[..., None], decay, 1)
            slots = cache.slots(tokens.new)
            before = states_in(cache.state, slots)
            u = u.at[:, 0].add(decay[:, 0] * before.astype(u.dtype))
        _, states = jax.lax.associative_scan(compose, (decay, u), axis=1)
        if cache is not None:
            after = with_states(cache.state, states[:, -1], slots)
            cache = cache._replace(state=after)
        return BranchOutput(row(states, weight_of(self.outer), ctx), cache=cache)

    @staticmethod
    def flops(cfg, word, seq_length):
        return 6.0 * cfg.intermediate_size

    @staticmethod
    def cache(cfg, batch, length, tp=1):
        state = CacheSpec((batch, cfg.intermediate_size), ("batch", "mlp"))
        return RecurrentCache((), state)


def compose(first, second):
    """Two steps of the recurrence as one."""
    return first[0] * second[0], second[0] * first[1] + second[1]
