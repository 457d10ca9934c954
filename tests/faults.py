"""Faults for tests: what bad data, memory or processors would do to a run.

Each function takes pytest's `monkeypatch` and the numbers of the steps that it strikes. What
`run.rehearse` can do is not here.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.objectives.local_model import LocalModel
from mjax.run.rehearsal import with_flipped_bit
from mjax.sharding.collectives import AXES
from mjax.train import Trainer
from mjax.train import step as train_step

EVER = 10**9


def flip_in_gradients(monkeypatch, steps, device, bits=(30,), times=EVER) -> None:
    """Flip a bit of an entry of this device's gradients, before they are summed over devices.

    `bits` take turns, by the times that a step of `steps` is run. The highest of an exponent is 30.
    """

    def patch(context, bit):
        store = train_step.store_gradients

        def faulty(cotangents, *rest):
            return store(_flipped(cotangents, device, bit), *rest)

        context.setattr(train_step, "store_gradients", faulty)

    _strike(monkeypatch, steps, bits, times, patch)


def plant_in_gradients(monkeypatch, steps, device, values=(np.inf,), times=EVER) -> None:
    """Put a value into an entry of this device's gradients, before they are summed over devices.

    `values` take turns, by the times that a step of `steps` is run.
    """

    def patch(context, value):
        store = train_step.store_gradients

        def faulty(cotangents, *rest):
            leaves, structure = jax.tree.flatten(cotangents)
            at = next(
                i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)
            )
            leaf = leaves[at].reshape(-1)
            planted = jnp.where(lax.axis_index(AXES) == device, value, leaf[0])
            leaves[at] = leaf.at[0].set(planted.astype(leaf.dtype)).reshape(leaves[at].shape)
            return store(jax.tree.unflatten(structure, leaves), *rest)

        context.setattr(train_step, "store_gradients", faulty)

    _strike(monkeypatch, steps, values, times, patch)


def flip_in_weights(monkeypatch, steps, device, bits=(30,), times=EVER) -> None:
    """Flip a bit of each entry of the head as this device reads it in a step, not of the master.

    `bits` as in `flip_in_gradients`. 26 makes small weights 256 times as large.
    """

    def patch(context, bit):
        load = LocalModel.load

        def faulty(self, params, *rest):
            head = _flipped(params["head"], device, bit, whole=True)
            return load(self, params | {"head": head}, *rest)

        context.setattr(LocalModel, "load", faulty)

    _strike(monkeypatch, steps, bits, times, patch)


def flip_replica(monkeypatch, step, path, devices, bit=0) -> None:
    """Flip a bit of the first entry of an array of the state, on these devices, after `step`."""
    sound = Trainer.step

    def struck(self, *args):
        metrics = sound(self, *args)
        if self.step_number == step:
            self.state = with_flipped_bit(self.state, path, devices, bit)
        return metrics

    monkeypatch.setattr(Trainer, "step", struck)


def _strike(monkeypatch, steps, bits, times, patch) -> None:
    """Run `steps` by programs that are traced with a patch, the first `times` each."""
    sound, struck, programs = Trainer.step, dict.fromkeys(steps, 0), {}

    def step(self, *args):
        number = self.step_number + 1
        if struck.get(number, times) >= times:
            return sound(self, *args)
        bit = bits[struck[number] % len(bits)]
        struck[number] += 1
        good = self.programs
        self.programs = programs.setdefault(bit, replace(good, _jitted={}))
        try:
            with monkeypatch.context() as context:
                patch(context, bit)
                return sound(self, *args)
        finally:
            self.programs = good

    monkeypatch.setattr(Trainer, "step", step)


def _flipped(tree, device: int, bit: int, whole: bool = False):
    """The local shards with a bit flipped on the device of this number in the mesh: of the first
    entry of the first fp32 array, or of all its entries."""
    leaves, structure = jax.tree.flatten(tree)
    at = next(i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32)
    bits = lax.bitcast_convert_type(leaves[at], jnp.uint32)
    is_struck = lax.axis_index(AXES) == device
    places = jnp.arange(bits.size).reshape(bits.shape) < (bits.size if whole else 1)
    bits ^= jnp.where(is_struck & places, jnp.uint32(1 << bit), jnp.uint32(0))
    leaves[at] = lax.bitcast_convert_type(bits, jnp.float32)
    return jax.tree.unflatten(structure, leaves)
