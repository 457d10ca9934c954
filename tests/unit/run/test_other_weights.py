"""Weights of another model are refused in one line before any data is read, by each command."""

import importlib
import sys

import jax
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.post.preference_batches import preference_batches
from mjax.run.dry_run import dry_run
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer

MODEL = """model.vocab_size=259 model.hidden_size=16 model.attention.num_attention_heads=2
    model.intermediate_size=16 model.num_hidden_layers=1 mesh.dp=1""".split()
DATA = "data.conversations.path=gone.jsonl", "data.tokenizer=byte", "train.eval_interval=null"
KEYS = {
    "train.__main__": [*DATA],
    "post.sft": [*DATA],
    "post.preference": [*DATA, "train.global_batch_size=2"],
    "post.reward": [*DATA, "train.global_batch_size=2"],
    "post.distill": [*DATA],
    "post.reinforce": ["data.tokenizer=byte", "reinforce.environment=gone:Environment"],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A run with a checkpoint of the model."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    cfg = load(None, [*MODEL, "data.mock=true", f"run.dir={folder}"])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.init()
    trainer.save()
    trainer.store.wait()
    return folder


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("command", KEYS)
def test_each_command_refuses_them_before_data(command, plan, weights, tmp_path, monkeypatch):
    """The data does not exist, so whatever looked for it would say so."""
    keys = [*MODEL, *KEYS[command], "model.intermediate_size=24"]
    keys += [f"checkpoint.init_from={weights}", f"run.dir={tmp_path / 'new'}"]
    if command == "post.distill":
        keys.append(f"distill.teacher={weights}")
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: one)
    monkeypatch.setattr(sys, "argv", [command, *keys, *["--dry-run"] * plan])
    with pytest.raises(UserError) as e:
        importlib.import_module(f"mjax.{command}").main()
    assert str(e.value) == (
        f"the weights in {weights} are of a model with intermediate_size=16, but this run has "
        "model.intermediate_size=24; set it to 16"
    )
    assert not (tmp_path / "new").exists()


def test_a_reference_of_another_model_is_refused_before_data(weights, tmp_path):
    keys = [*MODEL, *DATA, "model.intermediate_size=24", "train.objective=preference"]
    keys += [f"preference.reference={weights}", f"run.dir={tmp_path / 'new'}"]
    cfg = load(None, [*keys, "train.global_batch_size=2"])
    with pytest.raises(UserError, match=f"the weights in {weights} are of .*intermediate_size=16"):
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]), preference_batches)


def test_a_plan_needs_no_weights_that_the_run_would_not_read(
    weights, tmp_path, capsys, monkeypatch
):
    """Those that are not here, and those of a run that goes on from its own checkpoint."""
    given = [*MODEL, "data.mock=true", "data.seq_length=8", "train.global_batch_size=1"]
    elsewhere = [f"run.dir={tmp_path}", f"checkpoint.init_from={tmp_path / 'elsewhere'}"]
    goes_on = [f"run.dir={weights}", f"checkpoint.init_from={tmp_path}"]
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: one)
    for keys in elsewhere, goes_on:
        dry_run(load(None, [*given, *keys]), compiles=False)
    assert capsys.readouterr().out.count("parameters  ") == 2
