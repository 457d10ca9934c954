"""Updates of a trainer's state without a model: the same gradients on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.pipeline.storage import canonical
from mjax.train import Trainer


def canonical_state(trainer: Trainer) -> dict:
    """The state in canonical order and shape, as in a checkpoint."""
    return jax.tree.map(np.asarray, canonical(trainer.storage, trainer.state))


def updated_state(trainer: Trainer, steps: int) -> dict:
    """The canonical state after so many updates by gradients made from the first parameters."""
    start = jax.tree.map(jnp.copy, trainer.state["params"])

    def step(state: dict, start: dict) -> dict:
        count, new = state["opt"]["count"], dict(state)
        leaves = flatten_dict(start)
        grads = {k: jnp.sin(1e4 * p.astype(jnp.float32) + count) for k, p in leaves.items()}
        new["params"], new["opt"] = trainer.state_layout.optimizer.update(
            unflatten_dict(grads), state["opt"], state["params"], lr=1e-3, weight_decay=0.1
        )
        return new

    specs = trainer.state_layout.partitions()
    mesh = {"mesh": trainer.mesh, "check_vma": False}
    update = jax.jit(
        jax.shard_map(step, in_specs=(specs, specs["params"]), out_specs=specs, **mesh)
    )
    for _ in range(steps):
        trainer.state = update(trainer.state, start)
    return canonical_state(trainer)
