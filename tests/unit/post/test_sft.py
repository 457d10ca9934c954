"""`mjax sft`: its defaults, what it takes from the weights, and what leaves a run."""

import json
import sys

import jax
import pytest
from safetensors.numpy import load_file

from mjax import cli
from mjax.config import load
from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.post.sft import main as sft
from mjax.post.sft import require_conversations, sft_defaults
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.chats import CHATML, MARKED, chat_config, turns, write_lines, write_tokenizer

RECORDS = [turns(f"say {n}", f"{n}") for n in range(12)]
ONE_DEVICE = "mesh.dp=1"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(the run of a tiny model that conversations have been trained into, a file of them)."""
    folder = tmp_path_factory.mktemp("base")
    path = write_lines(folder / "chats.jsonl", RECORDS)
    keys = "train.steps=1", "data.split=[1,0,0]", ONE_DEVICE, "schedule.warmup_steps=0"
    cfg = chat_config(folder, path, *keys)
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    return folder / "run", path


def run_sft(monkeypatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sft", *map(str, argv)])
    return sft()


def test_defaults_stand_only_where_a_key_is_not_set(tmp_path):
    keys = ["data.conversations.path=a.jsonl", "data.tokenizer=byte", "train.steps=200"]
    cfg = load(None, keys, sft_defaults)
    assert (cfg.schedule.lr, cfg.schedule.warmup_steps, cfg.optimizer.weight_decay) == (2e-5, 6, 0)
    assert (cfg.train.eval_interval, cfg.checkpoint.interval, cfg.checkpoint.keep_best) == (
        *(20, 20),
        1,
    )
    given = ["schedule.lr=0.1", "schedule.warmup_steps=0", "optimizer.weight_decay=0.2"]
    given += ["train.eval_interval=7", "checkpoint.keep_best=0"]
    (tmp_path / "a.yaml").write_text("checkpoint: {interval: 3}\n")
    cfg = load(tmp_path / "a.yaml", [*keys, *given], sft_defaults)
    assert (cfg.schedule.lr, cfg.schedule.warmup_steps, cfg.optimizer.weight_decay) == (0.1, 0, 0.2)
    assert (cfg.train.eval_interval, cfg.checkpoint.interval, cfg.checkpoint.keep_best) == (7, 3, 0)
    off = load(None, [*keys, "train.eval_interval=null", "data.split=[1,0,0]"], sft_defaults)
    assert off.train.eval_interval is None and off.checkpoint.interval == 20
    assert load(None, [*keys, "checkpoint.keep_best=2"], sft_defaults).checkpoint.keep_best == 2
    short = load(None, [*keys, "train.steps=3"], sft_defaults)
    assert (short.train.eval_interval, short.schedule.warmup_steps) == (1, 0)


@pytest.mark.parametrize(
    "keys, said",
    [
        (["data.mock=true"], "mjax sft trains on conversations: set data.conversations.path"),
        (["train=3", "data.mock=true"], "train=3"),
        (["train.steps=many", "data.mock=true"], "train.steps='many'"),
        (["data.conversations.path=a.jsonl"], "has no tokenizer"),
        (["data.conversations.path=a.jsonl", "checkpoint.init_from=gone"], "gone"),
    ],
)
def test_what_it_cannot_train_is_one_line(keys, said):
    with pytest.raises(UserError, match=said) as e:
        require_conversations(load(None, keys, sft_defaults))
    assert "\n" not in str(e.value)


def test_a_start_without_weights_is_said(monkeypatch, tmp_path, capfd):
    keys = "data.conversations.path=a.jsonl", "data.tokenizer=byte", f"run.dir={tmp_path}"
    require_conversations(load(None, keys, sft_defaults))
    assert "drawn at random; checkpoint.init_from=FOLDER" in capfd.readouterr().err


def test_help_has_the_defaults(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        cli.run(["sft", "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: mjax sft") and "3% of train.steps" in said


def exported(monkeypatch, run, out) -> dict:
    """The tensors of an export, its texts read from `out`."""
    monkeypatch.setattr(sys, "argv", ["convert", "export", "--ckpt", str(run), "--hf", str(out)])
    assert convert() == 0
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_fine_tuned_model_leaves_with_the_template_it_was_trained_with(
    template, base, tmp_path, monkeypatch, capsys
):
    start, path = base
    keys = [f"checkpoint.init_from={start}", f"data.conversations.path={path}"]
    keys += [f"run.dir={tmp_path / 'run'}", "data.seq_length=64", "data.split=[0.5,0.5,0]"]
    keys += ["train.global_batch_size=8", "train.steps=4", "precision.compute=float32"]
    keys += ["train.eval_steps=1", "schedule.lr=0.01", "train.sample_prompt=say 3"]
    keys += ["train.sample_interval=2", "train.sample_tokens=3", "log.interval=1"]
    if template == MARKED:
        keys.append(f"data.tokenizer={write_tokenizer(tmp_path / 'other', MARKED)}")
    assert run_sft(monkeypatch, *keys) == 0
    said = capsys.readouterr().out
    assert f"starting at step 0 from the weights in {start}" in said
    assert said.count("sample: 'say 3' -> ") == 2, said
    newest = exported(monkeypatch, tmp_path / "run", tmp_path / "newest")
    folder = tmp_path / "newest"
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == template
    assert (folder / "tokenizer.json").is_file() and not (folder / "chat_template.jinja").exists()
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    losses = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    assert [*losses] == [1, 2, 3, 4]
    lowest = min(losses, key=losses.get)
    best = exported(monkeypatch, f"{tmp_path / 'run'}@best", tmp_path / "best")
    step = exported(monkeypatch, tmp_path / "run" / "checkpoints" / f"{lowest}", tmp_path / "step")
    assert all((best[name] == step[name]).all() for name in best)
    assert any((best[name] != newest[name]).any() for name in best) == (lowest != 4)


def test_the_best_of_steps_without_a_loss_is_one_line(base, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="@best: no step in .* has a held-out loss"):
        exported(monkeypatch, f"{base[0]}@best", tmp_path / "out")
