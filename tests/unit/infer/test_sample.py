"""The sampler: laws of its noise, of thresholds without a sort, of rules, and of coupled drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

from mjax.infer.sample import (
    DrawRows,
    Draws,
    RowRules,
    Sampling,
    TokenCounts,
    biased,
    draw_tokens,
    draws_of,
    forbidden,
    kept_drafts,
    settings_of,
)
from mjax.infer.sampling import limits
from mjax.infer.sampling.limits import largest_reaching, likeliest, within_limits
from mjax.infer.sampling.noise import gumbel, noise
from tests.marks import slow

VOCAB = 83
program = jax.jit(draw_tokens, static_argnames="draws")


@jax.jit
def limited(z, settings):
    """Which logits stay, at temperatures above 0."""
    return within_limits(z, settings["temperature"][:, None], settings)


def rows_of(samplings, position=0, seed=0, index=None, **parts):
    size = len(samplings)
    numbers = np.arange(size) if index is None else np.full(size, index)
    stream = np.full(size, seed, np.uint32), np.asarray(numbers, np.int32)
    places = np.broadcast_to(np.asarray(position, np.int32), size)
    return DrawRows(settings_of(samplings), *stream, places, **parts)


def logits_of(rows, size=VOCAB, seed=1):
    return 3 * jax.random.normal(jax.random.key(seed), (rows, size))


# ---- noise -------------------------------------------------------------------------------------


def noise_of(streams, size):
    seed, index, position = np.asarray(streams).T
    return np.asarray(
        jax.jit(noise, static_argnums=3)(
            seed.astype(np.uint32), index.astype(np.int32), position.astype(np.int32), size
        )
    )


def test_noise_depends_on_seed_sample_position_and_token_alone():
    streams = [(s, i, p) for s in (0, 1, 2**32 - 1) for i in (0, 1, 7) for p in (0, 1, 100_000)]
    whole = noise_of(streams, 50)
    order = np.random.default_rng(0).permutation(len(streams))
    np.testing.assert_array_equal(noise_of(np.asarray(streams)[order], 50), whole[order])
    np.testing.assert_array_equal(noise_of(streams[5:6], 50)[0], whole[5])
    np.testing.assert_array_equal(noise_of(streams, 131)[:, :50], whole)
    assert len(np.unique(whole)) == whole.size, "no two places share a number"


def test_noise_is_exact_at_both_ends():
    """-log(-log(1 - u)) in fp64 with u and 1 - u as exact integers over 2^65."""
    rng = np.random.default_rng(0)
    shifts = rng.integers(0, 64, 4000)
    small = [int(rng.integers(2**63, 2**64, dtype=np.uint64)) >> int(s) for s in shifts]
    bits = [0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, *small]
    bits += [2**64 - 1 - b for b in small]
    high, low = (np.array([b >> 32 for b in bits]), np.array([b % 2**32 for b in bits]))
    found = np.asarray(gumbel(jnp.asarray(high, jnp.uint32), jnp.asarray(low, jnp.uint32)))

    def exact(b):
        rest = 2**65 - 2 * b - 1  # of 1 - u
        whole = -np.log1p(-(2 * b + 1) / 2**65) if b < 2**63 else -np.log(rest / 2**65)
        return -np.log(whole)

    np.testing.assert_allclose(found, [exact(b) for b in bits], atol=1e-6, rtol=1e-6)
    assert found.max() > 45 and found.min() < -3.8 and np.isfinite(found).all()


def test_noise_has_the_tails_of_gumbel():
    streams = [(3, i, p) for i in range(8) for p in range(4)]
    drawn = np.sort(noise_of(streams, 1 << 16).ravel())
    size = drawn.size
    for expected in (10, 100, 1_000, 10_000, size // 2):
        upper = -np.log(-np.log1p(-expected / size))
        lower = -np.log(-np.log(expected / size))
        for count in (size - np.searchsorted(drawn, upper), np.searchsorted(drawn, lower)):
            assert abs(count - expected) < 4 * np.sqrt(expected)
    levels = np.exp(-np.exp(-drawn.astype(np.float64)))
    assert np.abs(levels - (np.arange(size) + 0.5) / size).max() < 1.63 / np.sqrt(size)


@pytest.mark.parametrize("along", ["index", "position"])
def test_tokens_have_the_probabilities_of_softmax(along):
    z = np.array([1.0, -2.0, 0.5, 3.0, 2.5, -0.3, 0.0], np.float32)
    many = 20_000
    numbers = {along: np.arange(many, dtype=np.int32)}
    rest = {"index": np.zeros(many, np.int32), "position": np.zeros(many, np.int32)} | numbers
    settings = settings_of([Sampling(temperature=0.8)] * many)
    rows = DrawRows(settings, np.full(many, 5, np.uint32), **rest)
    tokens = program(jnp.tile(z, (many, 1)), rows, Draws(random=True)).token
    weights = np.exp(z.astype(np.float64) / 0.8)
    expected = many * weights / weights.sum()
    drawn = np.bincount(tokens, minlength=len(z))
    assert ((drawn - expected) ** 2 / expected).sum() < 22.5, "of 1,000 such tests one fails"


# ---- rows do not know each other ---------------------------------------------------------------

MIXED = [
    Sampling(),
    Sampling(1.0),
    Sampling(1.3, top_k=5),
    Sampling(0.7, top_p=0.8, repetition_penalty=1.4),
    Sampling(2.0, min_p=0.05, frequency_penalty=0.5, presence_penalty=-0.3),
]


def mixed_rows(size=VOCAB):
    rng = np.random.default_rng(2)
    prompt, outputs = rng.random((5, size)) < 0.2, rng.integers(0, 3, (5, size))
    bits = rng.integers(2**31, 2**32, (5, -(-VOCAB // 32)), np.uint32)
    bits[1] = 2**32 - 1
    ids = rng.integers(0, VOCAB, (5, 4)).astype(np.int32)
    rules = RowRules(ids, rng.normal(size=(5, 4)).astype(np.float32), bits, ids[:, ::-1] - 1)
    counts = TokenCounts(jnp.asarray(prompt), jnp.asarray(outputs, jnp.int32))
    return rows_of(MIXED, position=11, seed=9, counts=counts, rules=rules)


def test_a_row_gives_the_same_in_any_company():
    z, rows, draws = logits_of(5), mixed_rows(), Draws(True, True, True)
    whole = program(z, rows, draws)
    order = np.array([3, 0, 4, 4, 1])
    pick = functools.partial(jax.tree.map, lambda x: x[order])
    jax.tree.map(np.testing.assert_array_equal, program(z[order], pick(rows), draws), pick(whole))
    for row in (0, 3, 4):
        one = jax.tree.map(lambda x, r=row: x[r : r + 1], rows)
        own = draws_of([MIXED[row]])  # leaves out what this row does not need
        alone = program(z[row : row + 1], one, own)
        assert alone.token[0] == whole.token[row]
        np.testing.assert_allclose(alone.logprob[0], whole.logprob[row], rtol=2e-6)
        np.testing.assert_allclose(alone.processed[0], whole.processed[row], rtol=2e-6)


def test_a_padded_vocabulary_changes_no_token():
    wide = jnp.pad(logits_of(5), ((0, 0), (0, 45)), constant_values=-jnp.inf)
    rows = mixed_rows()
    counts = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 45))), rows.counts)
    padded = DrawRows(rows.settings, rows.seed, rows.index, rows.position, counts, rows.rules)
    draws = Draws(True, True, True)
    plain, found = program(logits_of(5), rows, draws), program(wide, padded, draws)
    np.testing.assert_array_equal(found.token, plain.token)
    np.testing.assert_allclose(found.processed, plain.processed, rtol=2e-6)


# ---- programs ----------------------------------------------------------------------------------


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner)


def test_a_program_computes_what_its_rows_need():
    def names(samplings):
        given = logits_of(len(samplings)), rows_of(samplings)
        made = jax.make_jaxpr(draw_tokens, static_argnums=2)(*given, draws_of(samplings))
        return set(primitives(made.jaxpr))

    waits = {"while", "cond"}  # for a predicate, which the host or a CUDA graph reads
    noisy, search, few = {"threefry2x32", "log1p"}, "bitcast_convert_type", "top_k"
    greedy = names([Sampling(), Sampling(top_k=5, top_p=0.5)])
    assert "argmax" in greedy and not greedy & {*waits, *noisy, search, few, "scatter-add"}
    hot = names([Sampling(), Sampling(1.0)])
    assert noisy <= hot and not hot & {*waits, search, few}
    cut = names([Sampling(1.0, top_k=5, top_p=0.5)])
    assert few in cut and not cut & {*waits, search}, "all logits are among the few"


def test_all_logits_are_searched_in_branches_alone():
    """Loops would not do: the device takes branches by itself, loops wait for the host."""
    wide = jax.ShapeDtypeStruct((2, 9000), jnp.float32)
    jaxpr = jax.make_jaxpr(limited.__wrapped__)(wide, settings_of([Sampling(1.0)] * 2)).jaxpr
    own = {equation.primitive.name for equation in jaxpr.eqns}
    search, every = "bitcast_convert_type", set(primitives(jaxpr))
    assert "cond" in own and search in every - own and not every & {"while", "scan"}


# ---- thresholds --------------------------------------------------------------------------------


def test_thresholds_are_those_of_sorting():
    """Weights are integers, so that sums are exact and targets are met to the unit."""
    rng = np.random.default_rng(0)
    pool = np.array([-np.inf, -3e38, -1.5, -1e-30, -0.0, 0.0, 2e-30, 0.1, 7.0, 3e38], np.float32)
    z = np.stack([
        rng.choice(pool, 200), rng.normal(size=200), rng.choice(pool[5:7], 200),
        np.round(rng.normal(size=200), 1), -np.exp(9 * rng.normal(size=200)), np.full(200, -2.5),
    ]).astype(np.float32)  # fmt: skip
    weights = rng.integers(0, 4, z.shape).astype(np.float32)
    found = jax.jit(lambda z, weights, target: largest_reaching(z, lambda _: weights, target))
    for target in (1, 2, 17, 100, 200, 250):
        bounds = np.asarray(found(z, weights, np.full((len(z), 1), target, np.float32)))
        for row, w, bound in zip(z, weights, bounds[:, 0], strict=True):
            reached = [v for v in np.unique(row) if w[row >= v].sum() >= target]
            assert bound == max(reached, default=-np.inf)


def sorted_limits(z, top_k, top_p, min_p):
    """Which tokens of one row stay, by sorting, in fp64."""
    falling = np.sort(z)[::-1]
    least = falling[min(top_k, len(z)) - 1] if top_k else -np.inf
    keep = z >= least
    masses = np.cumsum([0, *np.where(falling >= least, np.exp(falling - z.max()), 0)])
    above = masses[np.searchsorted(-falling, -z)] / masses[-1]  # of larger logits
    keep &= (above < top_p) | (top_p >= 1)
    return keep & (z - z.max() >= (np.log(min_p) if min_p else -np.inf))


@pytest.mark.parametrize("digits", [None, 1, 0])
def test_limits_keep_what_sorting_keeps(digits):
    """With and without ties: logits rounded to `digits`."""
    rng = np.random.default_rng(digits or 5)
    z = rng.normal(size=(60, 301)) * 2
    z = (z if digits is None else np.round(z, digits)).astype(np.float32)
    z[:20, 100:] = -np.inf
    settings = {
        "top_k": rng.choice([0, 1, 7, 50, 400], 60).astype(np.int32),
        "top_p": rng.choice([1.0, 0.999, 0.9, 0.3, 1e-6], 60).astype(np.float32),
        "min_p": rng.choice([0.0, 0.013, 0.3, 1.0], 60).astype(np.float32),
    }
    hot = {"temperature": np.ones(60, np.float32)}
    found = np.isfinite(z) & limited(z, settings | hot)
    for row, keep, *one in zip(z, found, *settings.values(), strict=True):
        expected = sorted_limits(row.astype(np.float64), *one) & np.isfinite(row)
        np.testing.assert_array_equal(keep, expected)
    assert (found.sum(1) > 1).sum() > 15 and (found.sum(1) < 301).sum() > 40


WIDE = 6_000  # tokens: more than XLA sorts at once


def wide_rows():
    """Rows of logits [9, WIDE] by name: nuclei of few tokens and of most, ties, masks."""
    rng = np.random.default_rng(3)
    normal = rng.normal(size=(9, WIDE))
    of = dict(zip(("peaked", "flat", "tied", "steps", "rest"), normal, strict=False))
    rows = {
        "peaked": 4 * of["peaked"],
        "flat": 0.1 * of["flat"],
        "tied": np.round(3 * of["tied"], 1),
        "steps": np.round(of["steps"]),
        "equal": np.full(WIDE, -2.5),
        "one": np.where(np.arange(WIDE) == 4_321, 1.0, -np.inf),
        "masked": np.where(np.arange(WIDE) % 1000 < 3, of["rest"], -np.inf),
        "half": np.where(np.arange(WIDE) % 2 == 1, of["rest"], -np.inf),
        "near": -1e-30 * np.arange(WIDE),  # differences that weights do not show
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


LIMITS = [
    dict(top_k=1), dict(top_k=511), dict(top_k=512), dict(top_k=513), dict(top_k=WIDE - 1),
    dict(top_k=WIDE), dict(top_k=2**31 - 1), dict(top_p=0.9), dict(top_p=1e-6), dict(top_p=0.999),
    dict(min_p=0.02), dict(min_p=1.0), dict(top_k=20, top_p=0.95), dict(top_k=3000, top_p=0.7),
    dict(top_k=600, min_p=0.3), dict(top_p=0.8, min_p=0.05), dict(),
]  # fmt: skip


@slow
@pytest.mark.grid
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_limits_of_a_large_vocabulary_keep_what_sorting_keeps(temperature):
    """Sums in fp32 may miss a bound by a millionth, so sets lie between those of two bounds."""
    sure = 0
    for name, row in wide_rows().items():
        samplings = [Sampling(temperature, **how) for how in LIMITS]
        z = np.tile(row, (len(LIMITS), 1))
        found = np.isfinite(z) & limited(z, settings_of(samplings))
        left = (row - row.max().astype(np.float64)) / temperature
        for s, keep in zip(samplings, found, strict=True):
            few, many = (
                sorted_limits(left, s.top_k, *near(s, by)) & np.isfinite(left)
                for by in (1 - 1e-5, 1 + 1e-5)
            )
            assert (few <= keep).all() and (keep <= many).all(), (name, s)
            sure += (few == many).all()
    assert sure > 0.8 * len(wide_rows()) * len(LIMITS)


def near(s, factor):
    """Top-p and min-p that keep a little more or less; all, or the likeliest, stay as they are."""
    top_p = s.top_p * factor if s.top_p < 1 else 1.0
    return top_p, min(s.min_p / factor, 1.0)


def test_a_row_is_limited_the_same_beside_one_whose_nucleus_is_large():
    rows, settings = wide_rows(), settings_of([Sampling(1.0, top_p=0.9)] * 2)
    for other in ("tied", "flat"):
        pair = limited(np.stack([rows["peaked"], rows[other]]), settings)
        alone = limited(np.stack([rows["peaked"], rows["peaked"]]), settings)
        np.testing.assert_array_equal(pair[0], alone[0])
        assert (pair.sum(1) > 512).tolist() == [False, other == "flat"]


def test_all_logits_are_searched_for_drawn_rows_with_large_nuclei_alone(monkeypatch):
    """Not for greedy rows, nor for those without a request, whose logits may be NaN."""
    rows, searches = wide_rows(), []

    def search(*given):
        jax.debug.callback(lambda: searches.append(1))
        return largest_reaching(*given)

    monkeypatch.setattr(limits, "largest_reaching", search)
    drawn = jax.jit(lambda z, rows: draw_tokens(z, rows, Draws(True, True)).token)
    z = np.stack([rows["peaked"], rows["flat"], np.full(WIDE, np.nan, np.float32), rows["flat"]])
    drawn_row, greedy = Sampling(1.0, top_p=0.9), Sampling(top_k=600, top_p=0.9)
    many = Sampling(1.0, top_k=600, top_p=0.9)
    for last, expected in ((Sampling(1.0, top_k=9), 0), (drawn_row, 1), (many, 2)):
        searches.clear()
        jax.block_until_ready(drawn(z, rows_of([drawn_row, greedy, greedy, last])))
        jax.effects_barrier()
        assert len(searches) == expected, last


def test_greedy_rows_have_no_limits():
    z = np.stack([row for row in wide_rows().values() if np.isfinite(row).all()])
    rows = rows_of([Sampling(top_k=3, top_p=0.2, min_p=0.5)] * len(z))
    plain, found = (program(z, rows, draws) for draws in (Draws(), Draws(True, True)))
    np.testing.assert_array_equal(found.token, plain.token)
    np.testing.assert_allclose(found.processed, plain.processed, rtol=2e-6)


@slow
def test_devices_search_for_their_rows_alone():
    """Rows in lanes of two devices, of which one has a large nucleus."""
    rows = wide_rows()
    z = np.stack([rows[name] for name in ("peaked", "tied", "flat", "peaked")])
    settings = settings_of([Sampling(1.0, top_p=0.9, top_k=k) for k in (0, 20, 0, 5)])
    mesh, lane = Mesh(jax.devices()[:2], "dp"), PartitionSpec("dp")
    how = dict(mesh=mesh, in_specs=lane, out_specs=lane, check_vma=False)
    lanes = jax.shard_map(limited, **how)
    np.testing.assert_array_equal(jax.jit(lanes)(z, settings), limited(z, settings))


# ---- rules, penalties, and the order -----------------------------------------------------------


def test_bias_allowed_and_banned_tokens():
    z = logits_of(3, 70)
    bits = np.array([[2**32 - 1] * 3, [0b1001, 1 << 31, 0b10], [2**32 - 1] * 3], np.uint32)
    ids = np.array([[4, 4, 69, -1], [3, 0, -1, -1], [-1] * 4], np.int32)
    values = np.array([[1.0, 2, -5, 9], [7, 0, 9, 9], [9] * 4], np.float32)
    banned = np.array([[-1, -1], [3, -1], [69, 0]], np.int32)
    rules = RowRules(ids, values, bits, banned)
    found, expected = forbidden(biased(z, rules), rules), np.array(z)
    expected[0, 4] += 3
    expected[0, 69] -= 5
    keep = np.isin(np.arange(70), [0, 63, 65])
    expected[1] = np.where(keep, z[1], -np.inf)
    expected[2, [0, 69]] = -np.inf
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    short = forbidden(z, RowRules(allowed=bits[:, :1]))
    assert np.isneginf(short[:, 32:]).all() and np.isfinite(short[0, :32]).all()


def vllm(z, sampling, prompt, outputs, rules, row):
    """Log-probabilities of one row by vLLM's order of rules, in fp64 and by sorting."""
    z = np.asarray(z, np.float64).copy()
    allowed = np.unpackbits(rules.allowed[row].view(np.uint8), bitorder="little")[: len(z)]
    z[allowed == 0] = -np.inf
    z[[i for i in rules.banned[row] if i >= 0]] = -np.inf
    for i, value in zip(rules.bias_ids[row], rules.bias_values[row], strict=True):
        z[i] += value
    seen, factor = prompt | (outputs > 0), sampling.repetition_penalty
    z = np.where(seen, np.where(z > 0, z / factor, z * factor), z)
    z -= sampling.frequency_penalty * outputs + sampling.presence_penalty * (outputs > 0)
    z /= sampling.temperature or 1
    if sampling.temperature:
        probs = np.exp(z - z.max())
        z[probs < sampling.min_p] = -np.inf
        z[~sorted_limits(z, sampling.top_k, sampling.top_p, 0)] = -np.inf
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def test_draws_are_those_of_vllms_order():
    """Its min-p comes before top-p, so no row here sets both; tokens by our noise."""
    rows = mixed_rows()
    for seed in range(6):
        z = logits_of(5, seed=seed)
        found = program(z, rows, Draws(True, True, True))
        for row, sampling in enumerate(MIXED):
            counts = np.asarray(rows.counts.prompt[row]), np.asarray(rows.counts.outputs[row])
            log_probs = vllm(z[row], sampling, *counts, rows.rules, row)
            noisy = log_probs + noise_of([(9, row, 11)], VOCAB)[0] * (sampling.temperature > 0)
            assert found.token[row] == noisy.argmax()
            np.testing.assert_allclose(found.processed[row], log_probs[noisy.argmax()], atol=2e-5)


