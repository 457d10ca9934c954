"""Oracle: sequence classification of decoders is transformers'; the loss of rewards is TRL's."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers

from mjax.config import load
from mjax.convert import main as convert
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.post.reward import reward_defaults
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.oracle.families import assert_gradients_near, make, save_gradients
from tests.oracle.test_preferences import padded, pair_batch


def classifier(name: str, labels: int = 1) -> torch.nn.Module:
    """A tiny random decoder with a head of scores."""
    config = make(name).config
    config.num_labels, config.pad_token_id = labels, 0
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config).float().eval()


@pytest.mark.parametrize("name, labels", [("llama2", 1), ("qwen3", 3), ("gpt2", 2)])
def test_scores_are_theirs_and_come_back(name, labels, tmp_path, monkeypatch):
    theirs = classifier(name, labels)
    theirs.save_pretrained(tmp_path / "hf")
    ids = np.random.default_rng(0).integers(3, 251, (2, 12)).astype(np.int32)
    wanted = theirs(torch.tensor(ids)).logits.detach().numpy()
    lm = from_pretrained(tmp_path / "hf")
    found = lm.definition.bind(lm.params)(ids)
    np.testing.assert_allclose(found[:, -1], wanted, atol=2e-5)
    for argv in (
        ["import", "--hf", tmp_path / "hf", "--out", tmp_path / "ours"],
        ["export", "--ckpt", tmp_path / "ours", "--hf", tmp_path / "back", "--dtype", "float32"],
    ):
        monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
        assert convert() == 0
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    again = back.float().eval()(torch.tensor(ids)).logits.detach().numpy()
    np.testing.assert_allclose(again, wanted, atol=2e-6)
    said = json.loads((tmp_path / "back/config.json").read_text())["architectures"]
    assert said == [type(theirs).__name__]


def test_bradley_terry_is_trls(tmp_path):
    theirs = classifier("llama2")
    theirs.save_pretrained(tmp_path / "hf")
    batch, pairs = pair_batch(reads_last=True)
    keys = [f"checkpoint.init_from={tmp_path / 'hf'}", "data.mock=true", "data.seq_length=64"]
    keys += ["precision.compute=float32", "train.global_batch_size=2", "data.tokenizer=byte"]
    keys += ["reward.center_rewards_coefficient=0.01", f"run.dir={tmp_path / 'run'}"]
    cfg = load(None, keys, reward_defaults)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.load_params(source_of(tmp_path / "hf"))
    loss, _, gradients = trainer.grads(batch)

    answers = [answer for pair in zip(*pairs, strict=True) for answer in pair]
    ids, _, attention = padded(answers)
    scores = theirs(ids, attention_mask=attention).logits[:, 0]
    chosen, rejected = scores.chunk(2)
    margins = torch.arange(len(chosen)) / 4
    # TRL's trainer/reward_trainer.py
    wanted = -torch.nn.functional.logsigmoid(chosen - rejected - margins).mean()
    center = 0.01 * ((chosen + rejected) ** 2).mean()
    (wanted + center).backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    saved = save_gradients(theirs, classifier("llama2"), tmp_path / "grads")
    assert_gradients_near(jax.device_get(gradients), from_pretrained(saved).params)
