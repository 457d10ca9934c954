"""A call of attention as two values: what to compute, which is static, and the arrays it reads.

`AttentionCall` selects code and can be a static argument. `AttentionArrays` is a pytree of all that
attention reads besides queries, keys and values. Everything that computes attention takes both.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.config.rules.train_rules import EIGHT_BIT_SIDE
from mjax.errors import UserError

if TYPE_CHECKING:  # it imports this module
    from mjax.kernels.base.chooser import Inputs

MASKS = ("causal", "full", "prefix", "cross")


@dataclass(frozen=True)
class AttentionCall:
    """The attention to compute, and its kernels.

    scale: a factor on the products of queries and keys.
    window: a causal query sees this many keys at most, its own among them. Under a full mask it
        sees as many to either side, its own among both.
    softcap: c maps scores to c * tanh(scores / c).
    mask: the kind of the mask, within segments where there are any.
        causal: a query sees the keys of columns up to its own.
        full: a query sees all keys of its sequence.
        prefix: a query sees keys up to its own, and all keys of the prefix.
        cross: a query sees all keys of another sequence, which may have another length.
    dropout: the rate of dropout on attention probabilities.
    max_distance: of relative positions: tokens from which on all distances share a bias.
    max_documents: a bound on the contiguous segments of a sequence, 0 where it is unknown. 1
        promises that every sequence is one segment.
    padded: promises that every sequence is one document, and then maybe padding.
    implementation: auto, xla, cudnn, mosaic or triton, as `train.attention`; of caches perhaps
        in_order (`models/attention/documents.py`).
    deterministic: whether XLA compiles the program so.
    shared: whether segments may share a prefix (`AttentionArrays.shared`).
    eight_bits: whether the forward multiplies in E4M3 (`attention/eight_bits.py`).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    mask: str = "causal"
    dropout: float = 0.0
    max_distance: int = 0
    max_documents: int = 0
    padded: bool = False
    implementation: str = "auto"
    deterministic: bool = False
    shared: bool = False
    eight_bits: bool = False

    def __post_init__(self) -> None:
        assert self.mask in MASKS, f"mask {self.mask!r} is none of {MASKS}"
        if self.window is not None and self.mask not in ("causal", "full"):
            raise UserError(
                f"model.attention.sliding_window: no window is built for a {self.mask!r} mask; "
                "leave the window out"
            )

    @property
    def op(self) -> str:
        """The operation whose rule in the chooser picks the implementation."""
        return "attention_in_8_bits" if self.eight_bits else "attention"


class SharedKeys(NamedTuple):
    """The segments whose keys queries see besides those of their own, int32.

    prefixes: [B, S] of queries; 0: none. The keys of that segment come before the query.
    positions: [B, S] of queries and [B, T] of keys, by which windows count.
    """

    prefixes: jax.Array
    positions: tuple[jax.Array, jax.Array]


class DropoutPlaces(NamedTuple):
    """The keys of dropout: the step's key, and the global numbers of rows [B] and heads [N]."""

    key: jax.Array
    rows: jax.Array
    heads: jax.Array


@register_dataclass
@dataclass(frozen=True)
class AttentionArrays:
    """The arrays of attention other than queries [B, S, N, H], keys and values [B, T, K, H].

    columns: int32 [S] of queries, or [B, S] where rows have their own, and [T] of keys; they order
        both, and key dropout.
    segments: int32 [B, S] and [B, T], or None. A query sees keys of its own segment only. In
        training segments are contiguous documents.
    sinks: extra logits [N], or None.
    prefix: bool [B, T], or None: the keys of a prefix.
    relative: fp32 [N, buckets], or None: biases on scores by the distance from query to key.
    dropout: set where the call's rate is above 0.
    shared: set where the call is of segments that share prefixes.
    """

    columns: tuple[jax.Array, jax.Array]
    segments: tuple[jax.Array, jax.Array] | None = None
    sinks: jax.Array | None = None
    prefix: jax.Array | None = None
    relative: jax.Array | None = None
    dropout: DropoutPlaces | None = None
    shared: SharedKeys | None = None

    def to_slots(self, slots: jax.Array, length: int) -> "AttentionArrays":
        """The arrays of queries in `slots` int32 [B, S], which see a cache up to their own."""
        return replace(self, columns=(slots, jnp.arange(length, dtype=jnp.int32)), segments=None)

    def is_packed(self, call: AttentionCall) -> bool:
        """Whether a sequence may hold several segments."""
        return self.segments is not None and call.max_documents != 1


def features_in_use(call: AttentionCall, arrays: AttentionArrays) -> list[str]:
    """The keys of `model` for what a call uses and not every kernel has, but masks."""
    features = {
        "attention.attn_logit_softcapping": call.softcap is not None,
        "attention.attention_sinks": arrays.sinks is not None,
        "attention.attention_dropout": call.dropout > 0,
        "position_embedding": arrays.relative is not None,
    }
    return [name for name, used in features.items() if used]


def refuse_masks_but(kinds: tuple[str, ...], call: AttentionCall, what: str) -> None:
    """Raise `UserError` where the mask is of none of the kinds that `what` has."""
    if call.mask not in kinds:
        raise UserError(
            f"attention with a {call.mask} mask: {what} has {', '.join(kinds)} only; "
            "set train.attention=xla"
        )


def implementation_in_8_bits(
    x: "Inputs",
    *,
    call: AttentionCall,
    sinks: bool = False,
    value_size: int | None = None,
    relative: bool = False,
    by_blocks: bool = False,
) -> tuple[str, str]:
    """(the implementation of a call in 8 bits of queries [B, S, N, H], and why).

    A rule of the chooser, with the facts of "attention". Raises `UserError` for calls that cuDNN's
    kernel lacks, also where plain JAX takes its place.
    """
    sizes = {x.shape[-1], value_size or x.shape[-1]}
    extras = sinks or relative or by_blocks
    masked = call.max_documents != 1 and not (call.padded and call.mask == "causal")
    others = (call.window, call.softcap, call.dropout, call.shared) != (None, None, 0.0, False)
    on_gpu = x.device.backend != "cpu"
    fused = call.implementation == "cudnn" or (on_gpu and call.implementation == "auto")
    lacks = {
        "masks of documents": masked,
        f"a {call.mask} mask": call.mask not in ("causal", "full"),
        "windows, soft-caps, dropout, sinks, biases, shared prefixes or cp": extras or others,
        f"heads other than {EIGHT_BIT_SIDE}": sizes != {EIGHT_BIT_SIDE},
        f"rows of other than so many times {EIGHT_BIT_SIDE} tokens": x.shape[1] % EIGHT_BIT_SIDE,
        f"train.attention={call.implementation}": call.implementation in ("mosaic", "triton"),
        f"a kernel for precision.compute={x.dtype}": fused and x.dtype != jnp.bfloat16,
        "a kernel for this GPU: it needs Hopper and jax >= 0.11": fused
        and on_gpu
        and not x.device.hopper,
    }
    for what, is_lacked in lacks.items():
        if is_lacked:
            raise UserError(
                f"precision.fp8_attention: attention in 8 bits lacks {what}; set it to false"
            )
    if fused:
        return "cudnn", "its forward multiplies in E4M3 (precision.fp8_attention)"
    return "xla", "plain JAX rounds as cuDNN's 8-bit forward does (precision.fp8_attention)"
