"""Oracle: the loss of a student on its own answers is that of TRL's GKD trainer, with gradients.

Answers of unequal lengths are packed here; TRL reads one in a row of its own, padded.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.interop.pretrained import from_pretrained
from mjax.models import build, split
from mjax.post.rollouts.packing import packed_transcripts
from mjax.post.rollouts.transcript import OpenRollout
from mjax.post.teacher import teacher_fields
from mjax.prove import Cell, deviation, make_trainer
from mjax.train.step import GRADIENTS
from tests.marks import quick

pytest.importorskip("trl")
from trl.experimental.gkd import GKDTrainer  # noqa: E402

LENGTHS = [(3, 5), (1, 9), (6, 1), (4, 7), (2, 2), (5, 11)]  # of a prompt and its answer
WIDTH = 16


def transcripts(vocab_size: int) -> list:
    """Prompts with answers that were drawn."""
    rng, found = np.random.default_rng(1), []
    for number, (given, drawn) in enumerate(LENGTHS):
        rollout = OpenRollout(number, 0, None, reward=0.0)
        rollout.add_given(rng.integers(0, vocab_size, given).tolist())
        rollout.add_drawn(rng.integers(0, vocab_size, drawn).tolist(), [-1.0] * drawn, [0] * drawn)
        found.append(rollout.transcript())
    return found


@pytest.mark.parametrize(("beta", "temperature"), quick([(0.0, 1.0), (0.3, 1.0), (1.0, 1.3)], 1))
def test_loss_and_gradients_are_those_of_gkd(tmp_path, beta, temperature):
    keys = [
        f"distill.beta={beta}",
        f"distill.temperature={temperature}",
        f"distill.teacher={tmp_path}/t",
    ]
    plain = make_trainer("dense", Cell(rows=4), "model.num_hidden_layers=2")
    definition, params = split(build(plain.cfg.model, nnx.Rngs(3)))
    write_weights(tmp_path / "t", array_source(plain.cfg.model, params), definition.specs)
    trainer = make_trainer(
        "dense", Cell(rows=4), "model.num_hidden_layers=2", "train.objective=distill", *keys
    )
    trainer.role_fields = teacher_fields(trainer)
    answers = transcripts(plain.cfg.model.vocab_size)
    batch = packed_transcripts(answers, 4, WIDTH).batch()
    assert len(batch["tokens"]) == 4 and batch["segment_ids"].max() > 1
    ours = jax.device_get(trainer.run_program(GRADIENTS, batch))

    ids = np.zeros((len(answers), WIDTH), np.int32)
    labels = np.full((len(answers), WIDTH), -100)
    for row, own, answer in zip(ids, labels, answers, strict=True):
        row[: len(answer.ids)] = answer.ids
        own[: len(answer.ids)][answer.is_sampled] = answer.ids[answer.is_sampled]
    teacher_logits = from_pretrained(tmp_path / "t").model(ids)

    def logits(params):
        return plain.definition.bind(params)(ids)

    found, pull = jax.vjp(logits, plain.params())
    student = torch.tensor(np.asarray(found), requires_grad=True)
    loss = GKDTrainer.generalized_jsd_loss(
        student[:, :-1],
        torch.tensor(np.asarray(teacher_logits))[:, :-1],
        torch.tensor(labels[:, 1:]),
        beta=beta,
        temperature=temperature,
    )
    loss.backward()
    scale = temperature**2  # which TRL leaves out
    (gradients,) = pull(scale * jnp.asarray(student.grad.numpy()))
    assert deviation(ours.losses["loss"], scale * loss.item()) <= 1e-5
    assert deviation(ours.gradients, gradients) <= 1e-5
