"""Law: a pipeline gives the loss, norm and gradients of one device, whatever its layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mjax.errors import UserError
from mjax.pipeline import run
from mjax.prove import Cell, compare, deviation, holds, make_batch, make_trainer
from mjax.train import Trainer
from mjax.train import step as steps
from tests.marks import exhaustive, quick, slow

MICRO = 2  # sequences a device and micro-batch


def cell(mesh: dict[str, int], m: int, zero: int = 1) -> Cell:
    return Cell(mesh, zero, m, MICRO * m * mesh.get("dp", 1))


def trainer(feature: str, layers: int, where: Cell, *overrides: str) -> Trainer:
    return make_trainer(feature, where, f"model.num_hidden_layers={layers}", *overrides)


def agrees(feature: str, layers: int, where: Cell, *overrides: str) -> None:
    layers = f"model.num_hidden_layers={layers}"
    record = compare(feature, where, layers, *overrides, steps=1)
    assert holds(record), record


@exhaustive
@pytest.mark.parametrize(
    "name,layers,pp,v,m,more",
    [
        ("tied", 4, 2, 2, 4, ["train.remat=full"]),
        ("dropout", 8, 4, 2, 8, ["train.remat=none"]),
        ("dense", 6, 2, 3, 5, []),
    ],
)
def test_gradients_of_several_chunks_equal_one_device(name, layers, pp, v, m, more):
    """The proof has pipelines of one chunk a stage."""
    agrees(name, layers, cell({"pp": pp}, m), f"mesh.virtual_stages={v}", *more)


@pytest.mark.parametrize(
    "name,layers,mesh,m,more",
    quick(
        [
            ("dense", 4, {"pp": 2, "tp": 4}, 4, ["mesh.virtual_stages=2"]),
            ("dropout", 3, {"pp": 2, "dp": 4}, 2, ["mesh.pipeline_account_for=[loss]"]),
            ("tied", 4, {"pp": 4, "tp": 2}, 2, ["mesh.pipeline_layout='E|t*3||tL'"]),
        ],
    ),
)
def test_with_other_axes_equals_one_device(name, layers, mesh, m, more):
    agrees(name, layers, cell(mesh, m), *more)


@exhaustive
def test_evaluation_agrees_and_padding_stays_zero():
    """Of slots and of widths that ZeRO does not divide, in masters and moments."""
    where = cell({"pp": 2, "dp": 4}, 2)
    made, batch = trainer("odd widths", 5, where), make_batch(where.rows)
    nll = float(trainer("odd widths", 5, Cell(rows=where.rows)).evaluate(batch)[0])
    assert abs(float(made.evaluate(batch)[0]) - nll) <= 1e-5 * nll
    for seed in range(2):
        made.step(make_batch(where.rows, seed))
    slots, widths = made.layout.table().reshape(-1) < 0, 0
    assert slots.sum() == 1
    state = made.state["params"]["dense"], made.state["opt"]["mu"]["dense"]
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaf = np.asarray(leaf)
        assert not leaf[slots].any()
        found = made.storage.paddings["['dense']" + jax.tree_util.keystr(path[1:])]
        if found is not None:
            widths += 1
            blocks = np.moveaxis(leaf, found.dim, 0).reshape(found.blocks, found.padded, -1)
            assert not blocks[:, found.length :].any() and blocks[:, : found.length].any()
    assert widths > 0


@slow
def test_evaluation_of_two_chunks_agrees():
    """Some slots empty, micro-batches that pp does not divide."""
    where = cell({"pp": 2}, 3)
    batch = make_batch(where.rows)
    want = float(trainer("odd widths", 5, Cell(rows=where.rows)).evaluate(batch)[0])
    made = trainer("odd widths", 5, where, "mesh.virtual_stages=2")
    assert abs(float(made.evaluate(batch)[0]) - want) <= 1e-5 * want


@slow
@pytest.mark.parametrize(
    "where,more",
    [
        (Cell({"dp": 8}, 3, 1, 16), []),
        (cell({"pp": 2, "dp": 2}, 4), ["mesh.virtual_stages=2"]),
        (cell({"pp": 4, "dp": 2}, 4, 0), ["mesh.pipeline_account_for=[embedding]"]),
    ],
)
def test_checkpoint_is_free_of_layout_and_padding(where, more, tmp_path):
    folder = f"run.dir={tmp_path}"
    uneven = trainer("odd widths", 5, cell({"pp": 2, "dp": 4}, 2), folder)
    batches = [make_batch(16, seed) for seed in (0, 1)]
    uneven.step(batches[0])
    uneven.save()
    uneven.store.wait()
    loss = float(uneven.step(batches[1])["loss"])
    assert any(uneven.storage.paddings.values())
    assert jax.tree.map(np.shape, uneven.params()) == jax.tree.map(
        lambda spec: spec.shape, uneven.specs
    )
    other = trainer("odd widths", 5, where, folder, *more)
    other.restore()
    assert abs(float(other.step(batches[1])["loss"]) - loss) <= 1e-5 * loss


@exhaustive
@pytest.mark.parametrize("layers,more", [(4, ["mesh.virtual_stages=2"]), (5, [])])
def test_every_layer_runs_once_in_the_built_program(layers, more):
    """With all blocks but their output biases zero, a bias's gradient is that of the block output
    times how often the layer ran."""
    grads = []
    for where, options in ((cell({"pp": 2}, 4), more), (Cell(rows=8), [])):
        made = trainer("biases", layers, where, *options)
        dense = jax.tree.map(jnp.zeros_like, made.state["params"]["dense"])
        made.state["params"] = {**made.state["params"], "dense": dense}
        grads.append(made.grads(make_batch(rows=8))[2]["dense"]["attention"]["out_bias"])
    piped, single = map(np.asarray, grads)
    runs = (piped * single).sum(1) / (single * single).sum(1)
    np.testing.assert_allclose(runs, np.ones(layers), rtol=1e-4)
    np.testing.assert_allclose(single, np.broadcast_to(single[:1], single.shape), rtol=1e-3)


@exhaustive
@pytest.mark.parametrize("layers,remat", [(4, "none"), (5, "attention")])
def test_memory_does_not_grow_with_micro_batches(layers, remat):
    made = trainer("dense", layers, cell({"pp": 2}, 4), f"train.remat={remat}")
    few, many = (
        made.lower(MICRO * m).compile().memory_analysis().temp_size_in_bytes for m in (6, 12)
    )
    activation = MICRO * 16 * 32 * 4
    assert many - few <= activation // 4, "only the tick tables are longer"


@exhaustive
def test_autodiff_of_the_circular_scan_agrees(monkeypatch):
    """The oracle: the forward ticks alone, differentiated by JAX."""
    where = cell({"pp": 2, "tp": 2}, 5)
    made, batch = trainer("dropout", 5, where, "mesh.virtual_stages=2"), make_batch(where.rows)
    loss, norm, grads = made.grads(batch)
    monkeypatch.setattr(steps, "pipeline_gradients", circular)
    made.programs.recompile({})
    loss1, norm1, grads1 = made.grads(batch)
    assert abs(float(loss) - float(loss1)) <= 1e-6 * float(loss1)
    assert abs(float(norm) - float(norm1)) <= 1e-6 * float(norm1)
    assert deviation(grads, grads1) <= 2e-6


def circular(model, layout, weights, micro_batches, whole, key, denominators):
    def share(weights):
        schedule = run.make_schedule(layout.pp, layout.v, len(micro_batches["rows"]))
        device = run.Device(model, layout, schedule, weights, micro_batches, whole, key)

        def tick(carry, unit, _):
            micro = device.micro_batch(unit.micro)
            layers = device.layer_weights(device.chunk_weights(unit.chunk))
            inputs, x = device.unit_inputs(unit, micro), device.enter(unit, micro, carry[0])
            y, _ = device.apply(layers, inputs, x)

            def nll():
                return model.head_losses(weights, y, micro, None)[0]["loss"]

            more = lax.cond(device.is_last(unit), nll, lambda: jnp.float32(0))
            ring = [(i, (i + 1) % layout.pp) for i in range(layout.pp)]
            return lax.ppermute(y, "pp", ring), carry[1] + more

        x = jax.eval_shape(lambda: device.embed(device.edge_weights, device.micro_batch(0)))
        start = jnp.zeros(x.shape, x.dtype), jnp.float32(0)
        nll = device.scan(tick, start, 0, schedule.ticks)[1]
        return denominators.shares({"loss": nll}, {})["loss"]

    loss, grads = jax.value_and_grad(share)(weights)
    return {"loss": loss}, grads


@slow
def test_a_lost_hand_over_would_be_seen(monkeypatch):
    """The law can fail: without the last tick of the backward the first stage lacks a part."""
    original = run.make_schedule

    def short(pp, v, m):
        made = original(pp, v, m)
        made.backward.on[-1] = 0
        return made

    monkeypatch.setattr(run, "make_schedule", short)
    with pytest.raises(AssertionError):
        agrees("dense", 4, cell({"pp": 2}, 2))


@slow
def test_permutes_over_uneven_stages_are_refused():
    """Its permutes would wait for devices whose stage has no such layer."""
    with pytest.raises(UserError, match="mesh.cp_type=ring needs stages of equal layers"):
        where = Cell({"pp": 2, "cp": 2, "dp": 1, "tp": 1, "ep": 1}, 0, 2, 8, "ring")
        make_trainer("uneven layers", where).step(make_batch(8))
    with pytest.raises(UserError, match="mesh.tp_overlap=always needs stages of equal layers"):
        where = Cell({"pp": 2, "cp": 1, "dp": 1, "tp": 2, "ep": 1}, 0, 2, 8)
        make_trainer("uneven layers", where, "mesh.tp_overlap=always").step(make_batch(8))
