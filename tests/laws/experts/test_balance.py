"""Laws of the balance loss over all layers together, `model.moe.router_aux_loss_type`.

That it is transformers' loss is in `tests/oracle/test_balance.py`.
"""

import pytest

from mjax.pipeline.storage import canonical
from mjax.prove import BOUND, Cell, deviation, make_trainer
from tests.laws.experts.test_expert_padding import SKIP, on_a_mesh_and_alone
from tests.marks import exhaustive, quick

AVERAGED = [
    "model.moe.router_aux_loss_type=mean_over_layers",
    "model.moe.router_aux_loss_coef=1.0",
    "model.layer_pattern=GE",
    "model.num_hidden_layers=4",
]
GLOBAL = "model.moe.router_aux_loss_over=global_batch"
PREDICTS = "model.num_nextn_predict_layers=1"
MESHES = [
    ({"pp": 2, "ep": 2, "tp": 2}, 1, 3, [PREDICTS, SKIP]),
    ({"pp": 2, "dp": 2, "cp": 2}, 1, 1, [GLOBAL]),
    ({"pp": 2, "ep": 2}, 0, 4, ["mesh.virtual_stages=2"]),
    ({"dp": 2, "ep": 2, "tp": 2}, 3, 2, []),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", quick(MESHES, 1))
def test_every_mesh_equals_one_device(mesh, zero, micro_batches, keys):
    cell = Cell(mesh, zero, micro_batches)

    def figures(where, batch):
        own = [key for key in keys if where is cell or not key.startswith("mesh.")]
        trainer = make_trainer("experts", where, *AVERAGED, *own)
        metrics = trainer.step(batch)
        first_moments = canonical(trainer.storage, trainer.state["opt"]["mu"])
        return [metrics[name] for name in ("loss", "aux_loss", "grad_norm")], first_moments

    assert deviation(*on_a_mesh_and_alone(cell, figures)) <= BOUND
