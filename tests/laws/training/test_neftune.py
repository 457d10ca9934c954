"""Law: NEFTune's noise has the scale of each document and is equal on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.base.context import Context, Training, tokens_of
from mjax.models.embedding_noise import EmbeddingNoise
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.train.step import GRADIENTS
from tests.marks import exhaustive, quick, slow

KEYS = "model.num_hidden_layers=2", "train.neftune_alpha=5.0", "model.hidden_dropout=0.1"
ROWS, WIDTH, ALPHA = 8, 32, 5.0
CELLS = [
    Cell({"cp": 2, "tp": 2, "dp": 2}, 1, 2, rows=ROWS),
    Cell({"pp": 2, "tp": 2, "cp": 2}, 0, 4, rows=ROWS),
    Cell({"dp": 4, "ep": 2}, 3, 1, rows=ROWS),
]


@exhaustive
@slow
@pytest.mark.parametrize("cell", quick(CELLS, 0), ids=str)
def test_every_mesh_draws_the_same_noise(cell):
    batch, feature = make_batch(ROWS), "experts" if "ep" in cell.mesh else "dense"
    expected = make_trainer(feature, Cell(rows=ROWS), *KEYS).run_program(GRADIENTS, batch)
    found = make_trainer(feature, cell, *KEYS).run_program(GRADIENTS, batch)
    assert deviation(found.losses, expected.losses) <= 1e-5
    assert deviation(found.gradients, expected.gradients) <= 1e-5


@slow
def test_noise_moves_training_and_no_evaluation():
    batch, one = make_batch(ROWS), Cell(rows=ROWS)
    plain, noised = (make_trainer("dense", one, KEYS[0], *keys) for keys in ((), KEYS[1:2]))
    assert plain.evaluate(batch) == noised.evaluate(batch)
    assert abs(float(plain.grads(batch)[0]) - float(noised.grads(batch)[0])) > 1e-4


def noise_of(segments, training: Training, step: int = 0) -> np.ndarray:
    """What is added to embeddings of zeros, [B, S, D]."""
    shape = 2, 24
    tokens = tokens_of(shape, segments=segments, key=jax.random.key(step))
    zeros = jnp.zeros((*shape, WIDTH))
    return np.asarray(training.noise(zeros, tokens, Context(training=training)))


def test_the_scale_is_that_of_the_document():
    lengths = [6, 16, 2], [24]
    segments = jnp.stack([jnp.repeat(jnp.arange(len(n)) + 1, jnp.array(n)) for n in lengths])
    training = Training(dropout=True, noise=EmbeddingNoise(ALPHA))
    noise = noise_of(segments, training)
    for row, of_row in enumerate(lengths):
        begin = 0
        for length in of_row:
            part, bound = noise[row, begin : begin + length], ALPHA / np.sqrt(length * WIDTH)
            assert 0.95 * bound < np.abs(part).max() <= bound
            deviation_of_uniform = bound / np.sqrt(3)
            assert abs(part.std() / deviation_of_uniform - 1) < 0.1
            assert abs(part.mean()) < 5 * deviation_of_uniform / np.sqrt(part.size)
            begin += length
    whole = noise_of(None, training)
    np.testing.assert_array_equal(whole[1], noise[1])  # its row is one document
    assert not np.array_equal(noise_of(None, training, 1), whole)
    assert not noise_of(None, Training(dropout=False, noise=EmbeddingNoise(ALPHA))).any()
