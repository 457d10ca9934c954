"""Laws of preferences: the reference, packing, meshes, resuming, and what is learned."""

import json
import math

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.config.schema.preference import PreferenceConfig
from mjax.errors import UserError
from mjax.post.base.role_programs import BASE_LOG_PROBS, LOG_PROBS
from mjax.post.preference import preference_defaults
from mjax.post.preference_batches import preference_batches
from mjax.post.preferences.pair_losses import AnswerSums, dpo
from mjax.prove import deviation, fill_adapters
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from mjax.train.step import GRADIENTS, LOSSES
from tests.chats import write_lines, write_tokenizer
from tests.marks import exhaustive, slow
from tests.tiny import TINY
from tools.preference_pairs import pairs


def config(folder, *keys: str, count: int = 24):
    """A tiny run on generated pairs."""
    path = write_lines(folder / "pairs.jsonl", pairs(count, seed=3))
    name = write_tokenizer(folder / "tokenizer", None, bos=False)
    own = [key for key in TINY if not key.startswith(("data.mock", "model.vocab_size"))]
    given = ["model.vocab_size=260", f"data.tokenizer={name}", f"data.conversations.path={path}"]
    given += ["data.seq_length=256", f"run.dir={folder / 'run'}", "data.split=[1,0,0]"]
    given += ["train.eval_interval=null", "schedule.lr=1e-3", "schedule.warmup_steps=0"]
    return load(None, [*own, *given, *keys], preference_defaults)


def trainer_of(cfg, devices: int = 1) -> tuple[Trainer, object]:
    """(a trainer with its roles, its batches)."""
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    trainer.init()
    return trainer, preference_batches(trainer, {}).training


def first_step(folder, *keys: str, devices: int = 1) -> tuple[dict, dict, np.ndarray]:
    """(the losses, the gradients and the tokens of the first batch, which has all pairs)."""
    cfg = config(folder, *keys)
    trainer, stream = trainer_of(cfg, devices)
    (batch,) = list(stream.batches(0, 1, None))
    found = trainer.run_program(GRADIENTS, batch)
    return *jax.device_get((found.losses, found.gradients)), batch["tokens"]


ALL_PACKED = "train.global_batch_size=5", "train.micro_batch_size=1"
ALL_PADDED = (
    "train.global_batch_size=24",
    "train.micro_batch_size=1",
    "data.conversations.rows=padded",
)


ALL_SHARED = (
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "data.shared_prefixes=true",
)


@slow
def test_at_step_0_the_loss_is_log_2_and_packing_changes_no_gradient(tmp_path):
    losses, gradients, tokens = first_step(tmp_path, *ALL_PACKED)
    assert losses["loss"] == pytest.approx(math.log(2), abs=1e-6)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert losses[f"rewards/{name}"] == 0
    one_a_row, unpacked, padded = first_step(tmp_path, *ALL_PADDED)
    assert tokens.shape[0] == 5 and padded.shape[0] == 24
    assert (tokens != 0).sum() == (padded != 0).sum()
    assert deviation(one_a_row["loss"], losses["loss"]) < 1e-6
    shared, of_shared, fewer = first_step(tmp_path, *ALL_SHARED)
    assert fewer.shape[0] == 4 and (fewer != 0).sum() < 0.8 * (tokens != 0).sum()
    for name, value in losses.items():
        assert shared[name] == pytest.approx(value, rel=1e-6), name
    for a, b, c in zip(*map(jax.tree.leaves, (unpacked, gradients, of_shared)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())
        np.testing.assert_allclose(c, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())


def test_a_reference_that_is_not_there_is_refused_before_data_is_written(tmp_path):
    cfg = config(tmp_path, f"preference.reference={tmp_path / 'none'}", *ALL_PACKED)
    with pytest.raises(UserError, match="none"):
        preference_batches(Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1])), {})
    assert not (tmp_path / "run").exists()


def test_swapping_a_pair_flips_the_sign():
    rng = np.random.default_rng(0)
    one, two = (AnswerSums(*rng.normal(-9, 3, (2, 5)), np.ones(5)) for _ in range(2))
    settings = PreferenceConfig()
    forward, backward = dpo(settings, one, two), dpo(settings, two, one)
    logits = settings.beta * (one.log_ratio - two.log_ratio)
    # -log s(x) and -log s(-x) differ by x
    np.testing.assert_allclose(backward - forward, logits, rtol=1e-4, atol=1e-6)


