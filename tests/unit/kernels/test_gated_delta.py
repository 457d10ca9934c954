"""The gated delta rule in chunks, forward and backward, against the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.recurrence import chunks
from mjax.kernels.recurrence import gated_delta as gated_delta_module
from mjax.kernels.recurrence import gated_delta_fused as fused
from mjax.kernels.recurrence.gated_delta import (
    DeltaInputs,
    gated_delta,
    gated_delta_final,
    gated_delta_step,
)
from tests.devices import GPU, choose_for
from tests.marks import exhaustive, quick, slow
from tests.triton_interpreter import interpret
from tests.unit.kernels.test_ssd import fp64, gradients, near  # noqa: F401 - a fixture


def draw(length, groups, heads, decay=1.0, batch=2, size=3, width=5, dtype=np.float64, seed=0):
    """(inputs, starts, initial); `decay` scales log_decay."""
    rng = np.random.default_rng(seed + length)
    q, k = (rng.normal(size=(batch, length, groups, width)) for _ in range(2))
    inputs = DeltaInputs(
        q,
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.normal(size=(batch, length, heads, size)),
        -decay * rng.random((batch, length, heads)),
        rng.random((batch, length, heads)),
    )
    inputs = DeltaInputs(*(jnp.asarray(v, dtype) for v in inputs))
    starts = jnp.asarray(rng.random((batch, length)) < 0.2)
    initial = jnp.asarray(rng.normal(size=(batch, heads, size, width)), dtype)
    return inputs, starts, initial


def recurrence(inputs, starts, initial):
    """A loop over tokens, by the formula of the paper with its matrix I - beta k k^T."""
    heads = inputs.v.shape[2] // inputs.k.shape[2]
    q, k = (jnp.repeat(v, heads, 2) for v in inputs[:2])
    unit = jnp.eye(k.shape[-1], dtype=k.dtype)

    def step(state, token):
        q, k, v, log, beta, start = token
        state = jnp.where(start[:, None, None, None], 0, state)
        towards = unit - beta[..., None, None] * k[..., :, None] * k[..., None, :]
        state = jnp.exp(log)[..., None, None] * jnp.einsum("zhpn,zhnm->zhpm", state, towards)
        state = state + (beta[..., None] * v)[..., :, None] * k[..., None, :]
        return state, jnp.einsum("zhpn,zhn->zhp", state, q)

    if starts is None:
        starts = jnp.zeros(inputs.v.shape[:2], bool)
    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (q, k, *inputs[2:], starts))
    final, y = jax.lax.scan(step, initial, tokens)
    return jnp.moveaxis(y, 0, 1), final


def in_chunks(chunk, starts):
    def chunked(inputs, initial):
        return gated_delta(inputs, chunk=chunk, starts=starts, initial=initial)

    return chunked


def one_by_one(starts):
    return lambda inputs, initial: recurrence(inputs, starts, initial)


def part(inputs, i, j):
    return DeltaInputs(*(v[:, i:j] for v in inputs))


# length, key heads, heads, chunk, decay, packed: lengths that are no multiple of the chunk, one
# token, a chunk longer than the sequence, states that stay and states that are gone at once.
CASES = [
    (24, 2, 4, 8, 1.0, False),
    (23, 2, 4, 8, 1.0, True),
    (1, 1, 2, 8, 1.0, True),
    (7, 3, 3, 64, 1.0, True),
    (33, 2, 2, 5, 1e-6, True),
    (70, 1, 2, 64, 0.0, False),
    (33, 1, 3, 16, 40.0, False),
    (19, 1, 2, 1, 0.1, True),
]


@pytest.mark.grid
@pytest.mark.parametrize("length, groups, heads, chunk, decay, packed", CASES)
def test_chunks_equal_the_recurrence(fp64, length, groups, heads, chunk, decay, packed):  # noqa: F811
    inputs, starts, initial = draw(length, groups, heads, decay)
    starts = starts if packed else None
    got = gradients(in_chunks(chunk, starts), inputs, initial)
    near(got, gradients(one_by_one(starts), inputs, initial), 1e-11)


def test_blocks_of_chunks_change_nothing(fp64, monkeypatch):  # noqa: F811
    inputs, starts, initial = draw(45, 2, 4)
    wanted = gradients(in_chunks(8, starts), inputs, initial)
    monkeypatch.setattr(chunks, "BLOCK_BYTES", 5 * 4 * 8 * 8 * 8)  # of 12 chunks 5 at a time
    near(gradients(in_chunks(8, starts), inputs, initial), wanted, 1e-13)


@exhaustive
def test_the_chunk_changes_rounding_only():
    inputs, starts, initial = draw(96, 2, 4, 0.1, dtype=np.float32)
    made = [in_chunks(n, starts)(inputs, initial) for n in (1, 32, 128)]
    near(made[1:], [made[0], made[0]], 1e-5)


def test_bfloat16_stays_near_the_recurrence():
    inputs, starts, initial = draw(64, 2, 4, 0.1, size=16, width=16, dtype=np.float32)
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs[:3])
    low = DeltaInputs(q, k, v, *inputs[3:])
    exact = DeltaInputs(*(x.astype(jnp.float32) for x in low))
    got = gradients(in_chunks(16, starts), low, initial)
    assert got[0][0].dtype == jnp.bfloat16 and got[0][1].dtype == jnp.float32
    got = jax.tree.map(lambda x: x.astype(jnp.float32), got)
    near(got, gradients(one_by_one(starts), exact, initial), 3e-2)


@exhaustive
def test_the_state_passes_from_call_to_call(fp64):  # noqa: F811
    """In parts of a sequence, a token at a time, and where a part is summed up by itself."""
    inputs, starts, initial = draw(30, 2, 4)
    whole, final = gated_delta(inputs, chunk=8, starts=starts, initial=initial)
    y, state = gated_delta(part(inputs, 0, 13), chunk=8, starts=starts[:, :13], initial=initial)
    near(y, whole[:, :13], 1e-12)
    second = {"starts": starts[:, 13:], "initial": state}
    near(gated_delta(part(inputs, 13, 30), chunk=8, **second), (whole[:, 13:], final), 1e-12)
    plain, _ = gated_delta(inputs, chunk=8, initial=initial)
    state = initial
    for t in range(30):
        state, y = gated_delta_step(state, DeltaInputs(*(v[:, t] for v in inputs)))
        near(y, plain[:, t], 1e-12)


@pytest.mark.parametrize("border", [None, 4])
def test_the_summary_is_that_of_the_recurrence(fp64, border):  # noqa: F811
    """Through it any state before a sequence becomes the one after it, with equal gradients."""
    inputs, _, initial = draw(21, 2, 4)
    starts = jnp.zeros((2, 21), bool)
    starts = None if border is None else starts.at[0, border].set(True)

    def summary(inputs, initial):
        left_behind, transition = gated_delta_final(inputs, 8, starts)
        return 0 * inputs.v, initial @ transition + left_behind

    def looped(inputs, initial):
        return 0 * inputs.v, recurrence(inputs, starts, initial)[1]

    near(gradients(summary, inputs, initial), gradients(looped, inputs, initial), 1e-11)


def test_the_backward_keeps_inputs_and_states():
    """And no matrix of a chunk: what is kept grows with the length, not with its square."""
    sizes = []
    for length in (256, 1024):
        inputs, starts, initial = draw(length, 2, 4, dtype=np.float32)

        def loss(inputs, starts=starts, initial=initial):
            return jnp.sum(in_chunks(64, starts)(inputs, initial)[0])

        _, back = jax.eval_shape(lambda v, f=loss: jax.vjp(f, v), inputs)
        kept = [leaf.shape for leaf in jax.tree.leaves(back)]
        assert (2, length // 64, 4, 3, 5) in kept and not [s for s in kept if s[-2:] == (64, 64)]
        sizes.append(sum(np.prod(s, dtype=int) for s in kept))
    assert sizes[1] <= 4 * sizes[0]
    given = sum(leaf.size for leaf in inputs)
    assert sizes[1] <= 2.5 * given


# ---- the kernels, in Triton's interpreter --------------------------------------------------------


def waves(v):
    return jnp.cos(jnp.arange(v.size)).astype(v.dtype).reshape(v.shape)


def by_kernel(monkeypatch):
    choose_for(monkeypatch, GPU, "gated_delta")
    return interpret(monkeypatch)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_solves_systems_as_substitution_does(monkeypatch, transposed):
    """To fp32, equal keys with nothing forgotten among them, whose powers grow to 1e17."""
    rng = np.random.default_rng(0)
    system = rng.normal(size=(3, 2, 64, 64), scale=0.3).astype(np.float32)
    system[0, 0] = 1.0
    right = rng.normal(size=(3, 2, 64, 128)).astype(np.float32)
    lower = np.tril(system.astype(np.float64), -1) + np.eye(64)
    lower = np.swapaxes(lower, -1, -2) if transposed else lower
    used = by_kernel(monkeypatch)
    solve = fused._solve_transposed if transposed else fused._solve
    found = jax.jit(jax.vmap(solve))(system, right)
    assert set(used) == {"delta_solve"}
    want = np.linalg.solve(lower, right)
    assert np.max(np.abs(found[0, 0] - want[0, 0])) < 1e-5
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())


@slow
@pytest.mark.parametrize("packed", quick([False, True], 1))
def test_kernels_equal_plain_jax(monkeypatch, packed):
    """Values, final state and all gradients, in fp32, which the chooser leaves to plain JAX."""
    inputs, starts, initial = draw(140, 1, 2, 0.1, size=64, width=64, dtype=jnp.float32)

    def run(inputs, initial):
        return gated_delta(inputs, chunk=64, starts=starts if packed else None, initial=initial)

    def both(inputs, initial):
        made, back = jax.vjp(run, inputs, initial)
        return made, back(jax.tree.map(waves, made))

    want = jax.jit(lambda *v: both(*v))(inputs, initial)
    used = by_kernel(monkeypatch)
    monkeypatch.setattr(gated_delta_module, "_has_kernel", lambda v, k: True)
    jax.clear_caches()  # jax.checkpoint remembers what it was traced to
    found = jax.jit(lambda *v: both(*v))(inputs, initial)
    assert set(used) == {"delta_solve", "delta_states", "delta_state_gradients"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
