"""Law: loss, gradient norm and every gradient are those of one device, on every dp x tp mesh."""

import jax
import numpy as np
import pytest

from tests.laws.common import (
    MESHES,
    MODELS,
    curve,
    deviation,
    make_batch,
    one_device_curve,
    one_device_gradients,
    trainer,
)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("dp,tp", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_one_device(name, dp, tp, micro_batches):
    loss, norm, grads = trainer(name, dp, tp, micro_batches).grads(make_batch())
    loss1, norm1, grads1 = one_device_gradients(name)
    assert abs(float(loss) - loss1) <= 1e-5 * loss1
    assert abs(float(norm) - norm1) <= 1e-5 * norm1
    assert deviation(grads, grads1) <= 1e-5
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads1)), "a gradient is all zero"


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_agree_and_replicas_stay_identical(name):
    dp, tp = MESHES[1 + list(MODELS).index(name) % 2]
    made = trainer(name, dp, tp, 2)
    np.testing.assert_allclose(curve(made, 20), one_device_curve(name, 20), rtol=2e-5)
    for leaf in jax.tree.leaves(made.state):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in copies.values():
            assert all(np.array_equal(same[0], other) for other in same[1:])


def test_a_wrong_reduction_would_be_seen():
    """The law can fail: dropping the tp reduction of norm gains changes their gradients."""
    made = trainer("gqa_kv1", 1, 8, 1)
    wrong = {**made.partitions, "final_norm": {"gain": jax.sharding.PartitionSpec("tp")}}
    made.partitions = wrong
    made.definition.specs["final_norm"]["gain"]  # exists: the override above is not vacuous
    with pytest.raises((ValueError, AssertionError)):
        _, _, grads = made.grads(make_batch())
        assert deviation(grads, one_device_gradients("gqa_kv1")[2]) <= 1e-5
