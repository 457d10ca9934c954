"""Laws of programs that a room above adds: any function of shards, equal on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.prove import Cell, make_batch, make_trainer
from mjax.train.program_kind import ProgramKind
from mjax.train.step import LOSSES, batch_losses
from tests.marks import quick


def weighted_rows(program, state, batch, factor):
    """(the weighted count of each row of this device, the losses of the global batch)."""
    counted = program.parallel.psum(jnp.sum(batch["loss_mask"], axis=1), "cp")
    return factor * counted, batch_losses(program, state, batch)


WEIGHTED_ROWS = ProgramKind(
    weighted_rows,
    inputs=lambda on: (on.weights, on.batch, P()),
    outputs=lambda on: (on.batch["rows"], P()),
)


@pytest.mark.parametrize(
    "cell", quick([Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 1), Cell({"pp": 2, "ep": 2}, 1, 2)])
)
def test_a_program_defined_here_runs_on_any_mesh_with_an_input_and_rows_of_its_own(cell):
    trainer, batch = make_trainer("dense", cell), make_batch(8)
    batch["loss_mask"][3, 5:] = 0
    rows, found = jax.device_get(trainer.run_program(WEIGHTED_ROWS, batch, np.float32(0.5)))
    np.testing.assert_array_equal(rows, 0.5 * batch["loss_mask"].sum(1))
    assert len(set(rows)) > 1
    expected = jax.device_get(trainer.run_program(LOSSES, batch))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    kept = trainer.programs.jitted(WEIGHTED_ROWS, 8)
    assert kept is trainer.programs.jitted(WEIGHTED_ROWS, 8)
