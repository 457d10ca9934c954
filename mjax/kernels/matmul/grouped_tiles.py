"""Tiles of the grouped matmul on Hopper: their sizes, and which rows each holds.

Invariant: the tiles of a group hold each of its rows once, whatever the sizes of groups.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

HALVES = 2  # warpgroups that multiply
TMA_ROWS = 8  # rows of a swizzled tile, where TMA begins


@dataclass(frozen=True)
class GroupTile:
    """Lines and columns of a product that a block takes, slots of its ring, and tiles of a band.

    Lines are a multiple of 128, columns one of 64. promoted: after so many steps a sum leaves the
    tensor cores; 0: at its end.
    """

    lines: int
    columns: int
    slots: int
    band: int = 16
    promoted: int = 0

    @property
    def half(self) -> int:
        return self.lines // HALVES

    def across(self, columns: int) -> int:
        """The tiles that cover so many columns."""
        return -(-columns // self.columns)


# On an H200 no tile was faster by more than 2 % (docs/lab/2026-11-23-grouped-matmul.md).
WIDE, NARROW = GroupTile(128, 256, 4), GroupTile(128, 128, 6)


def group_tile_of(columns: int) -> GroupTile:
    """The tile of a product with so many columns: wide where the last is not mostly empty."""
    return _wide_or_narrow(WIDE, NARROW, columns)


WIDE8, NARROW8 = GroupTile(128, 256, 4), GroupTile(128, 128, 6)
PROMOTED8 = GroupTile(128, 192, 4, promoted=4), GroupTile(128, 128, 6, promoted=4)


def tile8_of(columns: int, precise: bool) -> GroupTile:
    """The tile of a product of 8-bit operands; `precise` sums leave the tensor cores in parts."""
    return _wide_or_narrow(*(PROMOTED8 if precise else (WIDE8, NARROW8)), columns)


def _wide_or_narrow(wide: GroupTile, narrow: GroupTile, columns: int) -> GroupTile:
    covered = wide.across(columns) * wide.columns
    return wide if covered <= 1.1 * columns else narrow


# ---- tables ------------------------------------------------------------------------------------


def tiles_of_rows(
    sizes: jax.Array, m: int, lines: int, aligned: int = TMA_ROWS
) -> tuple[jax.Array, jax.Array]:
    """(int32 [T, 4] of each tile of rows, int32 [G + 1] whose last is the number of tiles).

    A tile has its group, the row it starts at less `lines` times its own number, and the first and
    the last row of the group, plus 1. It starts at a multiple of `aligned` rows. T bounds the
    number of tiles for all sizes. Group G are the rows of no group. Sums are dense, so XLA makes
    few kernels of them.
    """
    groups = jnp.arange(len(sizes) + 1, dtype=jnp.int32)
    begins, ends = bounds_of_groups(sizes)
    begins = jnp.append(begins, ends[-1])
    ends = jnp.append(ends, jnp.int32(m))
    starts = begins // aligned * aligned
    tiles = jnp.where(ends > begins, (ends - starts + lines - 1) // lines, 0)
    last = jnp.sum(jnp.where(groups <= groups[:, None], tiles, 0), 1, dtype=jnp.int32)
    first = last - tiles
    facts = jnp.stack([groups, starts - first * lines, begins, ends], 1)
    most = (m + (aligned - 1) * len(groups)) // lines + len(groups)
    index = jnp.arange(most, dtype=jnp.int32)[:, None]
    own = (index >= first) & (index < last)
    return jnp.sum(jnp.where(own[..., None], facts, 0), 1, dtype=jnp.int32), last


def bounds_of_groups(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the first row int32 [G] of each group, its last row plus 1)."""
    sizes, groups = sizes.astype(jnp.int32), jnp.arange(len(sizes))
    ends = jnp.sum(jnp.where(groups <= groups[:, None], sizes, 0), 1, dtype=jnp.int32)
    return ends - sizes, ends
