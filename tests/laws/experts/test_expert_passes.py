"""Laws of experts in passes: any number of passes gives what one with room for all does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.base.weight import Weight
from mjax.models.moe.dispatch import make_dispatch
from mjax.models.moe.expert import Expert
from mjax.models.moe.passes import Operands, experts_in_passes, pass_of, rows_of_pass
from mjax.prove import Cell, compare, holds
from tests.marks import exhaustive, slow

D, F, HELD, EXPERTS, TOKENS = 12, 10, 4, 16, 40
RNG = np.random.default_rng(0)
CHOSEN = np.stack([RNG.permutation(EXPERTS)[:3] for _ in range(TOKENS)])
# Experts of tokens, of which a device holds 4, 5, 6 and 7; and the passes of 8 rows that it takes.
ROUTINGS = {
    "spread": (CHOSEN, 4),
    "none here": (np.full((TOKENS, 1), 2), 0),
    "one row": (np.where(np.arange(TOKENS) == 9, 6, 1)[:, None], 1),
    "exactly one pass": (np.where(np.arange(TOKENS) < 8, 5, 0)[:, None], 1),
    "one row too many": (np.where(np.arange(TOKENS) < 9, 5, 0)[:, None], 2),
    "all to one": (np.full((TOKENS, 1), 7), 5),
    "all to all here": (np.tile([4, 5, 6, 7], (TOKENS, 1)), 20),
    "dropped": (np.where(RNG.random((TOKENS, 2)) < 0.5, EXPERTS, [4, 7]), 7),
}


def given(experts, sums: bool, biased: bool):
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = {"up": (HELD, D, 2, F), "down": (HELD, F, D)}
    weights = {}
    for i, (name, shape) in enumerate(shapes.items()):
        total = jax.random.normal(keys[i], shape) if sums else None
        value = 0.3 * jax.random.normal(keys[2 + i], shape)
        weights[name] = Weight(value, grad_sum=total, name=f"expert_{name}")
    x = jax.random.normal(keys[4], (TOKENS, D))
    gates = jax.nn.softmax(jax.random.normal(keys[5], experts.shape))
    bias = jax.random.normal(keys[6], (HELD, 2, F)) if biased else None
    return Operands(x, gates, bias=bias, **weights), jax.random.normal(keys[7], (TOKENS, D))


def sums_and_cotangents(rows: int, sums: bool, biased: bool, experts):
    operands, dy = given(experts, sums, biased)
    dispatch = make_dispatch(experts, 4, HELD)
    expert = Expert("silu", True)

    def run(operands):
        return experts_in_passes(expert, rows, operands, dispatch)

    y, vjp = jax.vjp(run, operands)
    return y, vjp(dy)[0]


@slow
@pytest.mark.grid
@pytest.mark.parametrize("sums,biased", [(False, True), (True, False)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_many_passes_equal_one(name, sums, biased):
    numbers, passes = ROUTINGS[name]
    experts = jnp.asarray(numbers, jnp.int32)
    assert -(-np.isin(numbers, [4, 5, 6, 7]).sum() // 8) == passes
    got = jax.jit(sums_and_cotangents, static_argnums=(0, 1, 2))(8, sums, biased, experts)
    want = sums_and_cotangents(numbers.size, sums, biased, experts)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


# All pairs but a few are here, and the last pass reaches beyond what could come.
NEARLY_ALL = np.where(np.arange(TOKENS) % 20, 5, EXPERTS)[:, None]


@pytest.mark.parametrize("numbers,rows,passes", [(CHOSEN, 8, 4), (NEARLY_ALL, 12, 4)])
def test_passes_take_each_row_once_and_in_order(numbers, rows, passes):
    whole = make_dispatch(jnp.asarray(numbers, jnp.int32), 4, HELD)
    count = int(whole.sizes.sum())
    assert -(-count // rows) == passes
    parts = [pass_of(whole, number, rows) for number in range(passes)]
    taken = np.concatenate([part.pairs for part in parts])
    np.testing.assert_array_equal(taken[:count], whole.pairs[:count])
    np.testing.assert_array_equal(sum(part.sizes for part in parts), whole.sizes)
    for number, part in enumerate(parts):
        assert part.sizes.sum() == min(max(count - rows * number, 0), rows)
        here = np.asarray(part.places) < rows
        assert here.sum() == part.sizes.sum()
        np.testing.assert_array_equal(
            np.asarray(whole.places)[here] - rows * number, np.asarray(part.places)[here]
        )


def test_only_the_first_pass_is_kept():
    operands, dy = given(jnp.asarray(CHOSEN, jnp.int32), False, False)
    dispatch = make_dispatch(jnp.asarray(CHOSEN, jnp.int32), 4, HELD)
    run = lambda x: experts_in_passes(Expert("silu", True), 8, operands._replace(x=x), dispatch)  # noqa: E731
    policy = jax.checkpoint_policies.save_only_these_names("expert_up")
    kept = jax.eval_shape(lambda x: jax.vjp(jax.checkpoint(run, policy=policy), x)[1], operands.x)
    of_up = [leaf.shape for leaf in jax.tree.leaves(kept) if leaf.shape[1:] == (2, F)]
    assert of_up == [(8, 2, F)]


@pytest.mark.parametrize("pairs,most,ep,rows", [(4096, 4096, 8, 768), (1024, 1024, 2, 1024)])
def test_room_is_bounded_where_that_saves_half(pairs, most, ep, rows):
    assert rows_of_pass(pairs, most, ep) == rows


EIGHT_BITS = ["precision.fp8=delayed", "precision.fp8_experts=true"]
CASES = [
    ({"ep": 4, "tp": 2}, 3, 2, []),
    ({"ep": 8}, 1, 1, ["model.moe.router_aux_loss_coef=0.0"]),
    ({"pp": 2, "ep": 4}, 1, 4, []),
    ({"ep": 4}, 1, 2, EIGHT_BITS),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", CASES)
def test_gradients_equal_one_device(monkeypatch, mesh, zero, micro_batches, keys):
    """With room for an eighth of what may come, so that devices take several passes."""

    def few_rows(pairs: int, most: int, ep: int) -> int:
        return most if ep == 1 else max(most // 8, 1)

    monkeypatch.setattr("mjax.models.moe.experts.rows_of_pass", few_rows)
    cell = Cell(mesh, zero, micro_batches)
    record = compare("experts", cell, *keys, steps=2 if keys == EIGHT_BITS else 1)
    assert holds(record), record
