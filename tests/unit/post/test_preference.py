"""`mjax preference` and `mjax reward`: their defaults, what they refuse, the quickstart."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.interop.sources import source_of
from mjax.post.base import stored_scores
from mjax.post.preference import main as preference
from mjax.post.preference import preference_defaults
from mjax.post.preferences.objective import Preference
from mjax.post.reward import main as reward
from mjax.post.reward import reward_defaults
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.chats import write_lines
from tests.marks import exhaustive
from tests.tiny import TINY
from tools.preference_pairs import main as preference_pairs
from tools.preference_pairs import pairs, vowels

ROOT = Path(__file__).parents[3]


def test_defaults_are_those_of_fine_tuning_but_for_the_objective_and_the_rate():
    cfg = load(None, ["data.mock=true"], preference_defaults)
    assert cfg.train.objective == "preference" and cfg.schedule.lr == 1e-6
    assert cfg.preference.losses == {"sigmoid": 1.0} and cfg.preference.needs_reference
    cfg = load(None, ["data.mock=true", "lora.rank=4"], preference_defaults)
    assert cfg.schedule.lr == pytest.approx(1e-5)
    assert load(None, ["data.mock=true", "schedule.lr=0.1"], preference_defaults).schedule.lr == 0.1
    cfg = load(None, ["data.mock=true", "lora.rank=4"], reward_defaults)
    assert cfg.model.num_labels == 1 and cfg.lora.trained == ["score"]
    assert cfg.checkpoint.init_changes == ["heads"]


def test_a_command_without_roles_refuses_a_batch_that_awaits_them():
    cfg = load(None, TINY, preference_defaults)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.init()
    rows = {"tokens": np.zeros((4, 16), np.int32), "labels": np.zeros((4, 16), np.int32)}
    rows |= {"segment_ids": np.ones((4, 16), np.int32), "positions": np.zeros((4, 16), np.int32)}
    batch = trainer.objective.make_fields(rows, 0, 0, np.arange(4))
    with pytest.raises(UserError, match="ref_log_probs is computed by a role.*mjax preference"):
        trainer.place(rows | batch)


def test_generated_pairs_have_their_preference():
    found = pairs(50, seed=0)
    assert all(vowels(one["chosen"]) > vowels(one["rejected"]) + 1 for one in found)
    assert found == pairs(50, seed=0) != pairs(50, seed=1)


def go(monkeypatch, command, *argv: object) -> None:
    monkeypatch.setattr(sys, "argv", ["it", *map(str, argv)])
    assert command() == 0


def last_of(folder: Path) -> dict:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "eval_loss" in record][-1]


@exhaustive
def test_the_quickstart_goes_from_pairs_to_a_preference_and_to_a_reward_model(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    go(monkeypatch, preference_pairs, "--out", "runs/pairs", "--train", 300, "--held-out", 40)
    config = ROOT / "configs/dpo_quickstart.yaml"
    keys = "train.steps=12", "train.eval_interval=12", "train.eval_steps=1"
    keys = *keys, "train.global_batch_size=8", "train.micro_batch_size=1", "schedule.warmup_steps=0"
    go(monkeypatch, preference, "--config", config, "--preview", 1)
    assert "+1: words in" in capsys.readouterr().out
    go(monkeypatch, preference, "--config", config, "--preview", 1, "data.shared_prefixes=true")
    shown = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(shown) if line.startswith("prompt: words in"))
    assert [line[:2] for line in shown[at + 1 : at + 3]] == ["+1", "-1"]
    go(monkeypatch, preference, "--config", config, *keys)
    found = last_of(tmp_path / "runs/dpo_quickstart")
    assert found["eval_rewards/accuracies"] > 0.8 and found["eval_loss"] < 0.6

    path = write_lines(tmp_path / "pairs.jsonl", pairs(60, seed=5))
    start = "checkpoint.init_from=runs/dpo_quickstart", "run.dir=runs/reward", "data.tokenizer=byte"
    keys = *keys, f"data.conversations.path={path}", "data.split=[0.8,0.2,0]", "data.seq_length=128"
    keys = *keys, "schedule.lr=1e-3", "precision.compute=float32", "train.attention=xla"
    go(monkeypatch, reward, *start, *keys)
    assert last_of(tmp_path / "runs/reward")["eval_accuracy"] > 0.5
    assert source_of("runs/reward").cfg.num_labels == 1


@pytest.mark.parametrize("is_stored", [False, True])
def test_random_pairs_have_a_random_reference_only_where_no_step_computes_one(is_stored):
    key = f"preference.precompute_ref_log_probs={str(is_stored).lower()}"
    cfg = load(None, ["data.mock=true", key], preference_defaults)
    batch = {"tokens": np.zeros((2, 64), np.int32)}
    made = Preference.of(cfg).make_fields(batch, 0, 0, np.arange(2))
    assert ("ref_log_probs" in made) == is_stored


def test_scores_that_only_some_processes_see_are_refused(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(stored_scores, "said_by_all", lambda word: [*said, word])
    stored_scores.require_one_folder(tmp_path, True)
    said.append(b"0")
    stored_scores.require_one_folder(tmp_path, False)
    with pytest.raises(UserError, match="some processes have scores there .* data.cache_dir"):
        stored_scores.require_one_folder(tmp_path, True)
