"""Laws of the pages: counts, references, hashes and the order of eviction."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.infer.scheduling.pages import PagePool, chain

tokens_of = st.lists(st.integers(0, 2), max_size=20)
salts = st.sampled_from(
    [(), (("adapter", "a"),), (("salt", "a"),), (("salt", "a"), ("version", 1))]
)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


@examples(100)
@given(st.tuples(tokens_of, salts), st.tuples(tokens_of, salts), st.integers(1, 4))
def test_hashes_are_equal_just_where_the_tokens_so_far_and_the_salt_are(one, other, page):
    hashes, others = chain(one[0], page, one[1]), chain(other[0], page, other[1])
    for number in range(min(len(hashes), len(others))):
        end = (number + 1) * page
        are_equal = one[0][:end] == other[0][:end] and one[1] == other[1]
        assert (hashes[number] == others[number]) == are_equal


@examples(100)
@given(tokens_of, st.integers(1, 4), st.integers(0, 20))
def test_a_chain_goes_on_from_its_first_hashes(tokens, page, cut):
    salt = (("salt", "a"),)
    whole = chain(tokens, page, salt)
    assert len(whole) == len(tokens) // page
    assert chain(tokens, page, salt, chain(tokens[:cut], page, salt)) == whole


def test_hashes_do_not_depend_on_the_process():
    assert chain([1, 2, 3], 2, (("salt", "a"),))[0].hex().startswith("3caf3cfb")


@pytest.mark.parametrize("cache_prefixes", [True, False])
@examples(100)
@given(data=st.data())
def test_pages_are_free_cached_or_used_and_given_out_once(cache_prefixes, data):
    """Random owners of random prefixes, against references counted by hand."""
    draw = data.draw
    pool = PagePool(draw(st.integers(2, 12)), page=1, cache_prefixes=cache_prefixes)
    owners: list[list[int]] = []
    contents: dict[int, bytes] = {}
    for _ in range(draw(st.integers(0, 30))):
        if owners and draw(st.booleans()):
            pool.release(owners.pop(draw(st.integers(0, len(owners) - 1))))
        else:
            hashes = chain(draw(st.lists(st.integers(0, 1), max_size=5)), 1)
            hits = pool.match(hashes)
            assert all(contents[page] == hash for page, hash in zip(hits, hashes, strict=False))
            assert cache_prefixes or not hits
            before = pool.available
            new = pool.take(len(hashes) - len(hits))
            assert (new is None) == (len(hashes) - len(hits) > before)
            if new is None:
                pool.release(hits)
                continue
            held = {page for pages in owners for page in pages} | set(hits)
            assert 0 not in new and not held & set(new) and len(set(new)) == len(new)
            owners.append(hits + new)
            for page, hash in zip(new, hashes[len(hits) :], strict=True):
                contents[page] = hash
                pool.publish(page, hash)
        references = Counter(page for pages in owners for page in pages)
        assert pool.used == len(references)
        assert pool.free + pool.cached + pool.used == pool.pages - 1
    for pages in owners:
        pool.release(pages)
    assert pool.used == 0 and pool.take(pool.pages) is None
    assert sorted(pool.take(pool.pages - 1)) == list(range(1, pool.pages))


def published(pool: PagePool, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Returns the pages of a sequence that nobody uses any more, and their hashes."""
    hashes, pages = chain(tokens, pool.page), pool.take(len(tokens) // pool.page)
    for page, hash in zip(pages, hashes, strict=True):
        pool.publish(page, hash)
    pool.release(pages)
    return pages, hashes


def test_the_oldest_prefix_loses_its_tail_first():
    pool = PagePool(7, page=2)
    old, new = (published(pool, [token] * 6)[1] for token in (1, 2))
    expected = [*old[::-1], *new[::-1]]
    while expected:
        pool.take(1)
        expected.pop(0)
        assert [hash in pool for hash in old + new] == [hash in expected for hash in old + new]


def test_a_shared_page_stays_until_its_last_owner_leaves():
    pool = PagePool(4, page=2)
    pages, hashes = published(pool, [1] * 4)
    one, other = pool.match(hashes), pool.match(hashes)
    assert one == other == pages and pool.used == 2
    pool.release(one)
    assert pool.used == 2 and pool.take(2) is None
    pool.release(other)
    assert (pool.free, pool.cached, pool.used) == (1, 2, 0)


def test_the_first_of_two_equal_pages_is_shared():
    pool = PagePool(4, page=2)
    one, other = pool.take(2)
    (hash,) = chain([1, 1], 2)
    pool.publish(one, hash)
    pool.publish(other, hash)
    pool.release([other])
    assert pool.free == 2 and pool.match([hash]) == [one]


def test_forgotten_pages_are_free_and_those_in_use_stay():
    pool = PagePool(6, page=2)
    _, idle = published(pool, [1] * 4)
    pages, hashes = pool.take(1), chain([2, 2], 2)
    pool.publish(pages[0], hashes[0])
    pool.forget()
    assert (pool.free, pool.cached, pool.used) == (4, 0, 1)
    assert pool.match(idle) == pool.match(hashes) == []
    pool.release(pages)
    assert pool.free == 5


def test_snapshots_without_pages_go_first_then_those_unused_for_longest():
    pool = PagePool(6, page=2, snapshots=2)
    pages, hashes = published(pool, [1] * 4)
    assert pool.last_snapshot(hashes) == (0, -1)
    slots = [pool.take_snapshot(hash) for hash in hashes]
    assert sorted(slots) == [0, 1] and pool.last_snapshot(hashes) == (2, slots[1])
    assert pool.last_snapshot(hashes[:1]) == (1, slots[0])  # now used later than the other
    assert pool.take_snapshot(b"new") == slots[1]
    assert pool.last_snapshot(hashes) == (1, slots[0])
    assert pool.take_snapshot(hashes[1]) == slots[1], "no page has the hash of the new one"
    assert pool.take_snapshot(hashes[1]) == slots[1], "one place for one state"
    pool.forget()
    assert pool.last_snapshot(hashes) == (0, -1) and pool.take_snapshot(hashes[0]) == 0


def test_a_page_released_twice_is_an_error():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.release([0, *pages])  # the null page is of nobody
    with pytest.raises(KeyError):
        pool.release(pages)
