"""A token of each row in slots: the kernel, in Triton's interpreter, against the rows' own step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels import choose
from mjax.kernels.base.chooser import Device
from mjax.kernels.recurrence.gated_delta import DeltaInputs, gated_delta_step
from mjax.kernels.recurrence.ssd import SsdInputs, ssd_step
from mjax.kernels.recurrence.token_step import StateSlots
from tests.devices import choose_for
from tests.triton_interpreter import interpret

GPU = Device("gpu", True)
RULES = {"mamba": ssd_step, "delta": gated_delta_step}
# slots, heads, groups, channels, state; the third has several programs a head
SIZES = [(6, 4, 2, 16, 32), (5, 2, 1, 32, 16), (5, 2, 2, 64, 512)]


def drawn(rule, rows, sizes, dtype="float32"):
    """Inputs of a token of `rows` rows, and states of all slots, fp32."""
    slots, heads, groups, channels, state = sizes
    keys = iter(jax.random.split(jax.random.key(3), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape).astype(dtype)

    v = normal(rows, heads, channels)
    k, q = (normal(rows, groups, state) * state**-0.5 for _ in "kq")
    rate, beta = (jax.random.uniform(next(keys), (rows, heads)) for _ in range(2))
    if rule == "mamba":
        token = SsdInputs(v, rate, -jax.random.uniform(next(keys), (heads,)), k, q)
    else:
        token = DeltaInputs(q=q, k=k, v=v, beta=beta, log_decay=-rate)
    return token, jax.random.normal(next(keys), (slots, heads, channels, state))


def check_slots(rule, sizes, dtype, close):
    """Rows in slots 3, 0 and 1, of which the second begins on another row's leavings; the rows
    behind them, without work, share the last slot."""
    step, last = RULES[rule], sizes[0] - 1
    token, states = drawn(rule, 5, sizes, dtype)
    numbers = jnp.array([3, 0, 1, last, last], jnp.int32)
    slots = StateSlots(numbers, jnp.array([False, True, False, True, True]))
    states = states.at[0].set(jnp.nan)
    after, y = jax.jit(step)(states, token, slots)
    rows = states[numbers[:3]].at[1].set(0)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), token)
    expected, of_rows = step(jnp.concatenate([rows, jnp.zeros_like(rows[:2])]), wide)
    close(after[numbers[:3]], expected[:3])
    close(y[:3], of_rows[:3])
    assert y.dtype == dtype and after.dtype == jnp.float32
    untouched = np.setdiff1d(np.arange(sizes[0]), numbers)
    np.testing.assert_array_equal(after[untouched], states[untouched])
    assert np.isfinite(after).all()


def close_to(bound):
    def close(a, e):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.linalg.norm(a - e) <= bound * np.linalg.norm(e)

    return close


@pytest.mark.parametrize("kernel", (True, False))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_states_change_where_they_lie(rule, sizes, kernel, monkeypatch):
    ran = interpret(monkeypatch)
    if kernel:
        choose_for(monkeypatch, GPU, "token_step")
    check_slots(rule, sizes, jnp.float32, close_to(1e-6))
    assert ran == ["token_step"] * kernel


def test_states_that_the_kernel_does_not_take():
    def why(dtype, *sizes):
        return choose("token_step", jnp.dtype(dtype), (8, 4, *sizes))

    for dtype, *sizes in (("float64", 64, 128), ("float32", 48, 128), ("float32", 64, 8)):
        assert why(dtype, *sizes).name == "xla"
    assert "GPU" in why("float32", 64, 128).why
