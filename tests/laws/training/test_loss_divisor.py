"""Law: the loss by sequences, or by a constant, is exact on every mesh, for any micro-batches."""

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.train.step import GRADIENTS
from tests.marks import exhaustive, quick, slow

LAYERS = "model.num_hidden_layers=2"
ROWS = 8
NO_MASK = "train.objective=tests.laws.training.test_objective:Denoise"


def weights_of(batch: dict[str, np.ndarray], packed: bool = True) -> np.ndarray:
    """The loss mask with a sum of 1 for each document that counts, by loops."""
    weights = np.zeros(batch["loss_mask"].shape)
    for row, mask in enumerate(batch["loss_mask"]):
        segments = batch["segment_ids"][row] if packed else np.zeros(len(mask))
        for document in np.unique(segments):
            own = (segments == document) * mask
            weights[row] += own / max(own.sum(), 1e-9)
    return weights.astype(np.float32)


def draw() -> dict[str, np.ndarray]:
    batch = make_batch(ROWS)
    share = np.random.default_rng(3).random(batch["loss_mask"].shape)
    return batch | {"loss_mask": (batch["loss_mask"] * share).astype(np.float32)}


CELLS = [
    Cell({"cp": 2, "dp": 2}, 1, 2, rows=ROWS),
    Cell({"cp": 2, "tp": 2, "pp": 2}, 0, 4, rows=ROWS),
    Cell({"dp": 4, "ep": 2}, 3, 1, rows=ROWS),
]


@exhaustive
@slow
@pytest.mark.parametrize("cell", quick(CELLS, 0), ids=str)
def test_by_sequence_is_the_mean_of_means(cell):
    """Gradients too; statistics keep their divisors."""
    batch, feature = draw(), "experts" if "ep" in cell.mesh else "dense"
    one = make_trainer(feature, Cell(rows=ROWS), LAYERS)
    weights = weights_of(batch)
    expected = one.run_program(GRADIENTS, batch | {"loss_mask": weights})
    trainer = make_trainer(feature, cell, LAYERS, "train.loss_divisor=sequences")
    found = trainer.run_program(GRADIENTS, batch)
    if feature == "dense":
        assert deviation(found.losses, expected.losses) <= 1e-5
        assert deviation(found.gradients, expected.gradients) <= 1e-5
        log_p = jax.device_get(one.token_scores(batch).log_p)
        mean = -(log_p * weights).sum() / round(weights.sum())
        np.testing.assert_allclose(found.losses["loss"], mean, rtol=1e-5)
    else:  # the balance of experts is a mean over tokens, which weights in the mask would change
        np.testing.assert_allclose(found.losses["loss"], expected.losses["loss"], rtol=1e-5)
    np.testing.assert_allclose(found.tokens, batch["loss_mask"].sum(), rtol=1e-6)
    if not cell.mesh.get("pp"):
        by_token = one.evaluate(batch), trainer.evaluate(batch)
        assert deviation(*by_token) <= 1e-5


@slow
def test_by_a_constant_and_without_packing():
    batch, cell = draw(), Cell({"dp": 2}, 0, 2, rows=ROWS)
    plain = make_trainer("dense", Cell(rows=ROWS), LAYERS).grads(batch)
    divided = make_trainer("dense", cell, LAYERS, "train.loss_divisor=12.5").grads(batch)
    factor = batch["loss_mask"].sum() / 12.5
    assert deviation(divided, jax.tree.map(lambda a: a * factor, plain)) <= 1e-5
    keys = LAYERS, "data.document_mask=false"
    rows = make_trainer("dense", cell, *keys, "train.loss_divisor=sequences").grads(batch)
    weights = {"loss_mask": weights_of(batch, packed=False)}
    expected = make_trainer("dense", Cell(rows=ROWS), *keys).grads(batch | weights)
    assert deviation(rows, expected) <= 1e-5


def test_other_values_are_refused():
    with pytest.raises(UserError, match=r"train\.loss_divisor"):
        load(None, ["data.mock=true", "train.loss_divisor=0"])
    with pytest.raises(UserError, match=r"weighs the field loss_mask, which .*Denoise"):
        trainer = make_trainer("dense", Cell(), LAYERS, NO_MASK, "train.loss_divisor=sequences")
        trainer.lower()
