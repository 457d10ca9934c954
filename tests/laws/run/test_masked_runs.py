"""Law: a run on sentences of a text gives the same losses after a resume, and on other meshes.

Pairs of texts, padding and the whole-word masks of a trained tokenizer, by the command's own loop.
"""

import json

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.config.schema.run import MeshConfig
from mjax.data.base.tokenizer import train_tokenizer, word_continuations
from mjax.data.loader import build_datasets
from mjax.data.preprocess import main
from mjax.errors import UserError
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.marks import exhaustive, slow

KEYS = [
    "model.vocab_size=304",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.layer_pattern=B",
    "model.norm=layernorm",
    "model.norm_placement=post_residual",
    "model.position_embedding=learned",
    "model.bert={type_vocab_size: 2, embedding_norm: true, mlm_head: true, num_labels: 2}",
    "model.mlp_gated=false",
    "model.tie_word_embeddings=true",
    "data.tokenizer=train:300",
    "data.seq_length=32",
    "data.split=[0.8, 0.2, 0.0]",
    "data.masked={mask_token_id: 300, cls_token_id: 301, sep_token_id: 302, pad_token_id: 303, "
    "sentences: true}",
    "precision.compute=float32",
    "train.objective=masked_lm",
    "train.attention=xla",
    "train.steps=4",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.eval_interval=2",
    "train.eval_steps=1",
    "checkpoint.interval=2",
    "log.interval=1",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Twenty documents of a few sentences."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = "the a small large house tree runs falls under over and".split()
    for i in range(20):
        sentences = [" ".join(rng.choice(words, rng.integers(3, 9))) for _ in range(8)]
        (folder / f"{i}.txt").write_text(" ".join(s.capitalize() + "." for s in sentences))
    return folder


def records(folder) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run(text, folder, *more) -> list[dict]:
    """The records of a run, of losses and of held-out data."""
    cfg = load(None, [*KEYS, f"data.text={text}", f"run.dir={folder}", *more])
    devices = 8 if "mesh.dp=2" in more else 1
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    return [r for r in records(folder) if "loss" in r or "eval_loss" in r]


@exhaustive
@pytest.mark.parametrize("sharded", [pytest.param(True, marks=slow), False])
def test_a_run_resumes_and_reads_the_same_samples(text, tmp_path, sharded):
    whole = run(text, tmp_path / "whole")
    run(text, tmp_path / "parts", "train.steps=2", "schedule.decay_steps=4")
    more = ["mesh.dp=2", "mesh.tp=2", "mesh.cp=2"] if sharded else []
    parts = run(text, tmp_path / "parts", "schedule.decay_steps=4", *more)
    assert [r["step"] for r in whole] == [r["step"] for r in parts]
    names = {name for r in whole for name in r if "loss" in name or "accuracy" in name}
    assert {"row_loss", "eval_loss", "eval_accuracy", "eval_row_loss", "eval_row_accuracy"} < names
    for one, other in zip(whole, parts, strict=True):
        for name in names & set(one):
            assert other[name] == pytest.approx(one[name], rel=1e-5), (name, one["step"])
    trained = [r for r in whole if "loss" in r]
    assert all(r["loss"] > 3 and r["row_loss"] < 2 for r in trained)


def test_two_corpora_are_blended(text, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer([file.read_text() for file in text.glob("*.txt")], 300, tokenizer)
    for name in "ab":
        given = ["--input", str(text), "--output", str(tmp_path / name), "--workers", "1"]
        main([*given, "--tokenizer", str(tokenizer), "--split-sentences"])
    paths = [f"data.paths=[{tmp_path}/a, {tmp_path}/b]", "data.weights=[3.0, 1.0]"]
    keys = [key for key in KEYS if not key.startswith("data.tokenizer")]
    cfg = load(None, [*keys, *paths, f"data.tokenizer={tokenizer}"])
    data, held_out = build_datasets(cfg, 50, 10)
    batch = data.batch(np.arange(50))
    assert {name: field.shape for name, field in batch.items()} == {
        "row_label": (50,),
        **dict.fromkeys(
            ["tokens", "labels", "loss_mask", "segment_ids", "positions", "token_types"], (50, 32)
        ),
    }
    assert len(held_out) >= 10 and data.max_documents == 2
    assert set(batch["row_label"].tolist()) == {0, 1}
    continues = word_continuations(tokenizer)
    assert 0 < continues.sum() < len(continues)
    assert word_continuations("byte") is None


@exhaustive
def test_a_classifier_starts_from_masked_tokens_and_learns(text, tmp_path):
    """Its trunk is that of the first run, its head is drawn, and the lost head is named."""
    run(text, tmp_path / "masked")
    rng, words = np.random.default_rng(0), ["house", "tree", "small", "runs"]
    rows = []
    for i in range(200):
        filler = " ".join(rng.choice(words, 4))
        rows.append({"text": f"{('the', 'under')[i % 2]} {filler} {i}", "label": i % 2})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = [key for key in KEYS if not key.startswith(("model.bert", "data.masked", "train."))]
    keys += [
        "model.bert={type_vocab_size: 2, embedding_norm: true, num_labels: 3}",
        "data.masked={cls_token_id: 301, sep_token_id: 302, pad_token_id: 303}",
        f"data.tokenizer={tmp_path}/masked/data/tokenizer.json",
        f"data.text={tmp_path}/rows.jsonl",
        "train.objective=classify",
        "train.attention=xla",
        "train.steps=60",
        "train.global_batch_size=8",
        "train.eval_interval=60",
        "train.eval_steps=2",
        "schedule.lr=0.003",
        f"run.dir={tmp_path}/classes",
        f"checkpoint.init_from={tmp_path}/masked",
    ]
    with pytest.raises(UserError, match=r"bert.mlm_head=True"):
        train(load(None, keys), make_mesh(MeshConfig(dp=1), jax.devices()[:1]))
    cfg = load(None, [*keys, "checkpoint.init_changes=[heads]"])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    summary = trainer.load_params(source_of(tmp_path / "masked"))
    assert "masked_head: left out" in summary and "classifier.weight: [0, 0]" in summary
    whole = from_pretrained(tmp_path / "masked").params
    loaded = trainer.params()
    jax.tree.map(np.testing.assert_array_equal, loaded["dense"], whole["dense"])
    assert np.std(loaded["classifier"]["weight"]) > 0
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    last = records(tmp_path / "classes")
    assert [r["eval_accuracy"] for r in last if "eval_loss" in r][-1] > 0.9
