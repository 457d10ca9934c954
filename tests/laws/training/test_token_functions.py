"""Law: losses by token functions and by log-probabilities are the same on every mesh.

Batches are packed; documents lie on both cp devices.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.interop.pretrained import Pretrained
from mjax.kernels.loss.log_probs import sequence_sums
from mjax.kernels.loss.token_functions import DynamicFineTuning
from mjax.objectives.fields import BatchField
from mjax.objectives.next_token import NextToken
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.train.step import GRADIENTS, LOSSES
from tests.clipped_ratio import ClippedRatio
from tests.marks import exhaustive, quick, slow

LAYERS = "model.num_hidden_layers=2"
FIELDS = {"old_log_prob": BatchField(np.float32), "advantage": BatchField(np.float32)}


class Policy(NextToken):
    """A clipped policy loss at a temperature."""

    fields: ClassVar = NextToken.fields | FIELDS
    function: ClassVar = ClippedRatio()

    def counts(self, batch):
        count = super().counts(batch)["loss"]
        return {"loss": count, "clipped": count}

    def losses(self, edges, x, batch, tokens, ctx):
        ctx = ctx.in_training(temperature=0.8)
        fields = {name: batch[name] for name in FIELDS}
        mask = batch["loss_mask"]
        return edges.head_sums(x, batch["labels"], mask, ctx, self.function, fields)


class Dft(NextToken):
    def counts(self, batch):
        count = super().counts(batch)["loss"]
        return {"loss": count, "nll": count}

    def losses(self, edges, x, batch, tokens, ctx):
        labels, mask = batch["labels"], batch["loss_mask"]
        return edges.head_sums(x, labels, mask, ctx, DynamicFineTuning(), {})


class Documents(NextToken):
    """The softplus of each document's sum of log-probabilities and of its entropies."""

    def losses(self, edges, x, batch, tokens, ctx):
        scores = edges.token_scores(x, batch["labels"], ctx, entropy=True)
        parallel, segments = ctx.parallel, batch["segment_ids"]
        values = (scores.log_p + 0.1 * scores.entropy) * batch["loss_mask"]
        sums = sequence_sums(values, segments, parallel=parallel, most=17)
        return {"loss": jax.nn.softplus(sums / 8).sum() / parallel.cp}


def batch_of(cell: Cell) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    batch = make_batch(cell.rows)
    shape = batch["labels"].shape
    old, advantage = rng.normal(-5.5, 0.3, shape), rng.normal(size=shape)
    batch["loss_mask"] = batch["loss_mask"] * rng.random(shape).astype(np.float32)
    fields = {"old_log_prob": old, "advantage": advantage}
    return batch | {name: a.astype(np.float32) for name, a in fields.items()}


def first_step(cell: Cell, objective: type, *more: str) -> dict:
    name = f"train.objective={__name__}:{objective.__name__}"
    trainer = make_trainer("dense", cell, LAYERS, name, "train.loss_chunk=12", *more)
    batch = batch_of(cell)
    found = trainer.run_program(GRADIENTS, batch)
    sums = trainer.run_program(LOSSES, batch) if objective is Policy else ()
    return jax.device_get((found.losses, found.norm, found.gradients, sums))


MESHES = [
    ({"tp": 2}, Policy),
    ({"cp": 2}, Documents),
    ({"dp": 2, "cp": 2, "tp": 2}, Documents),
    ({"cp": 2, "tp": 2, "pp": 2}, Policy),
    ({"cp": 2, "dp": 2}, Dft),
]


@exhaustive
@slow
@pytest.mark.parametrize("mesh, objective", quick(MESHES, 1))
def test_meshes_agree(mesh, objective):
    cell = Cell(mesh, 1 if len(mesh) > 1 else 0, 2, rows=8)
    found, one = first_step(cell, objective), first_step(Cell(rows=8), objective)
    assert deviation(found, one) <= 1e-5
    if objective is Policy:
        assert 0.1 < one[0]["clipped"] < 0.9


@slow
def test_an_objective_by_function_is_the_mean_of_the_function():
    """From whole logits of the same model, and the gradient by autodiff."""
    cell = Cell(rows=8)
    trainer = make_trainer("dense", cell, LAYERS, f"train.objective={__name__}:Policy")
    batch = batch_of(cell)
    model, params = trainer.definition, trainer.params()

    def loss(params):
        logits = model.bind(params)(batch["tokens"], batch["positions"], batch["segment_ids"])
        log_p = jax.nn.log_softmax(logits / 0.8)
        log_p = jnp.take_along_axis(log_p, batch["labels"][..., None], -1)[..., 0]
        ratio = jnp.exp(log_p - batch["old_log_prob"])
        advantage, mask = batch["advantage"], batch["loss_mask"]
        terms = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return (terms * mask).sum() / mask.sum()

    expected, gradients = jax.jit(jax.value_and_grad(loss))(params)
    found = trainer.grads(batch)
    assert deviation((found[0], found[2]), (expected, gradients)) <= 1e-5


@slow
@pytest.mark.parametrize(
    "mesh",
    quick(
        [
            {"cp": 2, "tp": 2},
            {"pp": 2, "tp": 2, "cp": 2},
            {"dp": 2},
            {"ep": 2, "cp": 2, "tp": 2},
            {"pp": 2, "ep": 2},
        ],
        0,
    ),
)
def test_scores_of_a_batch_are_those_of_whole_logits(mesh):
    feature = "experts" if "ep" in mesh else "dense"
    cell = Cell(mesh, 0, 2, rows=8)
    trainer, batch = make_trainer(feature, cell, LAYERS, "train.loss_chunk=12"), batch_of(cell)
    found = jax.device_get(trainer.token_scores(batch))
    one = make_trainer(feature, Cell(), LAYERS)
    inputs = batch["tokens"], batch["positions"], batch["segment_ids"]
    log_p = jax.nn.log_softmax(jax.jit(one.definition.bind(one.params()))(*inputs))
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    log_p = jnp.take_along_axis(log_p, batch["labels"][..., None], -1)[..., 0]
    np.testing.assert_allclose(found.log_p, log_p, rtol=1e-5)
    np.testing.assert_allclose(found.entropy, entropy, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "retro", "llava"])
def test_models_that_give_a_text_alone_no_probability_are_refused(name):
    """Their logits at a place see the label, or lack what they read."""
    cfg = load(f"configs/quickstart_{name}.yaml").model
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(UserError, match="decoders of text alone"):
        Pretrained(cfg, None, {}, None, None).token_log_probs({}, tokens, tokens)