def test_the_likeliest_tokens_come_with_their_log_probs():
    z = logits_of(4)
    found = program(z, rows_of([Sampling(1.0, top_k=2)] * 4), Draws(True, True, top=6))
    scores = np.asarray(jax.nn.log_softmax(z))
    order = np.argsort(-scores, axis=1)[:, :6]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(scores, order, 1), rtol=1e-5)
    np.testing.assert_allclose(found.logprob, scores[np.arange(4), found.token], rtol=1e-5)
    assert (found.processed > found.logprob).all(), "of two tokens that are left"


@pytest.mark.parametrize("count", [9, 2000])
def test_the_likeliest_of_a_large_vocabulary_are_those_of_sorting(count):
    """2,000 blocks of five are more than one sort takes."""
    rng, size = np.random.default_rng(0), 20_001
    z = np.round(rng.normal(size=(6, size)), 1).astype(np.float32)  # with many ties
    z[1] = 0.0
    z[2, 5:] = -np.inf
    z[3] = np.arange(size)
    z[4, size - 2 :] = 9
    order = np.argsort(-z, axis=1, kind="stable")[:, :count]
    found, tokens = jax.jit(likeliest, static_argnums=1)(z, count)
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(found, np.take_along_axis(z, order, 1))


# ---- drafts ------------------------------------------------------------------------------------


