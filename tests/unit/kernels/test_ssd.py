"""The scan in chunks and the convolution, forward and backward, against plain recurrences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.recurrence import chunks
from mjax.kernels.recurrence.causal_conv import causal_conv, last_tokens, plain_conv
from mjax.kernels.recurrence.ssd import SsdInputs, ssd, ssd_final, ssd_step
from tests.marks import exhaustive, quick, slow


@pytest.fixture
def fp64():
    with jax.enable_x64(True):
        yield


def draw(length, heads, groups, decay=1.0, batch=2, size=3, state=5, dtype=np.float64, seed=0):
    """(inputs, starts, initial); `decay` scales dt * a."""
    rng = np.random.default_rng(seed + length)
    b, c = (rng.normal(size=(batch, length, groups, state)) for _ in range(2))
    inputs = SsdInputs(
        rng.normal(size=(batch, length, heads, size)),
        rng.random((batch, length, heads)),
        -decay * rng.uniform(0.5, 2, heads),
        b,
        c,
    )
    inputs = SsdInputs(*(jnp.asarray(v, dtype) for v in inputs))
    starts = jnp.asarray(rng.random((batch, length)) < 0.2)
    initial = jnp.asarray(rng.normal(size=(batch, heads, size, state)), dtype)
    return inputs, starts, initial


def ssd_recurrence(inputs, starts=None, initial=None):
    """`ssd`, a token after the other: the oracle of the form in chunks."""
    x, dt, a, b, c = inputs
    if initial is None:
        initial = jnp.zeros(
            (*x.shape[:1], *x.shape[2:], b.shape[-1]), jnp.promote_types(x.dtype, jnp.float32)
        )
    if starts is None:
        starts = jnp.zeros(x.shape[:2], bool)

    def step(state, token):
        x, dt, b, c, start = token
        state = jnp.where(start[:, None, None, None], 0, state)
        return ssd_step(state, SsdInputs(x, dt, a, b, c))

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c, starts))
    final, y = jax.lax.scan(step, initial, tokens)
    return jnp.moveaxis(y, 0, 1), final


def gradients(function, inputs, initial, seed=1):
    """(outputs, gradients of inputs and initial) of a random sum of y and the final state."""
    rng = np.random.default_rng(seed)
    y, final = jax.eval_shape(function, inputs, initial)
    to_y, to_final = (jnp.asarray(rng.normal(size=v.shape), v.dtype) for v in (y, final))

    def total(inputs, initial):
        y, final = function(inputs, initial)
        return jnp.sum(y * to_y) + jnp.sum(final * to_final), (y, final)

    made, outputs = jax.jit(jax.grad(total, (0, 1), has_aux=True))(inputs, initial)
    return outputs, made


def near(got, wanted, bound):
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = max(float(np.abs(right).max()), 1e-30)
        np.testing.assert_allclose(mine, right, rtol=0, atol=bound * scale)


# length, heads, groups, chunk, decay, packed: lengths that are no multiple of the chunk, one token,
# a chunk longer than the sequence, states that stay and states that are gone at once.
CASES = [
    (24, 4, 2, 8, 1.0, False),
    (23, 4, 2, 8, 1.0, True),
    (1, 2, 1, 8, 1.0, True),
    (7, 6, 3, 64, 1.0, True),
    (33, 4, 4, 5, 1e-6, True),
    (33, 4, 1, 16, 40.0, False),
    (19, 4, 1, 1, 0.1, True),
]


@pytest.mark.grid
@pytest.mark.parametrize("length, heads, groups, chunk, decay, packed", CASES)
def test_chunks_equal_the_recurrence(fp64, length, heads, groups, chunk, decay, packed):
    inputs, starts, initial = draw(length, heads, groups, decay)
    starts = starts if packed else None

    def chunked(inputs, initial):
        return ssd(inputs, chunk=chunk, starts=starts, initial=initial)

    def one_by_one(inputs, initial):
        return ssd_recurrence(inputs, starts, initial)

    near(gradients(chunked, inputs, initial), gradients(one_by_one, inputs, initial), 1e-12)


def test_blocks_of_chunks_change_nothing(fp64, monkeypatch):
    inputs, starts, initial = draw(45, 4, 2)

    def chunked(inputs, initial):
        return ssd(inputs, chunk=8, starts=starts, initial=initial)

    wanted = gradients(chunked, inputs, initial)
    monkeypatch.setattr(chunks, "BLOCK_BYTES", 5 * 4 * 8 * 8 * 8)  # of 12 chunks 5 at a time
    assert "while" in jax.jit(chunked).lower(inputs, initial).as_text()
    near(gradients(chunked, inputs, initial), wanted, 1e-13)


@slow
def test_the_chunk_changes_rounding_only():
    inputs, starts, initial = draw(96, 4, 2, 0.1, dtype=np.float32)
    made = [ssd(inputs, chunk=n, starts=starts, initial=initial) for n in (4, 32, 128)]
    near(made[1:], [made[0], made[0]], 1e-5)


def test_bfloat16_stays_near_the_recurrence():
    inputs, starts, initial = draw(64, 4, 2, 0.1, size=16, state=16, dtype=np.float32)
    low = SsdInputs(inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c)
    x, b, c = (v.astype(jnp.bfloat16) for v in (inputs.x, inputs.b, inputs.c))
    low = low._replace(x=x, b=b, c=c)
    exact = low._replace(**{k: getattr(low, k).astype(jnp.float32) for k in "xbc"})

    def chunked(inputs, initial):
        return ssd(inputs, chunk=16, starts=starts, initial=initial)

    def one_by_one(inputs, initial):
        return ssd_recurrence(inputs, starts, initial)

    got, wanted = gradients(chunked, low, initial), gradients(one_by_one, exact, initial)
    assert got[0][0].dtype == jnp.bfloat16 and got[0][1].dtype == jnp.float32
    got = jax.tree.map(lambda v: v.astype(jnp.float32), got)
    near(got, wanted, 2e-2)


@slow
def test_a_packed_row_equals_its_documents_apart():
    """To fp32 rounding, in outputs, final state and gradients."""
    inputs, _, _ = draw(40, 4, 2, 0.1, batch=1, dtype=np.float32)
    borders = [0, 7, 8, 29, 40]
    starts = jnp.zeros((1, 40), bool).at[0, jnp.array(borders[:-1])].set(True)
    rng = np.random.default_rng(0)
    to_y = jnp.asarray(rng.normal(size=inputs.x.shape), jnp.float32)

    def packed(inputs):
        y, final = ssd(inputs, chunk=16, starts=starts)
        return jnp.sum(y * to_y) + jnp.sum(final), (y, final)

    def apart(inputs):
        total, ys = 0.0, []
        for i, j in zip(borders, borders[1:], strict=False):
            x, dt, b, c = (v[:, i:j] for v in (inputs.x, inputs.dt, inputs.b, inputs.c))
            y, final = ssd(SsdInputs(x, dt, inputs.a, b, c), chunk=16)
            total = total + jnp.sum(y * to_y[:, i:j])
            ys.append(y)
        return total + jnp.sum(final), (jnp.concatenate(ys, 1), final)

    got, wanted = (jax.jit(jax.value_and_grad(f, has_aux=True))(inputs) for f in (packed, apart))
    near(got[0][1], wanted[0][1], 2e-6)
    near(got[1], wanted[1], 2e-6)


@exhaustive
def test_the_state_passes_from_call_to_call(fp64):
    """In parts of a sequence, a token at a time, and where a part is summed up by itself."""
    inputs, starts, initial = draw(30, 4, 2)
    whole, final = ssd(inputs, chunk=8, starts=starts, initial=initial)

    def part(i, j):
        x, dt, b, c = (v[:, i:j] for v in (inputs.x, inputs.dt, inputs.b, inputs.c))
        return SsdInputs(x, dt, inputs.a, b, c), starts[:, i:j]

    first, border = part(0, 13)
    y, state = ssd(first, chunk=8, starts=border, initial=initial)
    near(y, whole[:, :13], 1e-12)
    own, left = ssd_final(first, border)
    near(initial * left[..., None, None] + own, state, 1e-12)
    second, border = part(13, 30)
    y, last = ssd(second, chunk=8, starts=border, initial=state)
    near((y, last), (whole[:, 13:], final), 1e-12)
    plain, _ = ssd(inputs, chunk=8, initial=initial)
    state = initial
    for t in range(30):
        token, _ = part(t, t + 1)
        one = SsdInputs(*(v if v.ndim == 1 else v[:, 0] for v in token))
        state, y = ssd_step(state, one)
        near(y, plain[:, t], 1e-12)


def test_the_summary_has_the_recurrences_gradient(fp64):
    inputs, _, initial = draw(21, 4, 2)
    starts = jnp.zeros((2, 21), bool).at[0, 4].set(True)

    def summary(inputs, initial):
        own, left = ssd_final(inputs, starts)
        return left, initial * left[..., None, None] + own

    def one_by_one(inputs, initial):
        state = ssd_recurrence(inputs, starts, initial)[1]
        return summary(inputs, initial)[0], state

    near(gradients(summary, inputs, initial), gradients(one_by_one, inputs, initial), 1e-12)


def test_memory_is_linear_in_the_length():
    """The backward keeps inputs and states: no array of it grows with the square of the length."""
    sizes = []
    for length in (256, 1024):
        inputs, starts, _ = draw(length, 4, 2, dtype=np.float32)

        def loss(inputs, starts=starts):
            return jnp.sum(ssd(inputs, chunk=64, starts=starts)[0])

        _, back = jax.eval_shape(lambda v, f=loss: jax.vjp(f, v), inputs)
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(back)))
    assert sizes[1] <= 4 * sizes[0]


# ---- convolution -------------------------------------------------------------------------------


def slow_conv(x, weight, bias, starts, history):
    """A loop over tokens, with a window that documents clear."""
    taps = weight.shape[-1]
    window = list(jnp.moveaxis(history, 1, 0))
    made = []
    for t in range(x.shape[1]):
        clear = starts[:, t].reshape(-1, *[1] * (x.ndim - 2))
        window = [jnp.where(clear, 0, v) for v in window[1 - taps :]] + [x[:, t]]
        total = bias + sum(v * weight[..., k] for k, v in enumerate(window))
        made.append(jax.nn.silu(total))
    return jnp.stack(made, 1)


@pytest.mark.parametrize(
    "length, taps, channels", quick([(11, 4, (6,)), (2, 4, (2, 3)), (9, 2, (5,))], 0, 1)
)
def test_convolution(fp64, length, taps, channels):
    rng = np.random.default_rng(length)
    shapes = (2, length, *channels), (*channels, taps), channels, (2, taps - 1, *channels)
    x, weight, bias, history = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
    starts = jnp.asarray(rng.random((2, length)) < 0.3)
    to_y = jnp.asarray(rng.normal(size=x.shape))

    def total(x, weight, bias, history, function):
        return jnp.sum(function(x, weight, bias, history) * to_y)

    def mine(x, weight, bias, history):
        return causal_conv(x, weight, bias, starts=starts, history=history)

    def slow(x, weight, bias, history):
        return slow_conv(x, weight, bias, starts, history)

    given = x, weight, bias, history
    near(mine(*given), slow(*given), 1e-13)
    got, wanted = (jax.grad(total, (0, 1, 2, 3))(*given, f) for f in (mine, slow))
    near(got, wanted, 1e-12)
    whole = plain_conv(x, weight, None, None, jnp.zeros_like(history))
    near(causal_conv(x, weight), whole, 0)
    cut = length // 2
    first = last_tokens(x[:, :cut], jnp.zeros_like(history))
    near(causal_conv(x[:, cut:], weight, history=first), whole[:, cut:], 1e-13)
