"""The balance loss of an imported model is transformers' load_balancing_loss_func, masks too."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from mjax.config import load
from mjax.interop.huggingface.families.engine import config_to_hf
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import trained_only
from mjax.train import Trainer
from tests.marks import slow
from tests.oracle.families import assert_gradients_near, make, save_gradients

ROWS, SEQ, COEF = 4, 12, 0.5
OTHERS = ["qwen2_moe", "olmoe", "qwen3_moe", "gpt_oss", "granitemoehybrid", "qwen3_next"]


def trainer_of(folder: Path, *more: str) -> Trainer:
    """A trainer of an imported model as its config.json says it."""
    model = from_pretrained(folder).cfg.model_dump()
    keys = {f"model.{key}": value for key, value in model.items()}
    keys |= {"data.mock": True, "data.seq_length": SEQ, "precision.compute": "float32"}
    keys |= {"train.global_batch_size": ROWS, "train.micro_batch_size": ROWS, "mesh.dp": 1}
    given = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    cfg = load(None, [*given, *more])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.load_params(source_of(folder))
    return trainer


@pytest.mark.parametrize("name", ["mixtral", *(pytest.param(n, marks=slow) for n in OTHERS)])
def test_loss_and_gradients_equal_transformers(name, tmp_path):
    theirs = make(name)
    theirs.config.router_aux_loss_coef = COEF
    theirs.save_pretrained(tmp_path / "hf")
    trainer = trainer_of(tmp_path / "hf", "model.moe.router_aux_loss_over=global_batch")
    assert trainer.cfg.model.moe.router_aux_loss_coef == COEF
    assert config_to_hf(trainer.cfg.model)["router_aux_loss_coef"] == COEF

    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(3, 251, (2, ROWS, SEQ)).astype(np.int32)
    mask = (np.arange(SEQ) < [[12], [5], [9], [1]]).astype(np.int32)
    out = theirs(
        torch.tensor(tokens).long(), attention_mask=torch.tensor(mask), output_router_logits=True
    )
    losses = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), torch.tensor(labels).long().flatten(), reduction="none"
    )
    loss = (losses * torch.tensor(mask).flatten()).sum() / mask.sum()
    (loss + COEF * out.aux_loss).backward()

    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask.astype(np.float32)}
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), mask.shape)
    batch |= {"segment_ids": mask, "positions": positions}
    _, _, gradients = trainer.grads(batch)
    metrics = trainer.step(batch)
    assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert float(metrics["aux_loss"]) == pytest.approx(COEF * out.aux_loss.item(), rel=1e-5)

    saved = from_pretrained(save_gradients(theirs, make(name), tmp_path / "grads")).params
    specs = trainer.definition.specs
    assert_gradients_near(*(trained_only(tree, specs) for tree in (gradients, saved)))
