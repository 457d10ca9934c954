"""Laws of the state-space mixer beyond the table of meshes (`test_prove.py`)."""

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
from mjax.optim.build import moments_of
from mjax.plan.activations import kept
from mjax.prove import SMALL, Cell, compare, holds, make_trainer
from mjax.prove.features import STATES
from tests.devices import GPU, choose_for
from tests.marks import exhaustive, quick, slow
from tests.triton_interpreter import interpret

HYBRID = ["model.layer_pattern='mamba+mlp, mamba|full'", "model.mamba.n_groups=2", *STATES]


def model_of(*keys):
    return load(None, [*SMALL, *keys]).model


def packed_and_apart(cfg):
    """(loss, gradients) of a packed row of documents, and of the documents run apart."""
    definition, params = split(build(cfg, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    borders = [0, 3, 4, 11, 24]
    ids = jnp.asarray(rng.integers(0, 251, (1, 24)))
    spans = list(zip(borders, borders[1:], strict=False))
    segments = np.concatenate([np.full(j - i, n) for n, (i, j) in enumerate(spans, 1)])[None]
    positions = np.concatenate([np.arange(j - i) for i, j in spans])[None]
    to_logits = jnp.asarray(rng.normal(size=(1, 24, 251)), jnp.float32)

    def packed(params):
        model = definition.bind(params)
        return jnp.sum(model(ids, jnp.asarray(positions), jnp.asarray(segments)) * to_logits)

    def apart(params):
        model = definition.bind(params)
        return sum(jnp.sum(model(ids[:, i:j]) * to_logits[:, i:j]) for i, j in spans)

    return (jax.jit(jax.value_and_grad(f))(params) for f in (packed, apart))


@exhaustive
@pytest.mark.parametrize("conv_bias", ["true", "false"])
def test_a_packed_row_equals_its_documents_apart(conv_bias):
    """Loss and every gradient, to fp32 rounding."""
    got, wanted = packed_and_apart(model_of(*HYBRID, f"model.mamba.use_conv_bias={conv_bias}"))
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5 * float(np.abs(right).max()))


CASES = [
    ({"tp": 2}, ["model.mamba.n_groups=3"]),  # heads of a device begin within a group
    ({"dp": 2, "tp": 2}, ["train.remat=dots"]),
    ({"cp": 2, "tp": 2}, ["train.remat=full", "model.mamba.conv_kernel=7"]),
    ({"cp": 2, "dp": 2}, ["train.unroll=0", "model.mamba.time_step_limit=[0.005, 0.05]"]),
]


@slow
@pytest.mark.parametrize("mesh, more", quick(CASES, 2))
def test_meshes_agree_where_sizes_are_odd(mesh, more):
    record = compare("mamba", Cell(mesh, 1, 1), "model.num_hidden_layers=2", *more, steps=2)
    assert holds(record), record


@exhaustive
def test_a_pipeline_of_unlike_stages_agrees():
    cell = Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 3, cp_type="all_gather")
    layers = ["model.layer_pattern='megatron:MM*-MME-'", "model.num_hidden_layers=8"]
    record = compare("hybrid", cell, *layers, steps=2)
    assert holds(record), record


def test_a_layer_keeps_its_scan_and_counts_it():
    cfg = load(None, [*SMALL, *HYBRID, "train.remat=dots"])
    held = {t.name: t for t in kept(cfg, dict.fromkeys(AXES, 1), "mamba", "dots")}
    assert {"ssm_in", "ssm_bc", "ssm_dt", "ssd_out", "ssd_states"} <= set(held)
    rows, width, heads, size, state = held["ssd_out"].shape[0], 16, 24, 4, 6
    assert held["ssd_states"].shape == (rows, width // 4, heads, size, state)
    alone = model_of("model.layer_pattern=M", *STATES)
    assert flops_by_part(alone, 16)["attention"] == 4 * 21 * heads * size * state


def test_with_the_kernels_a_layer_keeps_no_states(monkeypatch):
    """The backward of the Triton scan makes them again; the estimate of memory asks `kept`, too."""
    keys = ["precision.compute=bfloat16", "model.mamba.mamba_head_dim=64"]
    keys += ["model.mamba.state_size=64", "train.remat=dots"]
    cfg, sizes = load(None, [*SMALL, *HYBRID, *keys]), dict.fromkeys(AXES, 1)
    plain = kept(cfg, sizes, "mamba", "dots")
    interpret(monkeypatch)
    choose_for(monkeypatch, GPU, "ssd")
    held = kept(cfg, sizes, "mamba", "dots")
    (states,) = (t for t in plain if t.name == "ssd_states")
    assert {t.name for t in held} == {t.name for t in plain} - {"ssd_states"}
    assert sum(t.bytes for t in plain) - sum(t.bytes for t in held) == states.bytes


def test_decays_are_fp32_and_do_not_decay():
    """As in Megatron-LM: no weight decay of A_log, D and dt_bias; the convolution has it."""
    specs = definition_of(model_of("model.layer_pattern=M", *STATES)).specs["mamba"]["mamba"]
    decayed = OptimizerConfig().weight_decay_roles
    for name in ("A_log", "D", "dt_bias"):
        assert specs[name].dtype("bfloat16") == jnp.float32
        assert specs[name].role not in decayed
    assert specs["x_conv"].role in decayed and specs["x_conv_bias"].role not in decayed
    muon = OptimizerConfig(name="muon")
    assert len(moments_of(muon, specs["inner"].role)) == 1
    assert len(moments_of(muon, specs["x_conv"].role)) == 2


def test_initial_values_are_megatrons():
    model = model_of("model.layer_pattern=M", *STATES, "model.mamba.mamba_num_heads=96")
    _, params = split(build(model, nnx.Rngs(0)))
    mixer = params["mamba"]["mamba"]
    decay, steps = np.exp(mixer["A_log"]), np.log1p(np.exp(mixer["dt_bias"]))
    assert 1 <= decay.min() < 2 and 15 < decay.max() <= 16
    assert 9e-4 < steps.min() < 2e-3 and 0.05 < steps.max() <= 0.101
    assert (np.asarray(mixer["D"]) == 1).all() and (np.asarray(mixer["x_conv_bias"]) == 0).all()
    assert 0.4 < np.abs(mixer["x_conv"]).max() <= 0.5  # 1 / sqrt(4 taps)


def test_the_state_of_generation_is_fp32_and_has_one_size():
    cfg = model_of("model.layer_pattern=M", *STATES)
    short, long = (empty_cache(cfg, 2, n, jnp.bfloat16).layers for n in (16, 64))
    assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)
    cache = short[0]["mamba"]
    assert cache.state.dtype == jnp.float32 and cache.histories[0].dtype == jnp.bfloat16


def test_heads_that_no_mesh_divides_are_refused_in_a_line():
    with pytest.raises(Exception, match="mamba_num_heads=24 is not divisible by mesh.tp=5"):
        make_trainer("mamba", Cell({"tp": 5}))
