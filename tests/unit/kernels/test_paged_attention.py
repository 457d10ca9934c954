"""Attention to pages: against attention to whole rows in fp64.

Slots that no token reached hold NaN. Kernels run in Triton's interpreter.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention.api import attention
from mjax.kernels.attention.paged import (
    PagedArrays,
    PagedRows,
    PagedTile,
    Splits,
    attend_by_tiles,
    paged_attention,
    places_of_tokens,
    tokens_of_rows,
    write_pages,
)
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from tests.marks import quick
from tests.triton_interpreter import interpret

PAGE, TABLE = 8, 6  # slots of a page, pages of a row at most
HEADS, KV_HEADS, WIDTH = 4, 2, 16


@dataclass
class Case:
    """Rows as (tokens in the cache, new ones among them), and what attention uses."""

    rows: list[tuple[int, int]]
    each: int | None = None
    padding: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scales: bool = False
    latent: int | None = None  # channels of keys that are values
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    width: int = WIDTH


RAGGED = [(5, 5), (17, 3), (8, 1), (48, 20), (9, 9), (16, 8)]
DECODE = [(1, 1), (8, 1), (9, 1), (0, 1), (48, 1), (23, 1)]
CASES = {
    "decode": Case(DECODE, each=1),
    "ragged": Case(RAGGED, padding=7),
    "drafts": Case([(3, 3), (24, 3), (0, 3), (31, 3)], each=3, width=12),
    "decode, all": Case(DECODE, each=1, window=9, softcap=5.0, sinks=True, scales=True),
    "ragged, all": Case(RAGGED, padding=3, window=9, softcap=5.0, sinks=True, scales=True),
    "latent": Case(RAGGED, latent=16, kv_heads=1, width=20, sinks=True),
    "latent decode": Case(DECODE, each=1, latent=16, kv_heads=1, width=20),
    "one row": Case([(41, 41)], width=12),
    "more tokens than the reference takes at once": Case([(48, 40), (46, 46)], padding=10),
    "a row without new tokens": Case([(4, 4), (9, 0), (12, 2)], padding=1),
    "a head each": Case(RAGGED, kv_heads=HEADS, padding=1),
}


@dataclass
class Drawn:
    """The arrays of a case in fp64, as pages and as rows."""

    q: np.ndarray  # [T, N, H]
    pages: list[np.ndarray]  # of keys and of values
    scales: list[np.ndarray] | None
    rows: PagedRows
    of_row: list[tuple[np.ndarray, np.ndarray]]  # keys and values [length, K, H], scales applied
    sinks: np.ndarray | None


def drawn(
    case: Case,
    rng: np.random.Generator,
    page: int = PAGE,
    table: int = TABLE,
    dtype: jnp.dtype = jnp.float32,
) -> Drawn:
    """A case whose unused slots and pages hold NaN; `dtype` has all its numbers."""
    count = 1 + len(case.rows) * table
    shape = (count, case.kv_heads, page, case.width)
    pages = [np.full(shape, np.nan) for _ in range(2)]
    scales = [np.full(shape[:3], np.nan) for _ in range(2)] if case.scales else None
    free = list(rng.permutation(np.arange(1, count)))
    tables = np.zeros((len(case.rows), table), np.int32)
    of_row = []
    for r, (length, _) in enumerate(case.rows):
        own = [free.pop() for _ in range(-(-length // page))]
        tables[r, : len(own)] = own
        kept = []
        for i in range(2):
            x = rng.normal(size=(length, case.kv_heads, case.width)) * 2
            x = x.astype(jnp.float8_e4m3fn if case.scales else dtype).astype(np.float64)
            scale = np.ones((length, case.kv_heads), np.float32)
            if scales is not None:
                scale = rng.uniform(0.2, 3, scale.shape).astype(np.float32)
            for t in range(length):
                pages[i][own[t // page], :, t % page] = x[t]
                if scales is not None:
                    scales[i][own[t // page], :, t % page] = scale[t]
            kept.append(x * scale[..., None])
        of_row.append(tuple(kept))
    starts = np.concatenate([[0], np.cumsum([new for _, new in case.rows])])
    rows = PagedRows(
        jnp.asarray(tables),
        jnp.asarray([length for length, _ in case.rows], jnp.int32),
        jnp.asarray(starts, jnp.int32),
    )
    q = rng.normal(size=(starts[-1] + case.padding, case.heads, case.width)).astype(dtype)
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    return Drawn(q.astype(np.float64), pages, scales, rows, of_row, sinks)


def call_of(case: Case, implementation: str = "xla") -> AttentionCall:
    return AttentionCall(
        scale=1.2 / case.width**0.5,
        window=case.window,
        softcap=case.softcap,
        implementation=implementation,
    )


def wanted(case: Case, made: Drawn) -> np.ndarray:
    """`attention` of each row's last tokens to its keys, in fp64; zeros for padding."""
    size = case.latent or case.width
    out = np.zeros((*made.q.shape[:2], size))
    with jax.enable_x64(True):
        for r, (length, new) in enumerate(case.rows):
            start, end = (int(x) for x in made.rows.starts[r : r + 2])
            own = min(length, new)
            if own == 0:
                continue
            keys, values = made.of_row[r]
            if case.latent:
                values = keys[..., : case.latent]
            arrays = AttentionArrays(
                columns=(jnp.arange(length - own, length), jnp.arange(length)),
                sinks=None if made.sinks is None else jnp.asarray(made.sinks),
            )
            part = (jnp.asarray(x)[None] for x in (made.q[end - own : end], keys, values))
            out[end - own : end] = attention(*part, call_of(case), arrays)[0]
    return out


