"""Laws of batches that a caller gives to the loop: trained on, evaluated, named and resumed."""

import json
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import NonFiniteLoss
from mjax.models.base.context import Documents
from mjax.run.batches import RunBatches, from_config
from mjax.run.loop import train
from mjax.run.resume import restored_record
from mjax.run.training_run import bound_documents
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.run.test_failures import losses, records
from tests.marks import exhaustive, slow
from tests.tiny import TINY

STEPS, ROWS, WIDTH = 6, 4, 16


@dataclass
class Counting:
    """Rows that count on from a number; a later batch begins where the batch before it ended."""

    seed: int
    position: int = 0
    begins: int = 0  # the batch that `position` is the first number of
    documents: Documents = Documents(1)
    poisoned: int | None = None

    def batches(self, start, count, rows):
        assert start >= self.begins
        for number in range(start, start + count):
            first = self.position + (number - self.begins) * ROWS * (WIDTH + 1)
            tokens = (first + np.arange(ROWS * (WIDTH + 1)) * self.seed) % 97
            tokens = tokens.reshape(ROWS, -1).astype(np.int32)[rows(ROWS)]
            mask = np.ones((len(tokens), WIDTH), np.float32)
            yield {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": np.inf * mask if number == self.poisoned else mask,
                "segment_ids": mask.astype(np.int32),
                "positions": np.broadcast_to(np.arange(WIDTH, dtype=np.int32), mask.shape),
            }

    def describe(self, start, count, most):
        return f"numbers of batches {start} to {start + count - 1}"


def counting(trainer, record, **more):
    """A source whose position is in the checkpoint and nowhere else."""
    saved = record.get("batches", {"position": 40, "begins": 0})

    def record_at(step):
        position = saved["position"] + (step - saved["begins"]) * ROWS * (WIDTH + 1)
        return {"position": position, "begins": step}

    stream = Counting(seed=3, **saved, **more)
    return RunBatches(stream, Counting(seed=5), record_at)


def config(folder, steps=STEPS, *more):
    keys = [f"run.dir={folder}", f"train.steps={steps}", "train.eval_steps=2"]
    keys += ["schedule.decay_steps=6", "checkpoint.interval=2", "train.eval_interval=3"]
    return load(None, [*TINY, *keys, *more])


def final_params(cfg):
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.restore()
    return trainer, jax.device_get(trainer.params())


@exhaustive
def test_a_run_on_batches_from_here_goes_on_from_what_its_checkpoint_says_of_them(tmp_path):
    whole, parts = config(tmp_path / "whole"), config(tmp_path / "parts", steps=4)
    for cfg in (whole, parts, config(tmp_path / "parts")):
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]), counting)
    (first, expected), (second, found) = final_params(whole), final_params(parts)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # The second start read its place from the record of step 4, as no data says it.
    place = {"position": 40 + STEPS * ROWS * (WIDTH + 1), "begins": STEPS}
    assert restored_record(first)["batches"] == restored_record(second)["batches"] == place
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    evaluated = [r for r in records(tmp_path / "whole") if "eval_loss" in r]
    assert [r["step"] for r in evaluated] == [3, 6]
    assert evaluated[0]["eval_tokens"] == 2 * ROWS * WIDTH

    first.init()
    for batch in Counting(seed=3, position=40).batches(0, STEPS, lambda n: slice(n)):
        first.step(batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first.params()), expected)


@slow
def test_a_step_that_ends_a_run_names_what_the_source_says_of_it(tmp_path):
    cfg = config(tmp_path)
    with pytest.raises(NonFiniteLoss, match="samples 8 to 11 .*: numbers of batches 2 to 2"):
        train(
            cfg,
            make_mesh(cfg.mesh, jax.devices()[:1]),
            lambda trainer, record: counting(trainer, record, poisoned=2),
        )


def test_the_default_source_is_that_of_the_config(tmp_path):
    cfg = load(None, [*TINY, f"run.dir={tmp_path}", "train.eval_interval=9", "train.steps=3"])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    batches = from_config(trainer, {})
    assert json.dumps(batches.record_at(1)) == "{}"
    first, *rest = batches.training.batches(0, 3, None)
    assert len(rest) == 2 and len(first["tokens"]) == 4
    held_out = list(batches.held_out.batches(0, 1, None))
    assert not np.array_equal(held_out[0]["tokens"], first["tokens"])


@pytest.mark.parametrize(("processes", "promised"), [(1, 2), (2, WIDTH)])
def test_without_a_bound_one_process_counts_the_documents_of_batches(
    tmp_path, monkeypatch, processes, promised
):
    """cuDNN's scratch memory grows with the bound, and processes must agree on one."""
    cfg = config(tmp_path, 1, "train.attention=cudnn", "precision.compute=bfloat16")
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    batches = RunBatches(Counting(1, documents=Documents(WIDTH)), Counting(1))
    bound_documents(trainer, batches)
    assert trainer.programs.documents.most == promised
    trainer.programs.bound_documents(Documents(5))
    assert trainer.programs.documents.most == max(8, promised)
