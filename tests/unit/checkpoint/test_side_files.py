"""Laws of what travels with weights: import, fine-tune and export give back the model's files."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from mjax import convert
from mjax.checkpoint.base.companion_files import read_side_files, tokenizer_dir, tokenizer_of
from mjax.checkpoint.base.safetensors import pack, read_header
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.base.stored import read_record
from mjax.checkpoint.weights import write_weights
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import load_tokenizer, train_tokenizer
from mjax.errors import UserError
from mjax.generate import __main__ as generate
from mjax.models import build, split
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.marks import exhaustive, slow

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=260,
    hidden_size=32,
    num_hidden_layers=2,
    attention={"num_attention_heads": 4, "num_key_value_heads": 2},
    intermediate_size=48,
    max_position_embeddings=64,
)
IDS = {"bos_token_id": 3, "eos_token_id": [256, 7]}
TRAVELS = """preprocessor_config.json processor_config.json additional_chat_templates/tool.jinja
    spiece.model vocab.txt README.md 1_Pooling/config.json""".split()
STAYS = {
    "modeling_own.py": "import os",
    "start": "#!/bin/sh",
    "pytorch_model.bin": "x",
    "pytorch_model.bin.index.json": "{}",
    "onnx/model.onnx": "x",
    "onnx/config.json": "{}",
    ".git/config": "x",
}
UNREAD_TENSORS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.arange(4, dtype=np.float32),
    "mtp.norm.weight": np.array([1, np.inf], np.float16),
    "mtp.count": np.array(7, np.int64),
}


OWN_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja
    generation_config.json""".split()


def run_convert(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, words)])
    assert convert.main() == 0


@pytest.fixture
def published(tmp_path, monkeypatch) -> Path:
    """A Hugging Face folder with a tokenizer, a chat template and ids of its own."""
    definition, params = split(build(MODEL, nnx.Rngs(0)))
    write_weights(tmp_path / "plain", array_source(MODEL, params), definition.specs)
    folder = tmp_path / "published"
    run_convert(monkeypatch, "export", "--ckpt", tmp_path / "plain", "--hf", folder)
    train_tokenizer(["some text to learn from"], 259, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "x": 1}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "generation_config.json").write_text(json.dumps({**IDS, "temperature": 0.6}))
    for name in TRAVELS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{{"name": "{name}"}}')
    for name, content in STAYS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    config |= {"rope_parameters": rope, "use_cache": False, "pretraining_tp": 1}
    (folder / "config.json").write_text(json.dumps(config | IDS))
    weights = folder / "model.safetensors"
    found = {name: tensor.whole() for name, tensor in read_header(weights).items()}
    weights.write_bytes(pack(found | UNREAD_TENSORS))
    return folder


def fine_tune(folder: Path, steps: int, *overrides: str) -> None:
    model = [f"model={json.dumps(MODEL.model_dump(exclude_none=True))}"]
    base = """data.mock=true data.seq_length=16 mesh.dp=1 train.global_batch_size=2
        train.micro_batch_size=2 schedule.decay_steps=4""".split()
    cfg = load(None, [*model, *base, f"train.steps={steps}", f"run.dir={folder}", *overrides])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))


@exhaustive
@pytest.mark.parametrize("imported", [True, False])
def test_a_fine_tuned_model_keeps_tokenizer_template_and_ids(
    published, tmp_path, monkeypatch, capsys, imported
):
    start, run = published, tmp_path / "run"
    if imported:
        start = tmp_path / "imported"
        run_convert(monkeypatch, "import", "--hf", published, "--out", start)
    fine_tune(run, 1, f"checkpoint.init_from={start}")
    if imported:  # what a resumed run needs is in its own checkpoint
        start.rename(tmp_path / "elsewhere")
    fine_tune(run, 2, f"checkpoint.init_from={start}")
    run_convert(monkeypatch, "export", "--ckpt", run, "--hf", tmp_path / "out")
    ours, theirs = read_side_files(tmp_path / "out"), read_side_files(published)
    config = json.loads(ours.pop("config.json"))
    assert config == json.loads(theirs.pop("config.json"))
    card, base_card = ours.pop("README.md"), theirs.pop("README.md")
    assert b"llama" in card and ours.pop("BASE_README.md") == base_card
    assert ours == theirs and {"README.md", *ours} == {*TRAVELS, *OWN_FILES}
    assert not any((tmp_path / "out" / name).exists() for name in STAYS)
    tensors = read_header(tmp_path / "out" / "model.safetensors")
    for name, wanted in UNREAD_TENSORS.items():
        assert tensors[name].whole().tobytes() == wanted.tobytes()
        assert tensors[name].whole().dtype == wanted.dtype
    capsys.readouterr()
    chat = ["--chat", "--prompt", "some text", "--max-new-tokens", "2", "--dtype", "float32"]
    if imported:
        generate.main(["--ckpt", str(run), *chat])
        assert capsys.readouterr().out
    assert tokenizer_dir(run) == run / "checkpoints" / "2" / "hf"
    assert tokenizer_dir(run / "checkpoints" / "2") == tokenizer_dir(run)


@slow
def test_a_run_on_bytes_is_read_as_bytes(tmp_path):
    fine_tune(tmp_path / "run", 1, "data.tokenizer=byte")
    assert tokenizer_of(tmp_path / "run") == "byte" and tokenizer_dir(tmp_path / "run") is None


@slow
def test_a_run_goes_on_with_the_tokenizer_it_was_trained_with_or_not_at_all(tmp_path, capsys):
    run, text = tmp_path / "run", tmp_path / "x.txt"
    text.write_text("some text to learn from, " * 20)
    file = tmp_path / "tokenizer.json"
    train_tokenizer(["some text to learn from"], 259, file)
    keys = ["data.mock=false", f"data.text={text}", "data.split=[1,0,0]", f"data.tokenizer={file}"]
    fine_tune(run, 1, *keys)
    digests = read_record(run / "checkpoints" / "1")["text_digests"]
    assert digests["tokenizer"] == load_tokenizer(file).digest and digests["text"]
    text.write_text("other text to learn from, " * 20)
    capsys.readouterr()
    fine_tune(run, 2, *keys)
    assert "data.text, which holds another text" in capsys.readouterr().out
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    train_tokenizer(["words of another kind"], 259, file)
    shutil.rmtree(run / "data")  # the record knows it as well
    for tokenizer in (file, "byte"):
        with pytest.raises(UserError, match="than the run's checkpoints were trained with"):
            fine_tune(run, 3, *keys, f"data.tokenizer={tokenizer}")
    kept = {p: t for p, t in before.items() if "checkpoints" in p.parts}
    assert kept == {p: p.stat().st_mtime_ns for p in kept} and not (run / "data").exists()
    fine_tune(run, 1, *keys, "checkpoint.resume=never")  # which starts anew
