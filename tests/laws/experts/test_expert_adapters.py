"""Laws of experts' adapters: their products are the formula, by each token and expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.schema.model import ModelConfig
from mjax.models.base.adapter import Adapter, InputDropout, TokenPlaces
from mjax.models.base.context import Context, Kernels
from mjax.models.base.weight import Weight
from mjax.models.moe.experts import ExpertWeights, run_experts
from mjax.models.moe.router import Routing
from mjax.prove import Cell, make_batch, make_trainer
from mjax.train.step import LOSSES
from tests.marks import slow

B, S, D, F, E, RANK, RATE, SCALE = 2, 3, 8, 6, 4, 2, 0.25, 0.7
ROWS, COLUMNS = (7, 4), (9, 2, 5)
CFG = ModelConfig(
    hidden_size=D,
    layer_pattern="E",
    moe={"num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F},
)


def drawn(*shape: int) -> np.ndarray:
    seed = sum(size * 31**i for i, size in enumerate(shape))
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def kept(key: jax.Array, size: int, *numbers: int) -> np.ndarray:
    """What dropout leaves of an input, as factors."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.bernoulli(key, 1 - RATE, (size,))) / (1 - RATE)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def product(w: Weight, expert: int, x: np.ndarray, left: np.ndarray) -> np.ndarray:
    """x [K] times an expert's W, its adapter of what is left of x; with DoRA columns are scaled."""
    one, scale, length = w.adapter, w.adapter.scale, w.adapter.magnitude
    base, a, b = (np.asarray(array[expert]) for array in (w.value, one.a, one.b))
    change = scale * np.einsum("k...r,r...n->k...n", a, b)
    y = np.tensordot(x, base, 1) + np.tensordot(left, change, 1)
    if length is None:
        return y
    return y * length[expert, 0] / np.linalg.norm(base + change, axis=0)


@pytest.mark.parametrize("kernel", ["xla", "loop"])
@pytest.mark.parametrize("dora", [False, True])
def test_a_token_s_experts_are_the_formula(dora, kernel):
    """Dropout is drawn by a token's place, and of `down` by the expert, too."""
    experts = np.array([[[0, 2], [3, 1], [2, 3]], [[1, 2], [0, 3], [2, 1]]], np.int32)
    x, gates = drawn(B, S, D), np.abs(drawn(B, S, 2))
    keys, weights = jax.random.split(jax.random.key(1)), []
    for key, inputs, outputs, halves in ((keys[0], D, (2, F), 1), (keys[1], F, (D,), None)):
        places = TokenPlaces(key, jnp.array(ROWS), jnp.array(COLUMNS))
        a = drawn(E, inputs, *outputs[: halves or 0], RANK)
        length = 1 + np.abs(drawn(E, 1, *outputs)) if dora else None
        adapter = Adapter(
            a,
            drawn(E, RANK, *outputs),
            length,
            InputDropout(places, RATE),
            scale=SCALE,
            halves=halves,
        )
        weights.append(Weight(drawn(E, inputs, *outputs), adapter=adapter))
    routing = Routing(experts, gates, *(jnp.ones((B, S, E)),) * 2)
    ctx = Context(kernels=Kernels(experts=kernel))
    run = jax.jit(lambda x: run_experts(x, routing, ExpertWeights(*weights), CFG, ctx).y)

    wanted = np.zeros((B, S, D))
    for i, j, n in np.ndindex(B, S, 2):
        expert, place = experts[i, j, n], (ROWS[i], COLUMNS[j])
        h = product(weights[0], expert, x[i, j], x[i, j] * kept(keys[0], D, *place))
        h = silu(h[0]) * h[1]
        y = product(weights[1], expert, h, h * kept(keys[1], F, *place, expert))
        wanted[i, j] += gates[i, j, n] * y
    np.testing.assert_allclose(run(x), wanted, rtol=1e-4, atol=1e-4)


@slow
def test_held_out_losses_have_no_dropout():
    """Bit for bit those of the same adapters without it."""
    found = []
    for rate in (0.0, 0.5):
        keys = "lora.rank=2", f"lora.dropout={rate}", "model.num_hidden_layers=1"
        trainer = make_trainer("experts", Cell(rows=2), *keys)
        found.append(jax.device_get(trainer.run_program(LOSSES, make_batch(2))))
    jax.tree.map(np.testing.assert_array_equal, *found)
