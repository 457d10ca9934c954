"""Laws of fp16: equal to fp32 within its rounding; an overflow is skipped alike everywhere, by the
rules of the loss scale, and leaves no trace but the scale."""

import functools

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import NonFiniteLoss
from mjax.optim.schedule import rates_of_step
from mjax.prove import Cell, deviation, make_batch, make_trainer, replicas_identical, sizes_for
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.faults import plant_in_gradients
from tests.laws.run.test_failures import events, records
from tests.laws.run.test_processes import finish, losses, start
from tests.marks import exhaustive, quick, slow
from tests.tiny import TINY

FP16 = ("precision.compute=float16", "precision.initial_loss_scale=1024")
LOSS_BOUND, GRADIENT_BOUND = 1e-4, 6e-3  # fp16 rounds by 5e-4; bf16 is off by 1e-2 and more
CELLS = [
    ("dense", Cell()),
    ("dense", Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 3)),
    ("dense", Cell({"cp": 2}, 2, 1, cp_type="ring")),
    ("dense", Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 1)),
    ("routing", Cell({"pp": 2, "ep": 2}, 1, 2)),
    ("latent attention", Cell({"tp": 2, "cp": 2}, 1, 1)),
    ("mamba", Cell({"tp": 2, "cp": 2}, 1, 1)),
]
STATE = "scale", "growth_tracker", "hysteresis_tracker", "skipped_samples"


@functools.cache
def fp32_gradients(feature: str, *sizes: str) -> tuple:
    return gradients(make_trainer(feature, Cell(), *sizes))


def gradients(trainer: Trainer) -> tuple:
    batch = make_batch(24, width=trainer.cfg.data.seq_length)
    loss, norm, found = trainer.grads(batch)
    return float(loss), float(norm), jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("feature, cell", quick(CELLS))
def test_fp16_is_fp32_within_its_rounding(feature, cell):
    sizes = sizes_for(cell.mesh, feature)
    loss, norm, found = gradients(make_trainer(feature, cell, *sizes, *FP16))
    want_loss, want_norm, want = fp32_gradients(feature, *sizes)
    assert 0 < abs(loss / want_loss - 1) < LOSS_BOUND
    assert abs(norm / want_norm - 1) < 1e-3
    assert deviation(found, want) < GRADIENT_BOUND


@slow
@pytest.mark.parametrize("remat", ["full", "attention"])
def test_recomputing_changes_nothing_beyond_rounding(remat):
    loss, _, found = gradients(
        make_trainer("dense", Cell({"dp": 2}, 1, 2), *FP16, f"train.remat={remat}")
    )
    want_loss, _, want = fp32_gradients("dense")
    assert abs(loss / want_loss - 1) < LOSS_BOUND
    assert deviation(found, want) < GRADIENT_BOUND


@exhaustive
def test_small_gradients_survive_by_the_scale_alone():
    """With a loss scale of 2^-10 most gradients are lost in fp16."""

    def deviation_of(scale: float) -> float:
        scales = f"precision.initial_loss_scale={scale}", f"precision.min_loss_scale={scale}"
        trainer = make_trainer("dense", Cell(), "precision.compute=float16", *scales)
        return deviation(gradients(trainer)[2], fp32_gradients("dense")[2])

    assert deviation_of(2.0**12) < GRADIENT_BOUND
    assert deviation_of(2.0**-10) > 10 * GRADIENT_BOUND


# ---- overflows -----------------------------------------------------------------------------------

# Window 3, hysteresis 2; "x" overflows. (scale, growth tracker, hysteresis left) after each step.
STEPS = "..x.xx...x"
TABLE = [
    (1024, 1, 2),
    (1024, 2, 2),
    (1024, 0, 1),
    (1024, 1, 1),
    (512, 0, 0),
    (256, 0, -1),
    (256, 1, -1),
    (256, 2, -1),
    (512, 0, 2),
    (512, 0, 1),
]


