"""Products of low rank with matrices that each row chooses: adapters of several in one batch."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.sharding.collectives import LOCAL, Parallel


@register_dataclass
@dataclass(frozen=True)
class TokenSlots:
    """Which adapter of several each token has.

    numbers: int32 [B, S], or [B] for all tokens of a row; 0: none.
    parallel: the mesh, whose tp devices may hold parts of the tokens.
    """

    numbers: jax.Array
    parallel: Parallel = field(default=LOCAL, metadata={"static": True})

    def of_tokens(self, count: int) -> jax.Array:
        """int32 [M] of the `count` tokens of a product, which may be those of this tp device."""
        numbers = self.numbers
        if numbers.ndim == 1:
            return jnp.repeat(numbers, count // len(numbers))
        if count < numbers.size:
            numbers = self.parallel.shard(numbers, "tp", 1)
        assert numbers.size == count, "slots of adapters: tokens of another stream or of a cache"
        return numbers.reshape(-1)


def add_products_by_slot(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scales: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """y [M, *outputs] with x a b of each row's slot added, times that slot's scale.

    x [M, K], a [slots, K, R], b [slots, R, *outputs], scales fp32 [slots], slots int32 [M]. Rows of
    slot 0 stay bit for bit. The matrices of all slots are multiplied side by side, and a row keeps
    its own part of that. So nothing is gathered a row, and the cost grows with slots times R.
    """
    count, inputs, rank = a.shape
    side_by_side = jnp.moveaxis(a, 0, 1)
    low = x @ side_by_side.reshape(inputs, count * rank)
    low = low.reshape(-1, count, rank)
    low = low * scales.astype(low.dtype)[:, None]
    is_own = slots[:, None] == jnp.arange(count)
    low = jnp.where(is_own[..., None], low, 0)
    low = low.reshape(-1, count * rank)
    change = jnp.tensordot(low, b.reshape(count * rank, *b.shape[2:]), 1)
    is_adapted = jnp.expand_dims(slots > 0, tuple(range(1, y.ndim)))
    return jnp.where(is_adapted, y + change, y)
