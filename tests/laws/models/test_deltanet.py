"""Laws of Gated DeltaNet beyond the table of meshes (`test_prove.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.run import OptimizerConfig
from mjax.infer.caches.contiguous import empty_cache
from mjax.models import build, definition_of, split
from mjax.models.flops import flops_by_part
from mjax.models.recurrent import deltanet
from mjax.plan.activations import kept
from mjax.prove import SMALL, Cell, compare, holds, make_trainer
from mjax.prove.features import DELTANET
from tests.laws.models.test_mamba import packed_and_apart
from tests.marks import exhaustive

LAYERS = ["model.layer_pattern='deltanet+mlp, full'", *DELTANET]
LAYERS += ["model.attention.attention_output_gate=true"]


def model_of(*keys):
    return load(None, [*SMALL, *keys]).model


@pytest.fixture
def long_memory(monkeypatch):
    """Models are made with decays near 1, so that states matter many tokens later."""

    def slow_decays(key, shape, dtype):
        return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 0.2))

    monkeypatch.setattr(deltanet, "initial_decays", slow_decays)


@exhaustive
def test_a_packed_row_equals_its_documents_apart(long_memory):
    got, wanted = packed_and_apart(model_of(*LAYERS))
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5 * float(np.abs(right).max()))


@exhaustive
def test_the_chunk_changes_rounding_only(long_memory):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 251, (2, 24)))
    losses = []
    for chunk in (1, 5, 24):
        cfg = model_of(*LAYERS, f"model.deltanet.linear_chunk_size={chunk}")
        definition, params = split(build(cfg, nnx.Rngs(0)))

        def loss(params, definition=definition):
            return jnp.mean(definition.bind(params)(ids) ** 2)

        losses.append(jax.jit(jax.value_and_grad(loss))(params))
    for made in losses[1:]:
        for mine, right in zip(jax.tree.leaves(made), jax.tree.leaves(losses[0]), strict=True):
            np.testing.assert_allclose(mine, right, rtol=0, atol=2e-5 * float(np.abs(right).max()))


CASES = [
    ({"cp": 2, "tp": 2, "pp": 2}, ["train.remat=dots"]),
    ({"cp": 4, "dp": 2}, ["train.remat=full", "model.deltanet.linear_conv_kernel_dim=7"]),
    ({"tp": 4, "dp": 2}, ["train.unroll=0", "mesh.zero=3"]),
]


@exhaustive
@pytest.mark.parametrize("mesh, more", CASES)
def test_meshes_agree_where_states_last(long_memory, mesh, more):
    """Loss, gradient norm and every gradient, of packed documents."""
    cell = Cell(mesh, 1, 1, cp_type="all_gather")
    record = compare("gated deltanet", cell, "run.seed=7", *more, steps=2)
    assert holds(record), record


def test_a_layer_keeps_its_scan_and_counts_it():
    cfg = load(None, [*SMALL, *LAYERS, "train.remat=dots"])
    held = {t.name: t for t in kept(cfg, dict.fromkeys(AXES, 1), "deltanet+mlp", "dots")}
    assert {"delta_in", "delta_ba", "delta_out", "delta_states"} <= set(held)
    rows, width, heads, size, keys = held["delta_out"].shape[0], 16, 48, 4, 6
    assert held["delta_states"].shape == (rows, width // 4, heads, size, keys)
    alone = model_of("model.layer_pattern=T", *DELTANET)
    assert flops_by_part(alone, 16)["attention"] == 4 * 24 * heads * size * keys


def test_decays_are_fp32_and_do_not_decay():
    specs = definition_of(model_of("model.layer_pattern=T", *DELTANET)).specs["deltanet"]
    specs, decayed = specs["deltanet"], OptimizerConfig().weight_decay_roles
    for name in ("A_log", "dt_bias"):
        assert specs[name].dtype("bfloat16") == jnp.float32
        assert specs[name].role not in decayed
    assert specs["qk_conv"].role in decayed and specs["norm"].role not in decayed


def test_the_state_of_generation_is_fp32_and_has_one_size():
    cfg = model_of("model.layer_pattern=T", *DELTANET)
    short, long = (empty_cache(cfg, 2, n, jnp.bfloat16).layers for n in (16, 64))
    assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)
    cache = short[0]["deltanet"]
    assert cache.state.dtype == jnp.float32 and cache.histories[0].dtype == jnp.bfloat16


def test_heads_that_no_mesh_divides_are_refused_in_a_line():
    keys = ["model.deltanet={linear_num_key_heads: 6, linear_num_value_heads: 12}"]
    wanted = "linear_num_key_heads=6 is not divisible by mesh.tp=8"
    with pytest.raises(Exception, match=wanted):
        make_trainer("gated deltanet", Cell({"tp": 8}), *keys)
