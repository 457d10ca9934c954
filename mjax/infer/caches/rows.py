"""The places of a step's tokens: which row, page and position each has.

`row` holds the fields of a step's records by name, [R] each (`infer/records.py: record_dtype`).
`page` is the number of tokens of a page.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.kernels.attention.paged import PagedRows, places_of_tokens, tokens_of_rows
from mjax.models.base.context import PagedTokens, Tokens, tokens_of

RowFields = dict[str, jax.Array]


def decoded_tokens(row: RowFields, each: int, page: int) -> Tokens:
    """Facts about the tokens [R, each] of a step of decoding.

    Each row has all places for drafts; places beyond its pages are in the null page.
    """
    count = len(row["count"])
    before = jnp.arange(count + 1, dtype=jnp.int32)
    starts = each * before
    known = row["length"]
    lengths = jnp.where(known > 0, known + each - 1, 0)
    rows = PagedRows(row["table"], lengths, starts)
    return _facts_of_tokens(row, rows, (count, each), None, each, page)


def prefilled_tokens(row: RowFields, shape: tuple[int, int], page: int) -> Tokens:
    """Facts about the tokens [1, T] of a step of prefill."""
    ends = jnp.cumsum(row["count"], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    rows = PagedRows(row["table"], row["length"], starts)
    return _facts_of_tokens(row, rows, shape, ends[-1:], None, page)


def each_a_row(found: Tokens) -> Tokens:
    """Facts about the tokens of a step as rows of one token each, [T, 1]."""
    new, count = found.new, found.positions.size
    of_token, position = tokens_of_rows(new.rows, count)
    starts = jnp.arange(count + 1, dtype=jnp.int32)
    tables = new.rows.tables[of_token]
    slots = new.slots[of_token]
    rows = PagedRows(tables, position + 1, starts)
    each = PagedTokens(rows, slots, new.pages, new.places, None, 1)
    adapters = None if found.adapters is None else found.adapters.reshape(-1, 1)
    positions = found.positions.reshape(-1, 1)
    facts = tokens_of((count, 1), positions, jnp.ones_like(positions))
    return replace(facts, new=each, adapters=adapters)


def last_places(new: PagedTokens) -> jax.Array:
    """The flat places of rows' last tokens in a step of prefill, int32 [R]."""
    return jnp.maximum(new.rows.starts[1:] - 1, 0)


def _facts_of_tokens(
    row: RowFields,
    rows: PagedRows,
    shape: tuple[int, int],
    real: jax.Array | None,
    each: int | None,
    page: int,
) -> Tokens:
    """Facts about tokens of `rows`, as in `PagedTokens`."""
    of_token, position = tokens_of_rows(rows, math.prod(shape))
    pages, places = places_of_tokens(rows, of_token, position, page)
    new = PagedTokens(rows, row["slot"], pages, places, real, each)
    positions = jnp.maximum(position, 0) + row["shift"][of_token]
    positions = jnp.maximum(positions, 0).reshape(shape)
    return replace(tokens_of(shape, positions, jnp.ones(shape, jnp.int32)), new=new)
