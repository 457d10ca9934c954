"""Law: a pipeline gives the loss, norm and gradients of one device, whatever its layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mjax.pipeline import run
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from mjax.train import step as steps
from tests.laws.common import config, curve, deviation, make_batch

MICRO = 2  # sequences a device and micro-batch


def trainer(name: str, layers: int, mesh: dict[str, int], *overrides: str) -> Trainer:
    cfg = config(
        name,
        f"model.num_hidden_layers={layers}",
        f"train.micro_batch_size={MICRO}",
        *(f"mesh.{axis}={n}" for axis, n in mesh.items()),
        *overrides,
    )
    devices = int(np.prod(list(mesh.values())))
    made = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    made.init()
    return made


@functools.cache
def one_device(name: str, layers: int, rows: int, *overrides: str) -> tuple:
    made = trainer(name, layers, {"dp": 1}, *overrides)
    loss, norm, grads = made.grads(make_batch(rows=rows))
    nll = made.evaluate(make_batch(rows=rows))[0]
    return float(loss), float(norm), jax.tree.map(np.asarray, grads), float(nll)


def agrees(name, layers, mesh, m, *pipeline, model=()):
    rows = MICRO * m * mesh.get("dp", 1) * mesh.get("ep", 1)
    made = trainer(name, layers, {"dp": 1, **mesh}, *pipeline, *model)
    loss, norm, grads = made.grads(make_batch(rows=rows))
    loss1, norm1, grads1, nll1 = one_device(name, layers, rows, *model)
    assert abs(float(loss) - loss1) <= 1e-5 * loss1
    assert abs(float(norm) - norm1) <= 1e-5 * norm1
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, grads1)
    assert deviation(grads, grads1) <= 1e-5
    return made, rows, nll1


@pytest.mark.parametrize(
    "name,layers,pp,v,m,more",
    [
        ("gqa_kv1", 4, 2, 1, 2, ["train.remat=none"]),
        ("tied", 4, 2, 2, 4, ["train.remat=full"]),
        ("biased", 4, 4, 1, 4, ["train.remat=attention"]),
        ("dropout", 8, 4, 2, 8, ["train.remat=none"]),
        ("sinks_softcap", 4, 2, 1, 3, []),
        ("learned_positions", 4, 4, 1, 6, []),
        ("gqa_kv1", 6, 2, 3, 5, []),
        ("tied", 5, 2, 1, 4, []),
        ("dropout", 5, 4, 1, 3, ["train.remat=none"]),  # unused slots, dropout by layer number
        ("windowed", 5, 2, 1, 4, ["train.remat=none"]),  # kinds of blocks differ between stages
        ("gqa_kv1", 4, 4, 1, 1, []),
    ],
)
def test_gradients_equal_one_device(name, layers, pp, v, m, more):
    chunks = [f"mesh.virtual_stages={v}"] if v > 1 else []
    agrees(name, layers, {"pp": pp}, m, *chunks, *more)


@pytest.mark.parametrize(
    "name,layers,mesh,m,more",
    [
        ("tied", 2, {"pp": 2, "dp": 2, "tp": 2}, 4, []),
        ("odd_heads_muon", 5, {"pp": 2, "dp": 2, "tp": 2}, 3, ["mesh.zero=3"]),
        ("gqa_kv1", 4, {"pp": 2, "tp": 4}, 4, ["mesh.virtual_stages=2"]),
        ("dropout", 3, {"pp": 2, "dp": 4}, 2, ["mesh.pipeline_account_for=[loss]"]),
        ("tied", 4, {"pp": 4, "tp": 2}, 2, ["mesh.pipeline_layout='E|t*3||tL'"]),
    ],
)
def test_with_other_axes_equals_one_device(name, layers, mesh, m, more):
    made, rows, nll = agrees(name, layers, mesh, m, *more)
    assert abs(float(made.evaluate(make_batch(rows=rows))[0]) - nll) <= 1e-5 * nll


def test_twenty_steps_agree_and_padding_stays_zero():
    made = trainer("tied", 5, {"dp": 1, "pp": 4, "tp": 2}, "mesh.zero=1")
    single = trainer("tied", 5, {"dp": 1}, "train.micro_batch_size=32")
    np.testing.assert_allclose(curve(made, 20), curve(single, 20), rtol=2e-5)
    assert deviation(made.params(), single.params()) <= 1e-3
    padding = made.layout.table().reshape(-1) < 0
    assert padding.sum() == 3
    for leaf in jax.tree.leaves((made.state["params"]["dense"], made.state["opt"]["mu"]["dense"])):
        assert not np.asarray(leaf)[padding].any()


def test_checkpoint_is_free_of_the_layout(tmp_path):
    folder = f"run.dir={tmp_path}"
    uneven = trainer("gqa_kv1", 6, {"dp": 1, "pp": 4}, folder)
    uneven.step(make_batch())
    uneven.save()
    uneven.store.wait()
    loss = float(uneven.step(make_batch(1))["loss"])
    for mesh, more in (
        ({"dp": 1, "tp": 2}, ["train.micro_batch_size=32"]),
        ({"dp": 1, "pp": 2}, ["mesh.virtual_stages=3"]),
        ({"dp": 1, "pp": 4}, ["mesh.pipeline_account_for=[embedding, loss]"]),
    ):
        other = trainer("gqa_kv1", 6, mesh, folder, *more)
        other.restore()
        assert abs(float(other.step(make_batch(1))["loss"]) - loss) <= 1e-5 * loss


@pytest.mark.parametrize("layers,more", [(4, ["mesh.virtual_stages=2"]), (5, [])])
def test_every_layer_runs_once_in_the_built_program(layers, more):
    """With all blocks but their output biases zero, a bias's gradient is that of the block output
    times how often the layer ran."""
    grads = []
    for mesh, options in (({"dp": 1, "pp": 2}, more), ({"dp": 1}, [])):
        made = trainer("biased", layers, mesh, *options)
        dense = jax.tree.map(jnp.zeros_like, made.state["params"]["dense"])
        made.state["params"] = {**made.state["params"], "dense": dense}
        grads.append(made.grads(make_batch(rows=8))[2]["dense"]["attention"]["out_bias"])
    piped, single = map(np.asarray, grads)
    runs = (piped * single).sum(1) / (single * single).sum(1)
    np.testing.assert_allclose(runs, np.ones(layers), rtol=1e-4)
    np.testing.assert_allclose(single, np.broadcast_to(single[:1], single.shape), rtol=1e-3)


@pytest.mark.parametrize("layers,remat", [(4, "none"), (5, "attention")])
def test_memory_does_not_grow_with_micro_batches(layers, remat):
    made = trainer("gqa_kv1", layers, {"dp": 1, "pp": 2}, f"train.remat={remat}")
    few, many = (
        made.lower(MICRO * m).compile().memory_analysis().temp_size_in_bytes for m in (6, 12)
    )
    activation = MICRO * 16 * 32 * 4
    assert many - few <= activation // 4, "only the tick tables are longer"


def test_autodiff_of_the_circular_scan_agrees(monkeypatch):
    """The oracle: the forward ticks alone, differentiated by JAX."""
    batch, mesh = make_batch(rows=10), {"dp": 1, "pp": 2, "tp": 2}
    made = trainer("dropout", 5, mesh, "mesh.virtual_stages=2")
    loss, norm, grads = made.grads(batch)
    monkeypatch.setattr(steps, "pipeline_gradients", circular)
    made._jits.clear()
    loss1, norm1, grads1 = made.grads(batch)
    assert abs(float(loss) - float(loss1)) <= 1e-6 * float(loss1)
    assert abs(float(norm) - float(norm1)) <= 1e-6 * float(norm1)
    assert deviation(grads, grads1) <= 2e-6


def circular(program, weights, micro_batches, key, count, sequences):
    def share(weights):
        chunks = run.Chunks(program, program.layout, weights, micro_batches, key, True)
        schedule = run.make_schedule(
            program.layout.pp, program.layout.v, len(micro_batches["rows"])
        )
        device = run.Device(chunks, schedule, {})

        def tick(row, state):
            micro, rows, facts = device.inputs(row, "f")
            y, _ = chunks.apply(rows, facts, device.enter(row, micro, state["y"]))
            nll = lambda: chunks.nll(chunks.outer, y, micro)  # noqa: E731
            more = lax.cond(device.ends(row, "f")[1], nll, lambda: jnp.float32(0))
            return {"y": lax.ppermute(y, "pp", device.ring), "nll": state["nll"] + more}

        x = jax.eval_shape(chunks.embed, chunks.outer, chunks.micro(0))
        state = {"y": jnp.zeros(x.shape, x.dtype), "nll": jnp.float32(0)}
        nll = device.scan(tick, state, 0, schedule.ticks)["nll"]
        return nll / jnp.maximum(count, 1) / program.parallel.tp

    loss, grads = jax.value_and_grad(share)(weights)
    return {"loss": loss, "aux_loss": jnp.float32(0)}, grads


def test_a_lost_hand_over_would_be_seen(monkeypatch):
    """The law can fail: without the last tick of the backward the first stage lacks a part."""
    original = run.make_schedule

    def short(pp, v, m):
        made = original(pp, v, m)
        tables = {k: t.copy() for k, t in made.tables.items()}
        tables["b_on"][-1] = 0
        return dataclasses.replace(made, tables=tables)

    monkeypatch.setattr(run, "make_schedule", short)
    with pytest.raises(AssertionError):
        agrees("gqa_kv1", 4, {"pp": 2}, 2)
