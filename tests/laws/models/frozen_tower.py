"""A law of models with towers: frozen modules keep their bits, the others move."""

import jax
import numpy as np

from mjax.prove import Cell, make_batch, make_trainer, with_items


def assert_tower_stays(
    feature: str, frozen: tuple[str, str], moving: tuple[str, ...], *more: str
) -> None:
    """Two steps with the modules `frozen` leave their bits, without moments, and all of `moving`
    other values in every parameter. `more`: keys of the config."""
    names = ", ".join(f"'{name}.*'" for name in frozen)
    trainer = make_trainer(feature, Cell({"dp": 2}, 1), f"train.freeze=[{names}]", *more)
    batch = make_batch(24)
    batch |= with_items(trainer.cfg, batch)
    before = jax.device_get(trainer.params())
    for _ in range(2):
        trainer.step(batch)
    after = jax.device_get(trainer.params())
    for name in frozen:
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
        assert name not in trainer.state["opt"]["mu"]
    for name in moving:
        moved = jax.tree.map(lambda a, b: (a != b).any(), before[name], after[name])
        assert all(jax.tree.leaves(moved)), name
