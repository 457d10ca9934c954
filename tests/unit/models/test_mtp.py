"""Multi-token prediction's fields, weight in the loss, FLOPs and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import load
from mjax.config.schema.run import MeshConfig
from mjax.models.attention.zigzag import zigzag
from mjax.models.flops import flops_by_part
from mjax.models.heads.multi_token import field_names, shifted_fields, with_weight
from mjax.plan.balance import head_in_layers
from mjax.prove import make_batch
from mjax.sharding.collectives import LOCAL
from mjax.sharding.mesh import make_mesh, parallel_of

DEPTHS, WIDTH = 3, 16
FIELDS = "tokens", "labels", "loss_mask", "segment_ids"
MODEL = ["model.num_hidden_layers=2", "data.mock=true"]


def expected(batch: dict) -> dict[str, np.ndarray]:
    """The fields, token by token."""
    found = {}
    rows, width = batch["tokens"].shape
    for depth in range(1, DEPTHS + 1):
        names = field_names(depth)
        arrays = [np.zeros((rows, width), batch[name].dtype) for name in FIELDS[:3]]
        for row in range(rows):
            for place in range(width - depth):
                segments = batch["segment_ids"][row, place : place + depth + 1]
                arrays[1][row, place] = batch["labels"][row, place + depth]
                if (segments == segments[0]).all():
                    arrays[0][row, place] = batch["tokens"][row, place + depth]
                    arrays[2][row, place] = batch["loss_mask"][row, place + depth]
        found |= dict(zip(names, arrays, strict=True))
    return found


def test_no_field_reaches_over_the_end_of_a_document():
    batch = make_batch(6, width=WIDTH)
    given = {name: jnp.asarray(batch[name]) for name in FIELDS}
    given["columns"] = jnp.arange(WIDTH, dtype=jnp.int32)
    found, wanted = shifted_fields(given, DEPTHS, LOCAL), expected(batch)
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        if name.endswith("labels"):  # what lies behind the end counts in no loss
            mask = wanted[name.replace("labels", "loss_mask")] > 0
            np.testing.assert_array_equal(np.asarray(found[name])[mask], array[mask])
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert wanted["mtp_3_loss_mask"].sum() > 0


@pytest.mark.parametrize("cp", [2, 4])
def test_fields_are_the_same_where_sequences_are_split(cp):
    batch = make_batch(4, width=WIDTH)
    mesh = make_mesh(MeshConfig(cp=cp), jax.devices()[:cp])
    order = zigzag(WIDTH, cp)
    given = {name: batch[name][:, order] for name in FIELDS}
    given["columns"] = np.arange(WIDTH, dtype=np.int32)[order]
    cut = {name: P(None, "cp") for name in FIELDS} | {"columns": P("cp")}
    parallel = parallel_of(mesh)

    def derive(batch):
        return shifted_fields(batch, DEPTHS, parallel)

    mapped = jax.shard_map(
        derive, mesh=mesh, in_specs=(cut,), out_specs=P(None, "cp"), check_vma=False
    )
    whole = dict(given) | {name: batch[name] for name in FIELDS}
    whole["columns"] = np.arange(WIDTH, dtype=np.int32)
    one = shifted_fields(jax.tree.map(jnp.asarray, whole), DEPTHS, LOCAL)
    for name, field in jax.jit(mapped)(given).items():
        np.testing.assert_array_equal(field, np.asarray(one[name])[:, order], err_msg=name)


def test_a_weight_changes_the_gradient_alone():
    loss, gradient = jax.value_and_grad(lambda x: with_weight(x * x, 0.25))(3.0)
    assert (loss, gradient) == (9.0, 1.5)


def test_flops_count_the_layer_its_projection_and_the_head_once_more():
    plain = load(None, MODEL).model
    one = load(None, [*MODEL, "model.num_nextn_predict_layers=1"]).model
    width = plain.hidden_size
    base, more = flops_by_part(plain, 64), flops_by_part(one, 64)
    layer = base["matmul"] / 2 + 6 * 2 * width * width
    assert more["matmul"] - base["matmul"] == pytest.approx(layer)
    assert more["attention"] == pytest.approx(1.5 * base["attention"])
    assert more["head"] == 2 * base["head"]
    extra = (sum(more.values()) - sum(base.values()) + base["head"]) * 2
    layers = sum(base.values()) - base["head"]
    assert head_in_layers(one, 64) == pytest.approx(extra / layers)
