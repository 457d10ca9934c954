"""The losses of rows of logits and their gradient, in one kernel for GPUs.

XLA reads logits three times: for the maximum, the sum of exponentials, the gradient. Our Triton
kernel (`rows_triton.py`) takes a row at a time: one sweep keeps a running maximum and sum for
each lane (Milakov and Gimelshein, arXiv 1805.02867), a second one, backwards, writes the gradient.
Its first reads then come, in part, from the L2 cache. Rows are independent and sums in a
fixed order: equal bit for bit each time. Invariant: fp32 inside; the gradient is rounded once.

The gradient goes into rows of a larger array, in place: logits of a few tokens at a time suffice,
while the matmuls that read their gradients take many tokens.
"""

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.kernels.base.chooser import Device, choose, this_device
from mjax.kernels.base.triton_call import triton_call

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """The terms of a token's loss besides -log p(label).

    `softcap` c maps logits z to c * tanh(z / c). `label_smoothing` e mixes in e times the mean of
    -log p over the vocabulary (Szegedy et al., arXiv 1512.00567, as torch defines it). `z_loss`
    adds that times log(sum exp z)^2 (PaLM, arXiv 2204.02311). Logits are divided by `temperature`
    after the softcap, as a sampler does.
    """

    vocab_size: int
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True)
class LossTile:
    """A block is `loads` times 4 columns of each thread."""

    warps: int = 32
    loads: int = 4
    programs: int = 132  # rows at a time: an H200's multiprocessors

    @property
    def lanes(self) -> int:
        return 4 * 32 * self.warps


def supports_rows(
    tokens: int,
    rows: int,
    tp: int,
    chunk: int | None = None,
    device: Device | None = None,
    unknown: str | None = None,
) -> bool:
    """Whether the kernel does the loss of `tokens`, `rows` of the vocabulary on each of `tp`
    devices, in chunks of `chunk` tokens if that is given.

    `unknown` says why it cannot run with the token function of the loss.
    """
    facts = {"tp": tp, "chunk": chunk, "unknown": unknown}
    choice = choose("loss_rows", jnp.float32, (tokens, rows), device, **facts)
    if unknown is not None:
        log.info("loss rows: %s (%s)", *choice)
    return choice.name == "triton"


def fits(tokens: int, rows: int, tp: int, chunk: int | None = None) -> bool:
    """Whether it would on a GPU."""
    here = this_device()
    return supports_rows(tokens, rows, tp, chunk, here if here.backend == "gpu" else Device("gpu"))


def rows(
    z: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    d_z: jax.Array,
    first: jax.Array,
    terms: Terms,
    tile: LossTile | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(mask * losses, fp32 [t]; `d_z` with their gradient by `z` in t rows from `first`, in place).

    z fp32 [t, V], V >= vocab_size, labels int32 [t], mask fp32 [t], d_z [T, V] of any float type,
    first int32 [1]. Columns of z beyond vocab_size take part in nothing; there d_z is 0.
    """
    from mjax.kernels.loss import rows_triton

    (tokens, width), tile = z.shape, tile or LossTile()
    programs = min(tile.programs, tokens)
    losses, d_z = triton_call(
        rows_triton.loss_rows,
        [z, labels, mask, first, d_z],
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (mask, d_z)],
        programs=programs,
        warps=tile.warps,
        aliases={4: 1},
        TOKENS=tokens,
        WIDTH=width,
        VOCAB=terms.vocab_size,
        PROGRAMS=programs,
        LANES=tile.lanes,
        LOADS=tile.loads,
        SOFTCAP=terms.softcap,
        SMOOTHING=terms.label_smoothing,
        Z_LOSS=terms.z_loss,
    )
    return losses, d_z
