"""`mjax sft`: its defaults, what it takes from the weights, and what leaves a run."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from mjax import cli
from mjax.config import load
from mjax.config.validate import validate
from mjax.convert import main as convert
from mjax.data.loader import build_datasets
from mjax.errors import UserError
from mjax.evaluate.__main__ import main as evaluate
from mjax.post.sft import main as sft
from mjax.post.sft import require_conversations, sft_defaults
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.chats import CHATML, MARKED, chat_config, turns, write_lines, write_tokenizer
from tests.marks import exhaustive, quick, slow
from tools.chat_lines import main as chat_lines

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*_*.yaml"))
RECIPES = [path for path in RECIPES if not path.stem.startswith("dpo_")]
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
    for rank, rate in ((0, 2e-5), (8, 2e-4)):
        found = sft_defaults({"lora": {"rank": rank}})
        assert found["schedule"]["lr"] == pytest.approx(rate)
    short = load(None, [*keys, "train.steps=3"], sft_defaults)
    assert (short.train.eval_interval, short.schedule.warmup_steps) == (1, 0)


@exhaustive
def test_keys_of_a_model_change_that_of_the_weights(base, tmp_path):
    folder, path = base
    keys = [f"checkpoint.init_from={folder}", f"data.conversations.path={path}"]
    weights = load(None, keys, sft_defaults).model
    changed = load(None, [*keys, "model.hidden_dropout=0.1"], sft_defaults).model
    assert changed == weights.model_copy(update={"hidden_dropout": 0.1})
    whole = load(None, [*keys, "model.hidden_size=32"], sft_defaults).model
    assert whole.vocab_size != weights.vocab_size


@pytest.mark.parametrize(
    "keys, said",
    [
        (["data.mock=true"], "mjax sft trains on conversations: set data.conversations.path"),
        (["train=3", "data.mock=true"], "train=3"),
        (["train.steps=many", "data.mock=true"], "train.steps='many'"),
        (["data.conversations.path=a.jsonl"], "has no tokenizer"),
        (["data.conversations.path=a.jsonl", "checkpoint.init_from=gone"], "no such folder; give"),
        (["data.conversations.path=a.jsonl", "checkpoint.init_from=a@best"], "init_from=a@best"),
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


@exhaustive
@pytest.mark.parametrize("template", quick([CHATML, MARKED]))
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
    third = exported(monkeypatch, f"{tmp_path / 'run'}@3", tmp_path / "third")
    step = exported(monkeypatch, tmp_path / "run" / "checkpoints" / "3", tmp_path / "again")
    assert all((third[name] == step[name]).all() for name in third)
    assert sft_defaults({"checkpoint": {"init_from": f"{tmp_path / 'run'}@3"}})["model"]
    with pytest.raises(UserError, match="run@9: .*checkpoints has no such step; it has .*3, 4"):
        exported(monkeypatch, f"{tmp_path / 'run'}@9", tmp_path / "none")


@slow
def test_the_best_of_steps_without_a_loss_is_one_line(base, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="@best: no step in .* has a held-out loss"):
        exported(monkeypatch, f"{base[0]}@best", tmp_path / "out")


@exhaustive
@pytest.mark.parametrize("rows", quick(["padded", "longest"]))
def test_rows_of_every_kind_train_alike(rows, base, tmp_path, monkeypatch):
    start, path = base
    keys = [f"checkpoint.init_from={start}", f"data.conversations.path={path}", ONE_DEVICE]
    keys += ["data.seq_length=64", "data.split=[1,0,0]", "precision.compute=float32"]
    keys += ["train.steps=2", "schedule.lr=0.02", "schedule.warmup_steps=0", "log.interval=1"]
    keys += ["train.micro_batch_size=1", "checkpoint.interval=null", "schedule.decay=constant"]

    def steps_of(kind: str) -> list[tuple[float, float]]:
        own = [*keys, f"data.conversations.rows={kind}", f"run.dir={tmp_path / kind}"]
        size = len(build_datasets(load(None, own, sft_defaults), 1, 0)[0].rows.ranks)
        assert size == 12 if kind != "packed" else 1 < size < 12
        cfg = load(None, [*own, f"train.global_batch_size={size}"], sft_defaults)
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
        lines = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        return [(r["loss"], r["grad_norm"]) for r in map(json.loads, lines) if "loss" in r]

    packed = steps_of("packed")
    assert packed[1][0] < packed[0][0]
    np.testing.assert_allclose(steps_of(rows), packed, rtol=2e-5)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_of_whole_models_and_train_on_conversations(path):
    cfg = load(path, [], sft_defaults)
    require_conversations(cfg)
    assert cfg.checkpoint.keep_best == 1
    assert cfg.schedule.lr == (2e-4 if cfg.lora.rank else 2e-5)
    assert cfg.data.tokenizer == cfg.checkpoint.init_from and cfg.run.dir.endswith(path.stem)
    assert cfg.model.num_hidden_layers >= 32
    validate(cfg, device_count=16)


@slow
def test_the_quickstart_of_fine_tuning_goes_from_text_to_answers(tmp_path, monkeypatch, capsys):
    (text := tmp_path / "text").mkdir()
    for file in (ROOT / "mjax" / "data").glob("*.py"):
        shutil.copy(file, text)
    monkeypatch.chdir(tmp_path)
    tiny = ["train.steps=2", "train.eval_steps=1", "train.sample_tokens=2"]
    tiny += ["train.global_batch_size=8", "schedule.warmup_steps=0"]
    keys = f"data.text={text}", "data.split=[1,1,0]", ONE_DEVICE
    cfg = load(ROOT / "configs/quickstart.yaml", [*tiny, *keys])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    assert chat_lines(["runs/quickstart", "--out", "runs/chat_lines"]) == 0
    rows = [json.loads(line) for line in open("runs/chat_lines/train.jsonl")]
    names = [
        {json.loads(line)["messages"][1]["content"].split()[1] for line in open(file)}
        for file in ("runs/chat_lines/train.jsonl", "runs/chat_lines/held_out.jsonl")
    ]
    assert len(rows) > 100 and names[1] and not names[0] & names[1]
    tiny += ["train.eval_interval=1", "checkpoint.interval=1"]
    assert run_sft(monkeypatch, "--config", ROOT / "configs/sft_quickstart.yaml", *tiny) == 0
    said = capsys.readouterr().out
    assert "starting at step 0 from the weights in runs/quickstart" in said
    argv = ["answers", "--ckpt", "runs/sft_quickstart@best", "--limit", "5", "--batch-size", "4"]
    evaluate([*argv, "--file", "runs/chat_lines/held_out.jsonl", "--max-new-tokens", "3"])
    *shown, found = capsys.readouterr().out.splitlines()
    assert json.loads(found) == {"answers": 5, "exact": 0, "exact_match": 0.0} and len(shown) == 3
