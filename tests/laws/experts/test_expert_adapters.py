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


@pytest.mark.parametrize("kernel", ["xla", "loop"])
def test_dropout_is_drawn_by_a_tokens_place_and_of_down_by_its_expert(kernel):
    experts = np.array([[[0, 2], [3, 1], [2, 3]], [[1, 2], [0, 3], [2, 1]]], np.int32)
    x, gates = drawn(B, S, D), np.abs(drawn(B, S, 2))
    up, down = drawn(E, D, 2, F), drawn(E, F, D)
    up_a, up_b, down_a, down_b = (
        drawn(E, D, 2, RANK),
        drawn(E, RANK, 2, F),
        drawn(E, F, RANK),
        drawn(E, RANK, D),
    )
    keys = jax.random.key(1), jax.random.key(2)
    dropouts = [
        InputDropout(TokenPlaces(key, jnp.array(ROWS), jnp.array(COLUMNS)), RATE) for key in keys
    ]
    of_up = Adapter(up_a, up_b, dropout=dropouts[0], scale=SCALE, halves=1)
    of_down = Adapter(down_a, down_b, dropout=dropouts[1], scale=SCALE)
    weights = ExpertWeights(Weight(up, adapter=of_up), Weight(down, adapter=of_down))
    routing = Routing(experts, gates, *(jnp.ones((B, S, E)),) * 2)
    ctx = Context(kernels=Kernels(experts=kernel))
    y = jax.jit(lambda x: run_experts(x, routing, weights, CFG, ctx).y)(x)

    wanted = np.zeros((B, S, D))
    for i, j, n in np.ndindex(B, S, 2):
        expert, place = experts[i, j, n], (ROWS[i], COLUMNS[j])
        left = x[i, j] * kept(keys[0], D, *place)
        h = [
            x[i, j] @ up[expert, :, half]
            + SCALE * left @ up_a[expert, :, half] @ up_b[expert, :, half]
            for half in (0, 1)
        ]
        h = silu(h[0]) * h[1]
        left = h * kept(keys[1], F, *place, expert)
        out = h @ down[expert] + SCALE * left @ down_a[expert] @ down_b[expert]
        wanted[i, j] += gates[i, j, n] * out
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def test_held_out_losses_have_no_dropout():
    """Bit for bit those of the same adapters without it."""
    found = []
    for rate in (0.0, 0.5):
        keys = "lora.rank=2", f"lora.dropout={rate}", "model.num_hidden_layers=1"
        trainer = make_trainer("experts", Cell(rows=2), *keys)
        found.append(jax.device_get(trainer.run_program(LOSSES, make_batch(2))))
    jax.tree.map(np.testing.assert_array_equal, *found)
