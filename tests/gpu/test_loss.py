"""The loss and its kernel on a GPU against fp64 at vocabularies of real models; bit-equal twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.loss import rows as kernel
from mjax.kernels.loss.cross_entropy import Terms, cross_entropy, loss_reference, token_sums
from mjax.sharding.collectives import LOCAL
from tests.clipped_ratio import ClippedRatio

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

ALL = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0}
# tokens, columns, vocabulary: fewer rows than programs, one more; padding within and of a block
CASES = [
    (140, 151936, 151936, {}),
    (133, 128256, 128256, {"z_loss": 1e-3}),
    (517, 50304, 50257, {}),
    (64, 151936, 100000, ALL),
    (132, 256, 251, ALL),
]


@pytest.mark.parametrize("tokens, columns, vocab, kind", CASES)
def test_rows_equal_fp64_and_themselves(tokens, columns, vocab, kind):
    terms = Terms(vocab, **kind)
    keys = jax.random.split(jax.random.key(vocab), 4)
    z = jax.random.normal(keys[0], (tokens, columns)) * 10.0 ** jax.random.randint(
        keys[1], (tokens, 1), -2, 3
    )
    z = z.at[:, vocab:].set(jnp.nan)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab).at[0].set(0).at[-1].set(vocab - 1)
    mask = jax.random.bernoulli(keys[3], 0.8, (tokens,)).astype(jnp.float32)
    first = jnp.asarray([3], jnp.int32)

    @jax.jit
    def mine(z):
        d_z = jnp.full((tokens + 5, columns), jnp.nan, jnp.bfloat16)
        return kernel.rows(z, labels, mask, d_z, first, terms)

    losses, d_z = mine(z)
    assert jnp.isnan(d_z[:3]).all() and jnp.isnan(d_z[tokens + 3 :]).all()
    own = d_z[3 : tokens + 3]
    assert (own[:, vocab:] == 0).all()
    with jax.enable_x64(True):
        wide, gradient = _wide(terms, z[:, :vocab].astype(jnp.float64), labels, mask)
        error = jnp.abs(own[:, :vocab].astype(jnp.float64) - gradient)
        most = float((error - 0.505 * 2.0**-7 * jnp.abs(gradient)).max())
        np.testing.assert_allclose(losses, np.asarray(wide), rtol=1e-5, atol=1e-4)
    assert most <= 1e-5
    again = mine(z)
    assert (losses == again[0]).all() and (own == again[1][3 : tokens + 3]).all()


@functools.partial(jax.jit, static_argnums=0)
def _wide(terms, z, labels, mask):
    def losses(z):
        if terms.softcap is not None:
            z = terms.softcap * jnp.tanh(z / terms.softcap)
        log_z, e = jax.nn.logsumexp(z, -1), terms.label_smoothing
        target = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return mask * (log_z - (1 - e) * target - e * z.mean(-1) + terms.z_loss * log_z**2)

    out, pull = jax.vjp(losses, z)
    return out, pull(jnp.ones_like(out))[0]


@pytest.mark.parametrize("kind", [{}, ALL], ids=["plain", "all"])
def test_the_loss_equals_fp64_with_parts_and_chunks(kind):
    """Tokens that fill no chunk, chunks of several parts, a padded vocabulary."""
    tokens, columns, vocab, width = 2500, 50304, 50257, 256
    keys = jax.random.split(jax.random.key(1), 4)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (columns, width), jnp.bfloat16) * 0.2
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    mask = jax.random.bernoulli(keys[3], 0.8, (tokens,)).astype(jnp.float32)
    terms = Terms(vocab, **kind)
    assert kernel.supports_rows(tokens, columns, 1, 1024)
    ours = functools.partial(cross_entropy, terms=terms, parallel=LOCAL, chunk=1024)
    mine = jax.jit(jax.value_and_grad(ours, (0, 1)))
    got = jax.tree.leaves(mine(x, w, labels, mask))
    with jax.enable_x64(True):
        theirs = jax.jit(jax.value_and_grad(functools.partial(loss_reference, terms=terms), (0, 1)))
        inputs = x.astype(jnp.float64), w.astype(jnp.float64), labels, mask
        expected = jax.tree.leaves(theirs(*inputs))
        for a, e, bound in zip(got, expected, (1e-5, 8e-3, 8e-3), strict=True):
            assert float(jnp.abs(a.astype(jnp.float64) - e).max() / jnp.abs(e).max()) <= bound
    again = jax.tree.leaves(mine(x, w, labels, mask))
    assert all((a == b).all() for a, b in zip(got, again, strict=True))


def test_a_token_function_equals_fp64_by_our_kernel():
    """A clipped ratio at a temperature, with a softcap: slopes scale rows of x and of d_x."""
    tokens, columns, vocab, width = 2500, 50304, 50257, 256
    keys = jax.random.split(jax.random.key(2), 6)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (columns, width), jnp.bfloat16) * 0.2
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    mask = jax.random.uniform(keys[3], (tokens,))
    old = -11 + jax.random.normal(keys[4], (tokens,))
    fields = {"old_log_prob": old, "advantage": jax.random.normal(keys[5], (tokens,))}
    terms = Terms(vocab, softcap=30.0, temperature=0.7)

    def ours(x, w):
        more = {"terms": terms, "parallel": LOCAL, "chunk": 1024}
        return token_sums(x, w, labels, mask, ClippedRatio(), fields, **more)["loss"]

    def theirs(x, w):
        z = terms.softcap * jnp.tanh((x @ w.T)[:, :vocab] / terms.softcap)
        log_p = jax.nn.log_softmax(z / terms.temperature)
        log_p = jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0]
        ratio, advantage = jnp.exp(log_p - old), fields["advantage"]
        loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return (loss * mask).sum()

    mine = jax.jit(jax.value_and_grad(ours, (0, 1)))
    assert "loss_rows" in mine.lower(x, w).compile().as_text()
    got = jax.tree.leaves(mine(x, w))
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64), w.astype(jnp.float64)
        expected = jax.tree.leaves(jax.jit(jax.value_and_grad(theirs, (0, 1)))(*wide))
        for a, e, bound in zip(got, expected, (1e-4, 1e-2, 1e-2), strict=True):
            assert float(jnp.abs(a.astype(jnp.float64) - e).max() / jnp.abs(e).max()) <= bound


def test_memory():
    """K3: the fp32 gradient of the head, 2.5 GB, and at most 0.5 GB more."""
    shaped = jax.ShapeDtypeStruct
    x, w = shaped((16384, 4096), jnp.bfloat16), shaped((151936, 4096), jnp.bfloat16)
    labels, mask = shaped((16384,), jnp.int32), shaped((16384,), jnp.float32)
    ours = functools.partial(cross_entropy, terms=Terms(151936), parallel=LOCAL)
    made = jax.jit(jax.value_and_grad(ours, (0, 1))).lower(x, w, labels, mask).compile()
    assert "loss_rows" in made.as_text()
    assert 2.4e9 < made.memory_analysis().temp_size_in_bytes < 3.0e9
