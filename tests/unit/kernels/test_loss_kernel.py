"""The loss's own kernel against fp64, in Triton's interpreter; when it is called; on a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.loss import cross_entropy as ce
from mjax.kernels.loss import rows as kernel
from mjax.kernels.loss.log_probs import token_scores
from mjax.kernels.loss.rows import LossTile, Terms, rows
from mjax.prove import Cell, deviation, make_trainer, measure
from mjax.sharding.collectives import LOCAL
from tests.devices import GPU, choose_for
from tests.marks import exhaustive
from tests.triton_interpreter import interpret

# Blocks of 256 columns; programs that have one row more than others, or none to spare.
TILE = LossTile(warps=1, loads=2, programs=3)
KINDS = [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}]
# tokens, columns, vocabulary: fewer columns than a block, several blocks, several of padding
SHAPES = [
    (7, 128, 128, "float32"),
    (5, 384, 251, "bfloat16"),
    (3, 1408, 1300, "bfloat16"),
    (4, 1280, 513, "float32"),
    (1, 640, 1, "bfloat16"),
    (5, 384, 251, "float16"),
]


def draw(tokens, columns, vocab, size=3.0):
    """Logits, NaN where there is no vocabulary, labels at both ends, a mask with zeros."""
    rng = np.random.default_rng(columns + vocab)
    z = (
        jnp.asarray(size * rng.normal(size=(tokens, columns)), jnp.float32)
        .at[:, vocab:]
        .set(jnp.nan)
    )
    labels = rng.integers(0, vocab, tokens)
    labels[0], labels[-1] = 0, vocab - 1
    mask = rng.random(tokens) * (rng.random(tokens) < 0.7)
    return z, jnp.asarray(labels, jnp.int32), jnp.asarray(mask, jnp.float32)


def wide(z, labels, mask, terms):
    """In fp64: the losses, and by autodiff their gradient."""

    def losses(z):
        z = z[:, : terms.vocab_size]
        if terms.softcap is not None:
            z = terms.softcap * jnp.tanh(z / terms.softcap)
        log_z, e = jax.nn.logsumexp(z, -1), terms.label_smoothing
        target = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        smooth = e * z.mean(-1) if e else 0.0
        return mask * (log_z - (1 - e) * target - smooth + terms.z_loss * log_z**2)

    with jax.enable_x64(True):
        z = jnp.nan_to_num(z.astype(jnp.float64), posinf=np.inf, neginf=-np.inf)
        out, pull = jax.vjp(losses, z)
        return np.asarray(out), np.asarray(pull(jnp.ones_like(out))[0])


def run(z, labels, mask, terms, dtype="float32", tile=TILE):
    """Into rows 2.. of a poisoned array that is 3 rows longer, which must stay as they were."""
    t, width = z.shape
    d_z = jnp.full((t + 3, width), 7.0, dtype)
    first = jnp.asarray([2], jnp.int32)
    losses, d_z = rows(z, labels, mask, d_z, first, terms, tile)
    assert (d_z[:2] == 7).all() and (d_z[t + 2 :] == 7).all()
    return np.asarray(losses), np.asarray(d_z[2 : t + 2])


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "+".join(k) or "plain")
@pytest.mark.parametrize("tokens, columns, vocab, dtype", SHAPES)
def test_equals_fp64(monkeypatch, tokens, columns, vocab, dtype, kind):
    interpret(monkeypatch)
    terms, inputs = Terms(vocab, **kind), draw(tokens, columns, vocab)
    losses, d_z = run(*inputs, terms, dtype)
    expected, gradient = wide(*inputs, terms)
    assert expected.dtype == np.float64 and d_z.dtype == dtype and losses.dtype == np.float32
    np.testing.assert_allclose(losses, expected, rtol=3e-6, atol=3e-6)
    ulp = float(jnp.finfo(dtype).eps)
    error = np.abs(d_z.astype(np.float64) - gradient)
    assert (error <= 0.51 * ulp * np.abs(gradient) + 1e-6).all()
    assert (d_z[:, vocab:] == 0).all() and (d_z[np.asarray(inputs[2]) == 0] == 0).all()
    again = run(*inputs, terms, dtype)
    assert (losses == again[0]).all() and (d_z == again[1]).all()


def test_extreme_logits(monkeypatch):
    """Rows of unlike size, one far above the others, early and late; some -inf; all equal."""
    interpret(monkeypatch)
    z, labels, mask = draw(6, 1408, 1300)
    scale = jnp.asarray([1e4, 1e4, 1e-4, 1.0, 1.0, 0.0])
    z = (z * scale[:, None]).at[0, 3].set(-1e4).at[1, 1299].set(1e4).at[3, 5].set(1e4)
    z = z.at[4, 7:900].set(-jnp.inf)
    labels, mask = labels.at[4].set(1200), jnp.ones_like(mask)
    losses, d_z = run(z, labels, mask, Terms(1300))
    expected, gradient = wide(z, labels, mask, Terms(1300))
    assert np.isfinite(expected).all() and expected.max() > 1e4
    np.testing.assert_allclose(losses, expected, rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(d_z, gradient, rtol=1e-5, atol=1e-6)


@pytest.fixture
def on(monkeypatch):
    """The kernel for every loss, in the interpreter, with parts of chunks."""
    choose_for(monkeypatch, GPU, "loss_rows")
    interpret(monkeypatch)
    monkeypatch.setitem(chooser.FEWEST, "loss_rows", 1)
    monkeypatch.setattr(chooser, "ALIGNED", 1)
    monkeypatch.setattr(kernel, "rows", functools.partial(rows, tile=TILE))
    monkeypatch.setattr(ce, "_TILE", 4)
    monkeypatch.setattr(ce, "_PART_ELEMENTS", 1)


def loss(x, w, labels, mask, terms, chunk):
    return ce.cross_entropy(x, w, labels, mask, terms=terms, parallel=LOCAL, chunk=chunk)


@pytest.mark.parametrize("kind", [{}, KINDS[-1]], ids=["plain", "all"])
@pytest.mark.parametrize("tokens, vocab, padded, chunk", [(37, 251, 256, 8), (5, 3, 128, None)])
def test_the_whole_loss_is_what_xla_makes_it(tokens, vocab, padded, chunk, kind, request):
    rng = np.random.default_rng(tokens)
    x, w = (jnp.asarray(rng.normal(size=(n, 24)), jnp.float32) for n in (tokens, padded))
    w = w.at[vocab:].set(1e3)  # poison: padding rows must not take part
    _, labels, mask = draw(tokens, padded, vocab)

    def traced(gradient):
        """Anew: jax remembers what it made of a function."""
        f = functools.partial(loss, terms=Terms(vocab, **kind), chunk=chunk)
        f = jax.value_and_grad(f, (0, 1)) if gradient else f
        return jax.jit(f).trace(x, w, labels, mask)

    def calls(made):
        return len(re.findall(r"pure_callback\[", str(made.jaxpr)))

    def run(made):
        return made.lower().compile()(x, w, labels, mask)

    plain = traced(True)
    assert calls(plain) == 0, "there is no GPU here"
    expected = run(plain)
    request.getfixturevalue("on")
    ours = traced(True)
    assert calls(traced(False)) == 0 and calls(ours) == 1  # a forward alone leaves it to XLA
    got = run(ours)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=3e-6 * np.abs(b).max())
    assert np.abs(got[1][1][vocab:]).max(initial=0) == 0


@pytest.mark.parametrize("tokens, chunk, keeps", [(37, None, True), (37, 8, False)])
@pytest.mark.parametrize("kind", [{}, KINDS[-1] | {"temperature": 0.7}], ids=["plain", "all"])
def test_scores_keep_their_gradient_where_a_chunk_holds_all(tokens, chunk, keeps, kind, request):
    """Then three matmuls of the vocabulary do; four make the logits anew."""
    rng = np.random.default_rng(tokens)
    x, w = (jnp.asarray(rng.normal(size=(n, 24)), jnp.float32) for n in (tokens, 256))
    w, bias = w.at[251:].set(1e3), jnp.asarray(rng.normal(size=256), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 251, tokens), jnp.int32)

    def loss(x, w, bias):
        terms = Terms(251, **kind)
        more = {"terms": terms, "parallel": LOCAL, "chunk": chunk, "bias": bias, "keep": True}
        return jnp.sum(jnp.sin(token_scores(x, w, labels, **more).log_p))

    def traced(gradient):
        f = jax.value_and_grad(loss, (0, 1, 2)) if gradient else loss
        return jax.jit(lambda *given: f(*given)).trace(x, w, bias)  # anew

    def counts(made):
        return [
            len(re.findall(name, str(made.jaxpr))) for name in (r"pure_callback\[", "dot_general")
        ]

    plain = traced(True)
    assert counts(plain) == [0, 4]
    request.getfixturevalue("on")
    ours = traced(True)
    assert counts(traced(False)) == [0, 1] and counts(ours) == ([1, 3] if keeps else [0, 4])
    got, want = (made.lower().compile()(x, w, bias) for made in (ours, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=3e-6 * np.abs(b).max())


def test_only_what_fits_takes_it(on, monkeypatch):
    monkeypatch.undo()
    assert kernel.fits(16384, 151936, 1) and kernel.fits(32768, 50304, 1, 8192)
    assert not kernel.fits(16384, 151936, 2) and not kernel.fits(16384, 50257, 1)
    assert not kernel.fits(64, 50304, 1) and not kernel.fits(2**20, 151936, 1, 16384)
    assert not kernel.supports_rows(16384, 151936, 1), "there is no GPU here"


@pytest.mark.parametrize("tokens, vocab, chunk", [(85179, 222336, 9500), (152345, 28160, 76212)])
def test_what_is_rounded_up_stays_within_its_offsets(tokens, vocab, chunk):
    """A chunk of 9500 becomes 9728 tokens, whose last logits 32 bits do not reach."""
    assert ce.cut_of(tokens, vocab, chunk, fused=True).chunk * vocab > 2**31 - 1 >= chunk * vocab
    assert not kernel.fits(tokens, vocab, 1, chunk)
    assert kernel.fits(tokens, vocab, 1, chunk // 3)


@pytest.mark.parametrize("tokens", [1, 37, 4096, 4999, 16384, 32768, 40000])
@pytest.mark.parametrize("vocab", [50304, 128256, 151936, 262144])
@pytest.mark.parametrize("chunk", [None, 48, 3000])
def test_parts_divide_chunks_and_bound_memory(tokens, vocab, chunk):
    cut = ce.cut_of(tokens, vocab, chunk, fused=True)
    assert cut.chunk % cut.part == 0 and cut.part * vocab <= max(ce._PART_ELEMENTS, 256 * vocab)
    assert -(-tokens // cut.chunk) * cut.chunk <= max(1.1 * tokens, tokens + 256)
    if tokens % 256 == 0 and chunk is None:
        assert cut.bytes(vocab) < 1.75e9 and tokens % cut.part == 0


@exhaustive
def test_a_step_on_a_mesh_is_what_it_was(request):
    """In the manual region, on dp and cp, a padded vocabulary, against XLA on one device."""
    before = measure(make_trainer("windows", Cell(), "train.loss_chunk=16"), 1).first
    request.getfixturevalue("on")
    mesh = Cell({"dp": 2}, 1, 2)
    assert (
        deviation(measure(make_trainer("windows", mesh, "train.loss_chunk=16"), 1).first, before)
        < 1e-5
    )