def test_drafts_are_accepted_up_to_the_first_that_differs():
    drafts = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, -1, -1]])
    tokens = np.array([[1, 2, 3, 4]] * 4)
    np.testing.assert_array_equal(kept_drafts(drafts, tokens), [3, 1, 0, 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_drafts_give_the_tokens_of_no_drafts(temperature):
    """A model of the last two tokens; drafts are right most of the time."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(11, 11, 11)) * 2, jnp.float32)
    sampling = Sampling(temperature, top_p=0.95)
    step = jax.jit(
        lambda before, last, rows: draw_tokens(table[before, last], rows, draws_of([sampling]))
    )

    def drawn(text, extra):
        """The tokens at the places after `text` and after each of `extra`."""
        whole, places = [*text, *extra], np.arange(len(text), len(text) + len(extra) + 1)
        rows = rows_of([sampling] * len(places), position=places, seed=3, index=1)
        last = np.array(whole)
        return np.asarray(step(last[places - 2], last[places - 1], rows).token)

    plain = [4, 2]
    while len(plain) < 60:
        plain.append(int(drawn(plain, [])[0]))
    text, rng, kept = [4, 2], np.random.default_rng(1), []
    while len(text) < 60:
        right = plain[len(text) : len(text) + 3]
        drafts = [t if rng.random() < 0.7 else int(rng.integers(11)) for t in right]
        tokens = drawn(text, drafts)
        kept.append(int(kept_drafts(np.array([drafts]), tokens[None])[0]) if drafts else 0)
        text += tokens[: kept[-1] + 1].tolist()
    assert text[:60] == plain and 20 < sum(kept) < 55
    assert len(set(plain)) > 4
