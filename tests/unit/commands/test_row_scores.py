"""The scores of rows are whole on every device, so that each of several processes can read them."""

from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.evaluate.row_scores import batch_of, scorer


def test_scores_are_whole_on_every_device_whatever_the_layers_cut():
    mesh = Mesh(jax.devices(), ("dp",))
    by_rows = NamedSharding(mesh, PartitionSpec("dp"))

    class Decoder:
        def hidden(self, tokens, info, ctx):
            x = jax.lax.with_sharding_constraint(jax.nn.one_hot(tokens, 5), by_rows)
            return x, None, None

        def logits(self, x):
            return 2 * x

    model = SimpleNamespace(definition=SimpleNamespace(bind=lambda _: Decoder()), mesh=mesh)
    rows = [([1, 1, 2], 1), ([3, 3], 1)]
    params = {"w": jax.device_put(np.zeros(8, np.float32), by_rows)}
    sums, greedy = scorer(model)(params, *batch_of(rows, 8, 16))
    assert sums.sharding.is_fully_replicated and greedy.sharding.is_fully_replicated
    log_z = np.log(4 + np.exp(2))
    np.testing.assert_allclose(sums, [-log_z, 2 - log_z, *[0] * 6], rtol=1e-6)
    assert greedy.tolist() == [False] + [True] * 7
