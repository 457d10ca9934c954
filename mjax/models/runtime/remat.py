"""How a layer follows its remat policy (`config/languages/remat.py`): `jax.checkpoint` by names.

Invariant: no policy changes a number, only memory and time.
"""

from collections.abc import Callable

import jax

from mjax.config.languages.remat import kept_names
from mjax.kernels.fp8.quantize import SCALES
from mjax.models.base.barriers import compute_again

# The policy of a pipeline's layers that keep all: `all_but_views`. Users write "none".
STASHED = "stashed"

# Views of an array, which a backward makes again: kept, they would be copies.
_VIEWS = frozenset(
    "slice dynamic_slice squeeze reshape broadcast_in_dim convert_element_type transpose "
    "expand_dims copy".split()
)


def remat(
    layer: Callable, policy: str, offload: tuple[str, ...] = (), in_loop: bool = True
) -> Callable:
    """`layer`, a function of arrays, keeping for its backward what `policy` says.

    Kept tensors named in `offload` wait in host memory. Outside a loop, forward and backward are in
    one computation, where XLA would find that the backward computes again what the forward did, and
    keep that instead. With `in_loop` false barriers hide it.
    """
    if policy == STASHED:
        return all_but_views(layer)
    names = kept_names(policy)
    if names is None:
        return layer
    to_host = [name for name in names if name in offload]
    on_device = [name for name in (*names, SCALES) if name not in to_host]
    if to_host:
        rule = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=on_device,
            names_which_can_be_offloaded=to_host,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        rule = jax.checkpoint_policies.save_only_these_names(*on_device)
    return jax.checkpoint(layer, policy=rule, prevent_cse=not in_loop)


def keeps_all(policy: str) -> bool:
    """Whether the backward of a layer of this policy computes nothing again but views."""
    return policy == STASHED or kept_names(policy) is None


def all_but_views(layer: Callable) -> Callable:
    """`layer` keeping all that autodiff asks for, except views of other arrays."""

    def rule(primitive, *_, **__) -> bool:
        return primitive.name not in _VIEWS

    return jax.checkpoint(layer, policy=rule, prevent_cse=False)


def from_arguments(function: Callable) -> Callable:
    """`function` of arrays, whose backward keeps its arguments alone and computes it again.

    `jax.checkpoint` would not do: within a layer that follows a policy of its own, autodiff asks
    that policy what to keep, and one that keeps all (`all_but_views`) would.
    """

    @jax.custom_vjp
    def call(*arguments):
        return function(*arguments)

    def forward(*arguments):
        return function(*arguments), arguments

    def backward(arguments, gradient):
        _, vjp = jax.vjp(function, *compute_again(*arguments))
        return vjp(gradient)

    call.defvjp(forward, backward)
    return call