@exhaustive
@pytest.mark.parametrize(
    "cell",
    [
        Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 3),
        Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 1),
        Cell({"pp": 2, "dp": 4}, 3, 3),
    ],
)
def test_planted_overflows_follow_the_table_and_change_nothing_else(monkeypatch, cell):
    bad = [i for i, mark in enumerate(STEPS, 1) if mark == "x"]
    for numbers, value in ((bad[::2], np.inf), (bad[1::2], np.nan)):
        plant_in_gradients(monkeypatch, numbers, device=5, values=(value,))
    keys = (*FP16, "precision.loss_scale_window=3")
    trainer = make_trainer("dense", cell, *keys)
    for step, (mark, row) in enumerate(zip(STEPS, TABLE, strict=True), 1):
        before = jax.device_get(trainer.state)
        metrics = jax.device_get(trainer.step(make_batch(24, step)))
        after = jax.device_get(trainer.state)
        assert metrics["accepted"] == (mark == ".") and metrics["skipped"] == (mark == "x")
        assert metrics["loss_scale"] == before["loss_scale"]["scale"]
        skipped = 24 * STEPS[:step].count("x")
        assert tuple(after["loss_scale"][name] for name in STATE) == (*row, skipped)
        assert after["step"] == trainer.step_number == step
        assert replicas_identical(trainer.state)
        if mark == "x":
            for part in ("params", "opt"):
                jax.tree.map(np.testing.assert_array_equal, after[part], before[part])


@exhaustive
def test_the_schedule_does_not_advance_on_a_skipped_step(monkeypatch):
    """Steps 1, 2 (skipped), 3 are, bit for bit, steps 1, 2 of the batches 1 and 3."""
    want = make_trainer("dense", Cell(), *FP16)
    for batch in (1, 3):
        assert want.step(make_batch(24, batch))["accepted"]
    plant_in_gradients(monkeypatch, [2], device=0)
    got = make_trainer("dense", Cell(), *FP16)
    accepted = [bool(got.step(make_batch(24, batch))["accepted"]) for batch in (1, 2, 3)]
    assert accepted == [True, False, True]
    for part in ("params", "opt"):
        jax.tree.map(np.testing.assert_array_equal, got.state[part], want.state[part])
    assert got.skipped_samples == 24


@pytest.mark.parametrize("cell", quick([Cell(), Cell({"pp": 2, "dp": 2}, 3, 3)]))
def test_a_huge_scale_comes_down_until_gradients_fit(cell):
    """From 2^32, the first overflow costs hysteresis and each further one halves the scale."""
    trainer = make_trainer("dense", cell, "precision.compute=float16")
    start = jax.device_get(trainer.state)
    scale, overflows = 2.0**32, 0
    while not trainer.step(make_batch(24))["accepted"]:
        overflows += 1
        scale = scale if overflows == 1 else scale / 2
        now = jax.device_get(trainer.state)
        assert now["loss_scale"]["scale"] == scale and overflows < 30
        for part in ("params", "opt"):
            jax.tree.map(np.testing.assert_array_equal, now[part], start[part])
    assert overflows > 5 and trainer.state["loss_scale"]["growth_tracker"] == 1
    assert trainer.state["opt"]["count"] == 1 and trainer.state["step"] == overflows + 1


@exhaustive
@pytest.mark.parametrize("cell", [Cell({"pp": 2, "dp": 2}, 3, 3), Cell()])
def test_a_step_is_dispatched_before_the_last_one_is_known(monkeypatch, cell):
    """The host reads nothing that the last step made, yet rates wait for steps that overflowed."""
    keys = (*FP16, "schedule.warmup_steps=6", "optimizer.weight_decay_end=0.2")
    plant_in_gradients(monkeypatch, [2, 3, 5], device=0)
    trainer = make_trainer("dense", cell, *keys)
    given, read = [], []
    of_step = trainer.rates.of_step
    monkeypatch.setattr(trainer.rates, "of_step", lambda n: given.append(of_step(n)) or given[-1])
    kind = type(trainer.state["step"])
    value = kind._value.fget
    monkeypatch.setattr(kind, "_value", property(lambda a: read.append(id(a)) or value(a)))
    made: list = []
    for number in range(1, 8):
        last = {id(a) for a in jax.tree.leaves((made, trainer.state))}
        read.clear()
        made = trainer.step(make_batch(24, number))
        assert not last & set(read), f"step {number}"
    for rates, step in zip(given, (0, 1, 1, 1, 2, 2, 3), strict=True):
        assert tuple(rates) == tuple(map(np.float32, rates_of_step(trainer.cfg, step)))
    assert trainer.skipped_samples == 72


# ---- state ---------------------------------------------------------------------------------------


def steps_with_overflow(monkeypatch, trainer: Trainer, numbers: range) -> None:
    with monkeypatch.context() as patch:
        plant_in_gradients(patch, [2, 5], device=0)
        for number in numbers:
            trainer.step(make_batch(24, number))


