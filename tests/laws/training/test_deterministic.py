"""Law: on CPUs two runs of one config give the same bits, losses and parameters."""

import jax
import numpy as np

from mjax.config import load
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train.trainer import Trainer
from tests.laws.run.test_failures import losses
from tests.marks import exhaustive
from tests.tiny import TINY

KEYS = ["model.num_hidden_layers=2", "model.hidden_dropout=0.1", "train.micro_batch_size=1"]
MESH = ["mesh.dp=2", "mesh.tp=2", "mesh.zero=1"]


@exhaustive
def test_two_runs_give_the_same_bits(tmp_path, monkeypatch):
    made, init = [], Trainer.__init__

    def kept(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Trainer, "__init__", kept)
    for name, seed in (("one", 1), ("two", 1), ("other", 2)):
        keys = [f"run.dir={tmp_path / name}", f"run.seed={seed}", "train.steps=6"]
        cfg = load(None, [*TINY, *KEYS, *MESH, *keys, "run.deterministic=true"])
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    one, two, other = (jax.tree.map(np.asarray, trainer.state) for trainer in made)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert losses(tmp_path / "one") == losses(tmp_path / "two") != losses(tmp_path / "other")
    assert not np.array_equal(one["params"]["embedding"], other["params"]["embedding"])
