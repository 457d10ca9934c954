"""Laws of diagnostics: equal on every mesh, true to the step, and no bit of a run changes."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.config.languages.layer_pattern import branches_of
from mjax.infer.trace import trace
from mjax.models.base.activation_statistics import see_activations
from mjax.models.moe.expert_statistics import see_experts
from mjax.models.moe.router import Routing
from mjax.prove import Cell, make_batch, make_trainer
from mjax.run.loop import train
from mjax.run.monitor.diagnostics import Diagnostics, halves, noise_record, norm_record
from mjax.run.monitor.trackers import _scalars
from mjax.sharding.mesh import make_mesh
from mjax.train.layer_statistics import LAYER_STATISTICS, expert_record, layer_record
from tests.laws.run.test_failures import records
from tests.marks import exhaustive, quick, slow
from tests.tiny import TINY

CELLS = [
    ("dense", Cell({"dp": 2, "tp": 2}, 3, 2, 40)),
    ("uneven layers", Cell({"pp": 4, "tp": 2}, 1, 4)),
    ("experts", Cell({"ep": 2, "dp": 2, "pp": 2}, 1, 3)),
    ("frozen", Cell({"dp": 2, "pp": 2, "tp": 2}, 3, 2)),
]


def figures(trainer, batch) -> dict:
    found = [jax.device_get(trainer.norms(one)) for one in (batch, *halves(batch))]
    return norm_record(trainer, found[0]) | noise_record(*found)


def drawn(feature, cell):
    """A trainer at step 0, whose first learning rate is not zero, and a batch."""
    trainer = make_trainer(feature, cell, "schedule.warmup_steps=0")
    data = trainer.cfg.data
    return trainer, make_batch(cell.rows, width=data.seq_length, target=data.target_length)


@exhaustive
@pytest.mark.parametrize("feature,cell", CELLS, ids=[f"{f}, {c}" for f, c in CELLS])
def test_norms_and_noise_are_those_of_one_device(feature, cell):
    got = figures(*drawn(feature, cell))
    want = figures(*drawn(feature, Cell(rows=cell.rows)))
    assert got.keys() == want.keys()
    layers = 5 if feature == "uneven layers" else 4
    for layer in range(layers):
        assert any(name.startswith(f"update_norm/layers.{layer}.") for name in want)
    # Updates are differences of rounded masters; variance and signal are of near numbers, too.
    bounds = {"param_norm": 1e-5, "grad_norm": 1e-5, "update_norm": 1e-4, "grad_noise": 1e-3}
    for name, value in want.items():
        if name != "grad_noise/scale_tokens":  # a ratio of small differences
            assert got[name] == pytest.approx(value, rel=bounds[name.partition("/")[0]]), name


EXPERTS = [
    ("experts", Cell({"ep": 2, "dp": 2, "pp": 2}, 1, 3)),
    ("experts", Cell({"ep": 2, "cp": 2, "tp": 2}, 1, 2)),
    ("expert bias", Cell({"ep": 2, "tp": 2, "pp": 2}, 1, 2)),
    ("multi-token prediction", Cell({"ep": 2, "cp": 2, "pp": 2}, 1, 2, cp_type="a2a")),
]


ACTIVATIONS = [
    ("dense", Cell({"dp": 2, "tp": 2, "pp": 2}, 1, 3)),
    ("dense", Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 2)),
    ("uneven layers", Cell({"pp": 4, "tp": 2}, 1, 4)),
    ("t5", Cell({"pp": 2, "tp": 2}, 1, 2)),
    ("hybrid", Cell({"pp": 2, "cp": 2}, 1, 2)),
]


@pytest.mark.parametrize(
    "feature,cell", quick(ACTIVATIONS), ids=[f"{f}, {c}" for f, c in ACTIVATIONS]
)
def test_figures_of_activations_are_those_of_one_device(feature, cell):
    got, want = (seen_record(feature, where) for where in (cell, Cell(rows=cell.rows)))
    assert got.keys() == want.keys() and len(want) >= 8
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


def seen_record(feature, cell) -> dict:
    trainer, batch = drawn(feature, cell)
    seen = jax.device_get(trainer.run_program(LAYER_STATISTICS, batch))
    return layer_record(trainer.cfg.model, seen)


@slow
def test_figures_of_activations_are_those_of_the_model():
    trainer, batch = drawn("dense", Cell())
    batch["segment_ids"] = np.ones_like(batch["tokens"])
    batch["positions"] = np.broadcast_to(np.arange(16, dtype=np.int32), batch["tokens"].shape)
    record = layer_record(
        trainer.cfg.model, jax.device_get(trainer.run_program(LAYER_STATISTICS, batch))
    )
    model = trainer.definition.bind(trainer.params())
    _, kept = trace(model, jnp.asarray(batch["tokens"]), keep=["layers.?"])
    for layer in range(4):
        x = np.asarray(kept[f"layers.{layer}"], np.float64)
        assert record[f"activation_rms/layers.{layer}"] == pytest.approx((x**2).mean() ** 0.5)
        kurtosis = (x**4).mean() / (x**2).mean() ** 2
        assert record[f"activation_kurtosis/layers.{layer}"] == pytest.approx(kurtosis)


def test_an_outlier_shows_in_the_kurtosis_of_its_layer_alone():
    cfg = load(None, ["data.mock=true", "model.num_hidden_layers=2"]).model
    x = np.random.default_rng(0).normal(size=(2, 64, 256)).astype(np.float32)
    plain = see_activations(jnp.asarray(x), "full+mlp", 0, 2)
    x[0, 3, 7] = 1000
    outlier = see_activations(jnp.asarray(x), "full+mlp", 1, 2)
    seen = {name: np.asarray(plain[name] + outlier[name]) for name in plain}
    record = layer_record(cfg, seen)
    assert record["activation_rms/layers.0"] == pytest.approx(1, abs=0.01)
    assert record["activation_kurtosis/layers.0"] == pytest.approx(3, abs=0.1)
    assert record["activation_kurtosis/layers.1"] > 1000


@exhaustive
@pytest.mark.parametrize("feature,cell", EXPERTS, ids=[f"{f}, {c}" for f, c in EXPERTS])
def test_loads_of_experts_are_those_of_one_device(feature, cell):
    records = []
    for where in (cell, Cell(rows=cell.rows)):
        trainer, batch = drawn(feature, where)
        model = trainer.cfg.model
        seen = jax.device_get(trainer.run_program(LAYER_STATISTICS, batch))
        with_experts = ["experts" in branches_of(kind) for kind in model.layer_kinds]
        tokens = batch["tokens"].size * np.asarray(with_experts)
        np.testing.assert_array_equal(seen["layer_tokens"], tokens)
        loads = seen["expert_load"].sum(-1)
        np.testing.assert_array_equal(loads, tokens * model.moe.num_experts_per_tok)
        records.append(expert_record(model, seen))
    got, want = records
    assert got.keys() == want.keys() and any(
        name.startswith("expert_load/layers.") for name in want
    )
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


@exhaustive
def test_figures_of_experts_reach_the_log_of_a_run():
    trainer, batch = drawn("expert bias", Cell())
    kept = []
    diagnostics = Diagnostics(trainer, SimpleNamespace(keep_figures=kept.append), 2)
    for step in (1, 2):
        diagnostics.ask_if_due(step, batch)
        diagnostics.write(step)
    (record,) = kept
    load = json.loads(json.dumps(record))["expert_load/layers.3"]
    assert len(load) == trainer.cfg.model.moe.num_experts
    assert np.mean(load) == pytest.approx(1, abs=1e-4)
    drawn_on_charts = _scalars(record)
    figures = {"expert_imbalance/layers.3", "expert_bias_range/layers.3", "grad_norm/embedding"}
    assert figures <= drawn_on_charts.keys() and "expert_load/layers.3" not in drawn_on_charts


def test_a_record_of_experts_says_what_the_router_did():
    """Two layers, one with experts: all tokens to one of four, and a bias from -1 to 2."""
    keys = ["model.layer_pattern=GE", "model.num_hidden_layers=2", "model.moe.num_experts=4"]
    cfg = load(None, ["data.mock=true", *keys, "model.moe.expert_bias=true"]).model
    probs = jnp.asarray([0.5, 0.25, 0.25, 0.0])
    routing = Routing(
        experts=jnp.full((2, 3, 1), 1),
        gates=jnp.ones((2, 3, 1)),
        probs=jnp.broadcast_to(probs, (2, 3, 4)),
        logits=jnp.zeros((2, 3, 4)),
    )
    seen = see_experts(routing, jnp.asarray([0.0, -1.0, 2.0, 0.5]), 1, 2)
    record = expert_record(cfg, jax.device_get(seen))
    assert record.pop("expert_load/layers.1") == [0, 4, 0, 0]
    assert record == {
        "expert_imbalance/layers.1": 4.0,
        "expert_entropy/layers.1": pytest.approx(1.5 * np.log(2)),
        "expert_bias_range/layers.1": 3.0,
    }


@exhaustive
def test_norms_are_those_of_the_step_that_follows():
    trainer, batch = drawn("dense", Cell({"dp": 2}, 1, 1, 40))
    record = figures(trainer, batch)
    before = jax.tree.map(np.asarray, trainer.params())
    _, norm, gradients = trainer.grads(batch)
    made = trainer.step(batch)
    after = trainer.params()

    def length(x) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64)))

    q = "layers.2.attention.q"

    def of(tree):
        return np.asarray(tree["dense"]["attention"]["q"])[2]

    assert record[f"param_norm/{q}"] == pytest.approx(length(of(before)), rel=1e-5)
    assert record[f"grad_norm/{q}"] == pytest.approx(length(of(gradients)), rel=1e-5)
    update = of(after).astype(np.float64) - of(before)
    assert record[f"update_norm/{q}"] == pytest.approx(length(update), rel=1e-3)
    squares = [v**2 for name, v in record.items() if name.startswith("grad_norm/")]
    assert sum(squares) ** 0.5 == pytest.approx(float(made["grad_norm"]), rel=1e-5)


def test_noise_of_gradients_of_known_variance():
    """Two halves of gradients with variance 6 a token and signal 9, in 40 000 dimensions."""
    rng, size = np.random.default_rng(0), 40_000
    signal = np.full(size, 3 / size**0.5)
    counts = 30.0, 10.0
    one, two = (signal + rng.normal(size=size) * (6 / size / c) ** 0.5 for c in counts)
    whole = (counts[0] * one + counts[1] * two) / sum(counts)

    def norms(gradient, tokens):
        from mjax.train.norms import Norms

        return Norms({}, {}, {}, np.linalg.norm(gradient), tokens)

    found = noise_record(norms(whole, 40.0), norms(one, 30.0), norms(two, 10.0))
    assert found["grad_noise/variance"] == pytest.approx(6, rel=0.05)
    assert found["grad_noise/signal"] == pytest.approx(9, rel=0.05)
    assert found["grad_noise/scale_tokens"] == pytest.approx(6 / 9, rel=0.1)
    assert noise_record(norms(whole, 40.0), norms(one, 40.0), norms(two, 0.0)) == {}


@exhaustive
def test_a_run_with_diagnostics_is_the_same_run_and_the_same_program(tmp_path, capsys):
    keys = ["train.steps=5", "train.micro_batch_size=1", "mesh.dp=2", "mesh.tp=2"]
    made = {}
    for name, more in (("plain", []), ("seen", ["log.diagnostics_interval=2"])):
        cfg = load(None, [*TINY, *keys, f"run.dir={tmp_path / name}", *more])
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
        made[name] = [r for r in records(tmp_path / name) if "loss" in r]
    assert "norm/" not in capsys.readouterr().out
    for plain, seen in zip(made["plain"], made["seen"], strict=True):
        assert (plain["loss"], plain["grad_norm"]) == (seen["loss"], seen["grad_norm"])
    extra = [r for r in records(tmp_path / "seen") if "grad_noise/variance" in r]
    assert [r["step"] for r in extra] == [2, 4] and "update_norm/layers.0.mlp.up" in extra[0]
    assert extra[0]["activation_rms/layers.0"] > 0


@exhaustive
def test_the_step_is_the_same_program_with_the_key():
    cell = Cell({"dp": 2, "tp": 2}, 1, 2, 40)
    plain = make_trainer("dense", cell).lower().as_text()
    assert plain == make_trainer("dense", cell, "log.diagnostics_interval=3").lower().as_text()
    assert plain != make_trainer("dense", cell, "optimizer.clip_grad_norm=0.5").lower().as_text()
