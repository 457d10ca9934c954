"""Recipes beside bf16: the order of runs, what is compared, what share is of few bits."""

import json

import numpy as np

from mjax.report.runs import Run
from tools.precision_curves import (
    CONFIG,
    RECIPES,
    VOCABULARY,
    records_of_runs,
    results,
    shares,
    trainings,
)


def test_a_seed_ends_before_the_next_begins_and_its_runs_differ_by_recipe_alone(tmp_path):
    found = list(trainings(tmp_path, 2, 100, ["data.seq_length=128"]))
    assert [training.name for training in found[:3]] == ["bf16_1", "control_1", "block128_1"]
    assert [training.name[-1] for training in found] == ["1"] * 7 + ["2"] * 7
    assert all(training.steps == 100 for training in found)
    plain = set(found[0].arguments)
    for training in found[1:7]:
        name = training.name.removesuffix("_1")
        assert set(training.arguments) - plain == set(RECIPES[name].keys)
        assert plain <= set(training.arguments)
    assert plain.symmetric_difference(found[7].arguments) == {"run.seed=1", "run.seed=2"}


def test_four_fifths_of_all_flops_are_of_four_bits(tmp_path):
    """Counted by hand: 6 a weight, and attention over half the keys."""
    (tmp_path / "config.yaml").write_text(CONFIG.format(out=tmp_path, vocabulary=VOCABULARY))
    found = shares(tmp_path, [])
    layer = 512 * (512 + 512 + 512) + 3 * 512 * 1536
    attention = 2 * 512 * (256 + 1) / 2  # products of a query with half the keys, and of values
    whole = 14 * (layer + attention) + 512 * VOCABULARY
    np.testing.assert_allclose(found["mxfp8"], 14 * layer / whole, rtol=1e-3)
    np.testing.assert_allclose(found["nvfp4"], 12 * layer / whole, rtol=1e-3)
    assert found["nvfp4"] >= 0.8 and found["control"] == 0


def made_up(name: str, losses: list[float]) -> Run:
    """A run of 20 steps with evaluations after 10 and 20."""
    steps = np.arange(1.0, 21)
    training = {"step": steps, "loss": np.where(steps > 18, losses[-1], 9.0)}
    held_out = {"step": np.array([10.0, 20.0]), "eval_loss": np.array(losses)}
    return Run(name, training, held_out, [], {})


def test_differences_are_of_pairs_with_one_seed(tmp_path):
    """Seeds that differ much leave no error where each pair differs alike."""
    runs = [made_up("bf16_1", [4.0, 2.0]), made_up("bf16_2", [5.0, 3.0])]
    runs += [made_up("mxfp8_1", [4.04, 2.02]), made_up("mxfp8_2", [5.0, 3.03])]
    runs += [made_up("current_1", [4.0, 2.0]), made_up("current_2", [5.0, 3.024])]
    runs += [made_up("block128_2", [5.0, 3.03]), made_up("nvfp4_3", [4.0, 1.0])]
    rounded = dict.fromkeys(RECIPES, 0.81)
    lines = results({run.name: run for run in runs}, rounded, tmp_path)
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines if line[:1] == "|"}
    assert rows["| bf16"][:3] == ["2", "0.0%", "2.5000"]
    assert rows["| mxfp8"][:4] == ["2", "81.0%", "2.5250", "+1.000 ± 0.000"]
    assert rows["| mxfp8"][4:] == ["0.5", "no", "+1.000, +1.000", "+1.000 ± 0.000 |"]
    assert rows["| current"][3:6] == ["+0.400 ± 0.400", "0.5", "yes"]
    assert rows["| block128"][3:6] == ["+1.000", "0.3", "no"]
    assert "| nvfp4" not in rows  # no bf16 of its seed
    assert (tmp_path / "precision_loss.svg").read_text().count("<polyline") == 7
    assert (tmp_path / "precision_difference.svg").read_text().count("<polyline") == 5


def test_a_run_that_was_cut_off_leaves_its_losses(tmp_path):
    folder = tmp_path / "bf16_1"
    folder.mkdir()
    lines = [{"step": step, "loss": float(step)} for step in range(1, 26)]
    lines.insert(10, {"step": 10, "eval_loss": 2.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(records_of_runs(tmp_path, list(trainings(tmp_path, 1))))
    assert found == [
        {"run": "bf16_1", "step": 10, "eval_loss": 2.5},
        {"run": "bf16_1", "step": 10, "loss": 5.5},
        {"run": "bf16_1", "step": 20, "loss": 15.5},
    ]
