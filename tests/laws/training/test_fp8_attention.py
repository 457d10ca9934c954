"""Laws of `precision.fp8_attention`: one answer on every mesh, in evaluation as its key says."""

import pytest

from mjax.prove import Cell, make_batch, make_trainer
from tests.laws.training.test_fp8 import agree, distance, first_step, one_device
from tests.marks import exhaustive, quick, slow

SHAPES = (
    "model.attention.head_dim=128",
    "model.attention.num_attention_heads=4",
    "data.seq_length=128",
    "data.document_mask=false",
)
ON = "precision.fp8_attention=true"


def layers(count: int) -> tuple[str, ...]:
    return (*SHAPES, f"model.num_hidden_layers={count}")


@slow
@pytest.mark.parametrize(
    "cell, depth",
    quick(
        [
            (Cell({"tp": 4, "dp": 2}, 2, 3), 1),  # kv heads are fewer
            (Cell({"dp": 4}, 3, 2), 2),
            (Cell({"dp": 2, "tp": 2, "pp": 2}, 1, 2), 2),
        ]
    ),
)
def test_meshes_agree(cell, depth):
    """As without the key. After a layer whose sums tp cuts, ties fall otherwise: 100 times less
    than what the key moves."""
    first, want = (first_step("none", c, *layers(depth), ON) for c in (cell, Cell()))
    if depth > 1 and "tp" in cell.mesh:
        assert abs(first[0] - want[0]) < 5e-6 * want[0]
        assert distance(first[1], want[1]) < 5e-3
    else:
        agree(first, want)


@exhaustive
def test_the_key_rounds_and_evaluation_has_a_key_of_its_own():
    with_key, without = (one_device("none", *layers(1), *key) for key in ((ON,), ()))
    assert 0.01 < distance(with_key[1], without[1]) < 0.1
    losses = []
    for keys in ((), (ON,), (ON, "precision.fp8_evaluation=false")):
        trainer = make_trainer("dense", Cell(), *layers(1), *keys)
        losses.append(float(trainer.evaluate(make_batch(24, width=128))[0]))
    assert losses[0] == losses[2] != losses[1]
