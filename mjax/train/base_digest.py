"""The digest of frozen weights on a mesh (`checkpoint/base/base_digest.py`)."""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from mjax.checkpoint.base.base_digest import bits_dtype, digest_of, mixed_sum


def digest_of_arrays(params: dict) -> str:
    """The digest of canonical global arrays."""
    sums = {path: _sum_of(array) for path, array in flatten_dict(params).items()}
    return digest_of({path: int(total) for path, total in sums.items()})


@jax.jit
def _sum_of(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, bits_dtype(array.dtype.itemsize))
    return mixed_sum(jnp, bits, [0] * array.ndim, array.shape)
