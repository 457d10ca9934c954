"""Laws of `precision.weights`: training reads what `mjax quantize` writes, on every mesh."""

import jax
import numpy as np
import pytest

from mjax.checkpoint.base.source import array_source, flat
from mjax.errors import UserError
from mjax.interop.pretrained import from_pretrained
from mjax.interop.quantized.folder import Options, write_quantized
from mjax.interop.quantized.schemes import SCHEMES
from mjax.models import definition_of
from mjax.prove import Cell, make_trainer, measure
from tests.laws.training.test_fp8 import agree, first_step, one_device
from tests.marks import exhaustive

WIDE = (
    "precision.weights=mxfp4",
    "model.intermediate_size=128",
    "model.hidden_size=128",
    "model.attention.head_dim=16",
)
EXPERTS = (*WIDE, "model.moe.moe_intermediate_size=128")


@exhaustive
@pytest.mark.parametrize(
    "cell, feature",
    [
        (Cell({"tp": 2, "dp": 2}, 3, 3), "dense"),
        (Cell({"pp": 2, "dp": 2}, 1, 2), "dense"),
        (Cell({"ep": 2, "tp": 2}, 1, 1), "experts"),
    ],
)
def test_meshes_agree_on_rounded_weights(cell, feature):
    keys = EXPERTS if feature == "experts" else WIDE
    agree(
        first_step("none", cell, *keys, feature=feature), one_device("none", *keys, feature=feature)
    )


@exhaustive
def test_a_step_reads_the_numbers_that_quantize_writes(tmp_path):
    """Loss and gradients are those of a run whose weights are the numbers of the folder."""
    model = ("model.model_type=qwen3", "model.attention.qk_norm=true")
    aware = make_trainer("dense", Cell(), *WIDE, *model)
    cfg, params = aware.cfg.model, jax.device_get(aware.state["params"])
    source = array_source(cfg, params)
    write_quantized(source, tmp_path, tmp_path / "out", SCHEMES["mxfp4"], Options())
    stored = from_pretrained(tmp_path / "out").params
    plain = make_trainer("dense", Cell(), "precision.weights=plain", *WIDE[1:], *model)
    specs = flat(definition_of(cfg).specs)

    def choose(path, own, of_folder):
        spec = specs[tuple(key.key for key in path)]
        return np.asarray(of_folder) if spec.role == "matrix" else own

    mixed = jax.tree_util.tree_map_with_path(choose, params, stored)
    assert not np.array_equal(mixed["dense"]["mlp"]["up"], params["dense"]["mlp"]["up"])
    plain.state["params"] = jax.device_put(
        mixed, jax.tree.map(lambda p: p.sharding, plain.state["params"])
    )
    found, wanted = (measure(trainer, 1).first for trainer in (aware, plain))
    assert abs(float(found["loss"]) - float(wanted["loss"])) < 1e-6 * float(wanted["loss"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        found["gradients"],
        wanted["gradients"],
    )


def test_groups_that_a_mesh_cuts_are_refused():
    with pytest.raises(UserError, match="precision.weights=int4_group128 rounds groups of 128 inp"):
        first_step("none", Cell(), "precision.weights=int4_group128")
