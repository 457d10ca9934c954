"""The losses of rows of logits and their gradient, in one kernel for GPUs.

XLA reads logits three times: for the maximum, the sum of exponentials, the gradient. Our kernel, in
Pallas' Triton dialect, takes a row at a time: one sweep keeps a running maximum and sum for each
lane (Milakov and Gimelshein, arXiv 1805.02867), a second one, backwards, writes the gradient. What
the first read last then comes, in part, from the L2 cache. Rows are independent and sums in a
fixed order: equal bit for bit each time. Invariant: fp32 inside; the gradient is rounded once.

The gradient goes into rows of a larger array, in place: logits of a few tokens at a time suffice,
while the matmuls that read their gradients take many tokens.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.chooser import Device, choose

_LOWEST = -1e30  # where a running maximum starts
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Terms:
    """The terms of a token's loss besides -log p(label).

    `softcap` c maps logits z to c * tanh(z / c). `label_smoothing` e mixes in e times the mean of
    -log p over the vocabulary (Szegedy et al., arXiv 1512.00567, as torch defines it). `z_loss`
    adds that times log(sum exp z)^2 (PaLM, arXiv 2204.02311).
    """

    vocab_size: int
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class Tile:
    """A block is `loads` times 4 columns of each thread."""

    warps: int = 32
    loads: int = 4
    programs: int = 132  # rows at a time: an H200's multiprocessors

    @property
    def lanes(self) -> int:
        return 4 * 32 * self.warps

    @property
    def block(self) -> int:
        return self.loads * self.lanes


def supports(tokens: int, rows: int, tp: int, chunk: int | None = None) -> bool:
    """Whether the kernel does the loss of `tokens`, `rows` of the vocabulary on each of `tp`
    devices, in chunks of `chunk` tokens if that is given."""
    choice = choose("loss_rows", jnp.float32, (tokens, rows), tp=tp, chunk=chunk)
    return choice.name == "triton"


def fits(tokens: int, rows: int, tp: int, chunk: int | None = None) -> bool:
    """Whether it would on a GPU."""
    shape = tokens, rows
    choice = choose("loss_rows", jnp.float32, shape, Device("gpu"), tp=tp, chunk=chunk)
    return choice.name == "triton"


def rows(
    z: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    d_z: jax.Array,
    first: jax.Array,
    terms: Terms,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(mask * losses, fp32 [t]; `d_z` with their gradient by `z` in t rows from `first`, in place).

    z fp32 [t, V], V >= vocab_size, labels int32 [t], mask fp32 [t], d_z [T, V] of any float type,
    first int32 [1]. Columns of z beyond vocab_size take part in nothing; there d_z is 0.
    `interpret` runs the kernel on a CPU, for tests.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.triton as plt

    tokens, tile = z.shape[0], tile or Tile()
    programs = min(tile.programs, tokens)

    def kernel(z_ref, label_ref, mask_ref, first_ref, _, loss_ref, d_ref):
        program = pl.program_id(0)

        def one(i, none):
            at = program + i * programs
            row = _Row(z_ref, at, d_ref, first_ref[0] + at, terms, tile)
            label, weight = label_ref[at], mask_ref[at]
            loss, *scaled = row.loss(label, *row.statistics())
            loss_ref[at] = loss * weight
            row.write(label, weight, *scaled)
            return none

        own = (tokens - 1 - program) // programs + 1
        lax.fori_loop(0, own, one, ())

    def like(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=[like(mask), like(d_z)],
        grid=(programs,),
        input_output_aliases={4: 1},
        compiler_params=plt.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name="loss_rows",
    )(z, labels, mask, first, d_z)


@dataclass(frozen=True)
class _Row:
    """Row `at` of logits and row `out` of their gradient, as a program goes over them."""

    z: jax.Ref
    at: jax.Array
    d_z: jax.Ref
    out: jax.Array
    terms: Terms
    tile: Tile

    def capped(self, z):
        cap = self.terms.softcap
        return z if cap is None else cap * jnp.tanh(z / cap)

    def block(self, block, padded, evict):
        """(columns, which are those of the vocabulary, logits, -inf in others) for each load."""
        import jax.experimental.pallas.triton as plt

        width, lanes = self.z.shape[1], self.tile.lanes
        for i in range(self.tile.loads):
            columns = block * self.tile.block + i * lanes + jnp.arange(lanes, dtype=jnp.int32)
            keys = {"mask": columns < width, "other": 0.0} if padded else {}
            z = self.capped(plt.load(self.z.at[self.at, columns], eviction_policy=evict, **keys))
            real = columns < self.terms.vocab_size if padded else True
            yield columns, real, jnp.where(real, z, -jnp.inf) if padded else z

    def sweep(self, body, carry, backwards=False):
        """`body(block, carry, padded)` over the row's blocks; those with padding, as a rule one,
        come first, backwards last."""
        full = self.terms.vocab_size // self.tile.block
        blocks = -(-self.z.shape[1] // self.tile.block)
        parts = [(full, blocks, True), (0, full, False)]
        for low, high, padded in parts[::-1] if backwards else parts:

            def step(i, carry, low=low, high=high, padded=padded):
                return body(low + high - 1 - i if backwards else i, carry, padded)

            carry = lax.fori_loop(low, high, step, carry) if low < high else carry
        return carry

    def statistics(self):
        """Over the row: maximum, sum of exp(z - maximum), sum of z if the loss takes it."""

        def add(block, carry, padded):
            top, total, *sums = carry
            parts = [(real, z) for _, real, z in self.block(block, padded, "evict_last")]
            new = functools.reduce(jnp.maximum, (z for _, z in parts), top)
            total = sum((_exp(z - new) for _, z in parts), total * _exp(top - new))
            sums = [sum((jnp.where(real, z, 0.0) for real, z in parts), s) for s in sums]
            return new, total, *sums

        zero = jnp.zeros(self.tile.lanes, jnp.float32)
        smooth = [zero] if self.terms.label_smoothing else []
        tops, totals, *sums = self.sweep(add, (zero + _LOWEST, zero, *smooth))
        top = jnp.max(tops)
        return top, jnp.sum(totals * _exp(tops - top)), *map(jnp.sum, sums)

    def loss(self, label, top, total, whole=0.0):
        """(the loss, the maximum, by what exp(z - maximum) is multiplied in the gradient)."""
        smooth, z_loss, width = self.terms.label_smoothing, self.terms.z_loss, self.z.shape[1]
        target = self.capped(self.z[self.at, jnp.clip(label, 0, width - 1)])
        target = jnp.where((label >= 0) & (label < width), target, 0.0)
        log_z, scale = top + jnp.log(total), 1 / total
        loss = log_z - (1 - smooth) * target - smooth * (whole / self.terms.vocab_size)
        if z_loss:
            loss = loss + z_loss * jnp.square(log_z)
            scale = scale * (1 + 2 * z_loss * log_z)
        return loss, top, scale

    def write(self, label, weight, top, scale):
        """The gradient of `weight` times the loss."""
        import jax.experimental.pallas.triton as plt

        smooth, cap = self.terms.label_smoothing, self.terms.softcap

        def write(block, none, padded):
            for columns, real, z in self.block(block, padded, "evict_first"):
                d = _exp(z - top) * (scale * weight)
                d = d - jnp.where(columns == label, (1 - smooth) * weight, 0.0)
                if smooth:
                    d = d - smooth / self.terms.vocab_size * weight
                if cap is not None:
                    d = d * (1.0 - jnp.square(z / cap))
                keys = {"mask": columns < self.z.shape[1]} if padded else {}
                d = (jnp.where(real, d, 0.0) if padded else d).astype(self.d_z.dtype)
                place = self.d_z.at[self.out, columns]
                plt.store(place, d, eviction_policy="evict_first", **keys)
            return none

        self.sweep(write, (), backwards=True)


def _exp(a):
    return jnp.exp2(a * _LOG2_E)  # one instruction, where exp takes a subroutine
