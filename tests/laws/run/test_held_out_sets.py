"""Laws of held-out sets: each has its own loss, the test is the third share, measured once."""

import json
from functools import partial

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.held_out import third_share
from mjax.errors import UserError
from mjax.evaluate.__main__ import main as evaluate
from mjax.run.evaluation import loss_of_split
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.laws.run.test_failures import records
from tests.marks import exhaustive
from tests.tiny import TINY
from tests.unit.data.test_loader import corpus

KEYS = [*TINY, "model.vocab_size=256", "data.mock=false", "train.steps=2", "train.eval_steps=2"]
KEYS += ["schedule.lr=0", "train.eval_interval=2"]  # the weights are those of the start


def run(folder, *keys) -> dict:
    """The last record of an evaluation."""
    cfg = load(None, [*KEYS, f"run.dir={folder}", *keys])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    return [r for r in records(folder) if "eval_loss" in r][-1]


@exhaustive
def test_each_set_has_the_loss_that_it_has_as_the_only_one(tmp_path):
    a, b, c = (corpus(tmp_path / name, seed) for seed, name in enumerate("abc"))
    sets = f"data.eval_sets={{code: {b}, law: [{b}, {c}]}}"
    shares = "data.split=[0.8, 0.1, 0.1]"
    found = run(tmp_path / "run", f"data.paths=[{a}]", sets, shares, "train.test_steps=3")
    alone = run(tmp_path / "one", f"data.paths=[{a}]", f"data.valid_paths=[{b}]")
    assert found["eval_loss/code"] == alone["eval_loss"] != found["eval_loss"]
    assert found["eval_loss/law"] not in (found["eval_loss"], alone["eval_loss"])
    (test,) = (r for r in records(tmp_path / "run") if "test_loss" in r)
    assert test["step"] == 2 and test["test_tokens"] == 3 * 4 * 16
    again = partial(loss_of_split, tmp_path / "run", steps=None, overrides=["mesh.dp=1"])
    one = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: one)
        assert again("test")["loss"] == test["test_loss"]
        assert again("code")["loss"] == found["eval_loss/code"]
        assert again("valid")["loss"] == found["eval_loss"]
    wide = loss_of_split(tmp_path / "run", "valid", None, ["mesh.dp=2", "mesh.tp=4"])
    np.testing.assert_allclose(wide["loss"], found["eval_loss"], rtol=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: one)
        with pytest.raises(UserError, match="--split x: .* it has valid, code, law"):
            again("x")


def test_the_test_is_megatrons_third_split(tmp_path):
    path = corpus(tmp_path / "a", n=1000)
    shares = [0.969, 0.03, 0.001]
    keys = [f"data.paths=[{path}]", f"data.split={shares}", "train.test_steps=2"]
    cfg = load(None, [*KEYS, *keys, f"run.dir={tmp_path}"])
    got, want = third_share(cfg), GPTDataset(path, "test", shares, 16, 8, cfg.run.seed)
    np.testing.assert_array_equal(got.batch(range(8))["tokens"], want.batch(range(8))["tokens"])


@exhaustive
def test_sets_of_text_are_tokenized_as_the_training_text_is(tmp_path, capsys):
    for name in ("train", "more"):
        words = [f"{name} {i} text of a line, and then some words\n" for i in range(400)]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": w}) + "\n" for w in words)
        )
    text = [f"data.text={tmp_path}/train.jsonl", "data.tokenizer=byte", "model.vocab_size=257"]
    sets = f"data.eval_sets={{more: {tmp_path}/more.jsonl}}"
    found = run(tmp_path / "run", *text, sets, "data.split=[0.8, 0.1, 0.1]")
    assert (tmp_path / "run" / "eval_sets" / "more").is_dir()
    assert 4 < found["eval_loss/more"] < 7
    capsys.readouterr()
    mesh = ["mesh.dp=4", "mesh.tp=2", "train.micro_batch_size=1"]
    evaluate(["loss", "--run", str(tmp_path / "run"), "--split", "more", *mesh])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["loss"] == pytest.approx(found["eval_loss/more"], rel=1e-5)
    assert printed["split"] == "more" and printed["step"] == 2