@exhaustive
@pytest.mark.parametrize("cell", [Cell(), Cell({"pp": 2, "dp": 2, "tp": 2}, 3, 3)])
def test_a_resumed_run_has_the_same_bits(monkeypatch, tmp_path, cell):
    keys = (*FP16, f"run.dir={tmp_path}", "precision.loss_scale_window=2")
    whole, first, second = (make_trainer("dense", cell, *keys) for _ in range(3))
    steps_with_overflow(monkeypatch, whole, range(1, 7))
    steps_with_overflow(monkeypatch, first, range(1, 4))
    first.save()
    first.store.wait()
    assert second.restore() == 3 and second.skipped_samples == 24
    steps_with_overflow(monkeypatch, second, range(4, 7))
    jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)
    other = make_trainer("dense", Cell({"dp": 4, "tp": 2}, 3, 1), *keys)
    assert other.restore() == 3
    kept = jax.device_get(first.state["loss_scale"])
    assert jax.device_get(other.state["loss_scale"]) == kept and kept["skipped_samples"] == 24
    assert other.step(make_batch(24, 4))["accepted"]


@exhaustive
def test_checkpoints_of_other_dtypes_load_both_ways(tmp_path):
    plain = make_trainer("dense", Cell(), f"run.dir={tmp_path}")
    plain.step(make_batch(24, 1))
    plain.save()
    plain.store.wait()
    keys = *FP16, f"run.dir={tmp_path}"
    scaled = make_trainer("dense", Cell({"dp": 2}, 3, 1), *keys)
    assert scaled.restore() == 1 and scaled.state["loss_scale"]["scale"] == 1024
    assert scaled.step(make_batch(24, 2))["accepted"]
    scaled.save()
    scaled.store.wait()
    plain = make_trainer("dense", Cell(), f"run.dir={tmp_path}")
    assert plain.restore() == 2 and "loss_scale" not in plain.state


# ---- runs ----------------------------------------------------------------------------------------


def run(folder, *overrides) -> None:
    keys = ["schedule.warmup_steps=4", "train.micro_batch_size=1"]
    cfg = load(None, [*TINY, *keys, *FP16, f"run.dir={folder}", "mesh.dp=2", *overrides])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:2]))


@exhaustive
def test_a_run_logs_skipped_steps_and_goes_on(tmp_path, monkeypatch):
    plant_in_gradients(monkeypatch, [2, 5, 6], device=1)
    run(tmp_path / "whole", "train.steps=8")
    lines = events(tmp_path / "whole")
    assert lines == [
        f"step {step}: gradients overflowed at loss scale {scale}; its batch is left out"
        for step, scale in ((2, 1024), (5, 1024), (6, 512))
    ]
    logged = [r for r in records(tmp_path / "whole") if "loss" in r]
    rates = [r["lr"] / 3e-4 for r in logged]
    assert rates == pytest.approx([0, 0.25, 0.25, 0.5, 0.75, 0.75, 0.75, 1])
    assert [r["loss_scale"] for r in logged] == [1024] * 5 + [512, 256, 256]
    assert [r["skipped_samples"] for r in logged] == [0, 0, 4, 4, 4, 8, 12, 12]
    run(tmp_path / "parts", "train.steps=8", "train.max_tokens=320")
    run(tmp_path / "parts", "train.steps=8")
    again = {r["step"]: r["loss"] for r in records(tmp_path / "parts") if "loss" in r}
    assert again == {r["step"]: r["loss"] for r in logged}


@exhaustive
def test_what_no_scale_can_mend_ends_the_run(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        plant_in_gradients(patch, range(1, 20), device=1)
        with pytest.raises(NonFiniteLoss, match=r"step 4: .* twice the same"):
            run(tmp_path / "least", "train.steps=8", "precision.min_loss_scale=256")
    with pytest.raises(NonFiniteLoss, match=r"step 2: loss nan.* twice the same"):
        run(tmp_path / "loss", "train.steps=8", "run.rehearse=[nan@2]")


@exhaustive
def test_two_processes_skip_and_resume_as_one(tmp_path):
    keys = "precision.compute=float16", "mesh.tp=2", "mesh.zero=3", "train.steps=26"
    two, one = tmp_path / "two", tmp_path / "one"
    finish(one, start(one, 1, *keys))
    finish(two, start(two, 2, *keys, "train.max_tokens=2560"))  # 20 steps
    said = finish(two, start(two, 2, *keys))
    assert "resumed from" in said[0]
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    of_one, of_two = ([r for r in records(f) if "loss_scale" in r] for f in (one, two))
    for name in ("loss_scale", "skipped_samples", "lr"):
        assert [r[name] for r in of_two] == [r[name] for r in of_one]
    assert of_one[-1]["skipped_samples"] > 0 and of_one[-1]["loss"] < 4.6