def arrays_of(case: Case, made: Drawn, dtype=jnp.float32) -> PagedArrays:
    cache = jnp.float8_e4m3fn if case.scales else dtype
    keys, values = (jnp.asarray(x, cache) for x in made.pages)
    scales = None
    if case.scales:
        scales = tuple(jnp.asarray(x, jnp.float32) for x in made.scales)
    sinks = None if made.sinks is None else jnp.asarray(made.sinks)
    values = None if case.latent else values
    return PagedArrays(jnp.asarray(made.q, dtype), keys, values, made.rows, sinks, scales)


def computed(case: Case, arrays: PagedArrays, implementation: str = "xla") -> jax.Array:
    """`paged_attention` of a case."""
    more = {"sinks": arrays.sinks, "scales": arrays.scales}
    more |= {"value_size": case.latent, "each": case.each}
    return paged_attention(*arrays[:4], call_of(case, implementation), **more)


def assert_near(got: jax.Array, right: np.ndarray, bound: float = 4e-6) -> None:
    np.testing.assert_allclose(got, right, rtol=0, atol=bound * np.abs(right).max())


@pytest.mark.parametrize("name", quick(CASES, 4, 5))
def test_the_reference_equals_fp64(name):
    case = CASES[name]
    made = drawn(case, np.random.default_rng(len(name)))
    got = computed(case, arrays_of(case, made))
    assert got.dtype == jnp.float32
    assert_near(got, wanted(case, made))


# a tile of keys is half a page or a page; one walker takes all splits, some, one each
TILES = {
    "half a page": (PagedTile(4, 4, 1, 1), Splits(2, 1)),
    "a page": (PagedTile(16, 8, 1, 1), Splits(1, 2)),
    "fewer queries": (PagedTile(8, 8, 1, 1), Splits(2, 3)),
}


@pytest.mark.parametrize(
    "name,tile", quick(itertools.product(CASES, TILES), 0, 5, 9, 13, 16, 20, 23)
)
def test_kernels_equal_fp64(monkeypatch, name, tile):
    case, (tile, splits) = CASES[name], TILES[tile]
    ran = interpret(monkeypatch)
    made = drawn(case, np.random.default_rng(len(name)))
    arrays = arrays_of(case, made)
    if case.each is None:
        got = attend_by_tiles(arrays, call_of(case), None, tile)
        assert ran == ["attend_to_pages"]
    else:
        got = attend_by_tiles(arrays, call_of(case), case.each, tile, splits)
        assert ran == ["attend_to_pages", "merge_splits"]
    assert_near(got, wanted(case, made), 1e-3 if case.scales else 4e-6)  # products are fp16


def test_tokens_know_their_row_and_position_and_padding_is_written_to_page_0():
    tables = jnp.array([[3, 5], [7, 0], [0, 0], [2, 4]], jnp.int32)
    rows = PagedRows(tables, jnp.array([10, 3, 0, 16]), jnp.array([0, 4, 4, 6, 9]))
    row, position = tokens_of_rows(rows, 11)
    assert row.tolist() == [0] * 4 + [2] * 2 + [3] * 5
    assert position.tolist() == [6, 7, 8, 9, -1, -1, 13, 14, 15, -1, -1]
    page, slot = places_of_tokens(rows, row, position, 8)
    assert page.tolist() == [3, 3, 5, 5, 0, 0, 4, 4, 4, 0, 0]
    assert slot.tolist() == [6, 7, 0, 1, 0, 0, 5, 6, 7, 0, 0]


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_new_tokens_are_written_to_their_slots_and_nowhere_else(cache):
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.normal(size=(6, 2, 8, 16)), cache)
    scales = jnp.asarray(rng.normal(size=(6, 2, 8)), jnp.float32)
    new = jnp.asarray(rng.normal(size=(5, 2, 16)), jnp.float32)
    page, slot = jnp.array([4, 4, 1, 0, 0]), jnp.array([7, 2, 0, 0, 0])
    got, got_scales = (
        write_pages(pages, new, page, slot),
        write_pages(scales, new[..., 0], page, slot),
    )
    right, right_scales = (np.array(x).copy() for x in (pages, scales))
    for t in range(3):
        right[page[t], :, slot[t]] = new[t].astype(cache)
        right_scales[page[t], :, slot[t]] = new[t, :, 0]
    assert got.dtype == pages.dtype
    np.testing.assert_array_equal(np.array(got)[1:], right[1:])
    np.testing.assert_array_equal(got_scales[1:], right_scales[1:])