@slow
def test_with_adapters_the_reference_is_the_base(tmp_path):
    adapted, stream = trainer_of(config(tmp_path, "lora.rank=3", *ALL_PACKED))
    fill_adapters(adapted)
    (batch,) = list(stream.batches(0, 1, None))
    found = adapted.place(batch)["ref_log_probs"]
    plain, _ = trainer_of(config(tmp_path, *ALL_PACKED))
    wanted = plain.run_placed(LOG_PROBS, plain.placer.place(batch), plain.weights())
    np.testing.assert_array_equal(found, wanted)
    placed = adapted.placer.place(batch)
    of_policy = adapted.run_placed(LOG_PROBS, placed, adapted.weights())
    assert np.abs(np.asarray(of_policy) - np.asarray(found)).max() > 1e-2
    of_base = adapted.run_placed(BASE_LOG_PROBS, placed, adapted.weights())
    np.testing.assert_array_equal(of_base, found)


MESHES = [
    ("mesh.dp=2", "mesh.tp=2", "mesh.cp=2", "mesh.zero=3"),
    ("mesh.dp=4", "mesh.tp=2", "mesh.zero=1", "preference.loss_type=kto"),
    ("mesh.dp=2", "mesh.cp=4", "lora.rank=3", "preference.loss_type=[ipo,sft]"),
    ("mesh.dp=2", "mesh.ep=2", "mesh.tp=2", "model.layer_pattern=full+experts"),
    ("mesh.pp=2", "mesh.dp=2", "mesh.tp=2", "model.num_hidden_layers=2"),
    ("mesh.pp=2", "mesh.dp=4", "model.num_hidden_layers=2", "preference.loss_type=kto"),
]


@exhaustive
@pytest.mark.parametrize("keys", MESHES, ids=lambda k: k[0][5:])
def test_roles_give_the_same_fields_on_every_mesh(keys, tmp_path):
    own = [key for key in keys if not key.startswith("mesh.")]
    if "model.layer_pattern=full+experts" in own:
        own += ["model.moe.num_experts=4", "run.seed=1"]
    losses = []
    for mesh, devices in ((), 1), (keys, 8):
        cfg = config(tmp_path, *own, *mesh, "train.global_batch_size=8", "train.micro_batch_size=1")
        trainer, stream = trainer_of(cfg, devices)
        batches = stream.batches(0, 3, None)
        steps = [jax.device_get(trainer.step(batch)) for batch in batches]
        losses.append([[step[name] for step in steps] for name in ("loss", "rewards/chosen")])
    assert np.abs(losses[0][1]).max() > 1e-3
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4, atol=2e-5)


def records_of(folder) -> list[dict]:
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


@exhaustive
def test_a_run_with_a_stored_reference_goes_on_at_another_dp(tmp_path):
    def go(folder, dp: int, steps: int, *keys: str) -> None:
        (folder).mkdir(exist_ok=True)
        cfg = config(
            folder,
            f"mesh.dp={dp}",
            f"train.steps={steps}",
            "train.global_batch_size=4",
            "train.micro_batch_size=1",
            "schedule.decay_steps=4",
            "checkpoint.interval=2",
            *keys,
        )
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:dp]), preference_batches)

    stored = "preference.precompute_ref_log_probs=true"
    go(tmp_path / "online", 1, 4)
    go(tmp_path / "stored", 2, 2, stored)
    go(tmp_path / "stored", 4, 4, stored)
    wanted, found = records_of(tmp_path / "online"), records_of(tmp_path / "stored")
    assert [r["step"] for r in found] == [1, 2, 3, 4] == [r["step"] for r in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["rewards/margins"] == pytest.approx(b["rewards/margins"], abs=1e-5)
    assert found[-1]["rewards/margins"] > 0


@exhaustive
def test_dpo_learns_a_planted_preference(tmp_path):
    """Pairs whose chosen answer has more vowels; none of the held-out ones is trained on."""
    keys = "train.global_batch_size=16", "train.micro_batch_size=16", "schedule.lr=3e-3"
    keys = *keys, "data.seq_length=64"  # a pair a row
    trainer, stream = trainer_of(config(tmp_path, *keys, "train.steps=50", count=600))
    held_out = config(tmp_path, *keys, count=600).model_copy(update={"run": trainer.cfg.run})
    path = write_lines(tmp_path / "held_out.jsonl", pairs(200, seed=4))
    conversations = held_out.data.conversations.model_copy(update={"path": path})
    data = held_out.data.model_copy(update={"conversations": conversations})
    other, others = trainer_of(held_out.model_copy(update={"data": data}))
    (unseen,) = list(others.batches(0, 1, None))

    def accuracy() -> float:
        sums, counts = trainer.run_program(LOSSES, unseen)
        return float(sums["rewards/accuracies"] / counts["rewards/accuracies"])

    assert accuracy() == 0  # all rewards are equal
    for batch in stream.batches(0, 50, None):
        trainer.step(batch)
    assert accuracy() > 0.85
