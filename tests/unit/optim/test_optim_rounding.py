"""Stochastic rounding: unbiased, exact where bf16 is, the same bits on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import load
from mjax.config.schema.run import OptimizerConfig
from mjax.errors import UserError
from mjax.optim.build import Optimizer
from mjax.optim.rounding import element_offsets, mix, random_bits, round_to_bf16
from mjax.prove import Cell, make_trainer
from tests.marks import exhaustive, quick, slow
from tests.updates import updated_state

LOW = ["precision.params=bfloat16", "optimizer.mu_dtype=bfloat16", "optimizer.nu_dtype=bfloat16"]
SR = [*LOW, "optimizer.stochastic_rounding=true"]


def bits(shape: tuple[int, ...], step: int, seed: int = 1, name: str = "w", tensor: str = "mu"):
    at = element_offsets(tuple(map(jnp.arange, shape)), shape)
    return random_bits(seed, jnp.int32(step), (name,), tensor, at)


def test_the_mean_of_many_roundings_is_the_value():
    """Off by less than 5 standard deviations of the mean, over elements and over steps."""
    x = jnp.asarray([1.001, -1.001, 3e-5, -7.3e8, 1 + 2**-9 + 2**-20, 1e-40], jnp.float32)
    n = 1 << 16
    wide = jnp.broadcast_to(x[:, None], (len(x), n))
    over_elements = round_to_bf16(wide, bits((len(x), n), 3))
    steps = jax.vmap(lambda step: round_to_bf16(x, bits(x.shape, step)))(jnp.arange(n))
    for drawn in (np.asarray(over_elements, np.float64), np.asarray(steps, np.float64).T):
        for value, draws in zip(np.asarray(x, np.float64), drawn, strict=True):
            low, high = np.unique(draws)
            assert low < value < high
            p = (value - low) / (high - low)
            error = (draws.mean() - value) / (high - low)
            assert abs(error) < 5 * np.sqrt(p * (1 - p) / n), value


def test_what_bf16_expresses_stays_and_what_is_no_number_stays_none():
    exact = jnp.asarray([0.0, -0.0, 1.0, -2.5, 3e38, jnp.inf, -jnp.inf], jnp.bfloat16)
    for word in (0, 0xFFFFFFFF):
        rounded = round_to_bf16(exact.astype(jnp.float32), jnp.uint32(word))
        np.testing.assert_array_equal(rounded.view(jnp.uint16), exact.view(jnp.uint16))
        assert jnp.isnan(round_to_bf16(jnp.float32(jnp.nan), jnp.uint32(word)))


def test_bits_differ_between_seeds_steps_parameters_and_tensors_and_are_uncorrelated():
    shape = 64, 1024
    base = bits(shape, 1)
    others = [bits(shape, 2), bits(shape, 1, seed=2), bits(shape, 1, seed=1 + (1 << 32))]
    others += [bits(shape, 1, name="v"), bits(shape, 1, tensor="nu"), jnp.roll(base, 1, 0)]
    others += [jnp.roll(base, 1, 1)]
    for other in others:
        flips = np.unpackbits(np.asarray(base ^ other).view(np.uint8)).mean()
        assert abs(flips - 0.5) < 5 * 0.5 / np.sqrt(32 * base.size)
    assert len(np.unique(np.asarray(mix(jnp.arange(1 << 16, dtype=jnp.uint32))))) == 1 << 16


@slow
def test_small_updates_add_up_only_with_stochastic_rounding():
    """100 steps of a tenth of an ulp: plain rounding never moves."""
    spec = make_trainer("dense", Cell(), *SR, "train.remat=dots").specs["head"]
    moved = {}
    for on in (False, True):
        cfg = OptimizerConfig(weight_decay=0.0, stochastic_rounding=on)
        optimizer = Optimizer(cfg, {"head": spec}, seed=7)
        params = {"head": jnp.ones(spec.shape, jnp.bfloat16)}
        grads, state = {"head": jnp.ones(spec.shape)}, optimizer.init(params)
        for _ in range(100):
            lr = 0.1 * 2**-8  # an ulp below 1; Adam's direction is 1
            params, state = optimizer.update(grads, state, params, lr=lr, weight_decay=0.0)
        moved[on] = float(1 - params["head"].astype(jnp.float32).mean())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(10 * 2**-8, rel=0.02)


def updated(cell: Cell, steps: int = 2) -> dict:
    """Parameters and moments in canonical order after updates by the same gradients everywhere."""
    return updated_state(make_trainer("odd widths", cell, *SR, "train.remat=dots"), steps)


@pytest.fixture(scope="module")
def alone() -> dict:
    return updated(Cell())


@exhaustive
@pytest.mark.parametrize(
    ("mesh", "zero"),
    quick(
        [({"dp": 2, "tp": 2, "cp": 2}, 3), ({"dp": 8}, 1), ({"pp": 2, "dp": 3}, 1), ({"tp": 2}, 0)]
    ),
)
def test_every_mesh_and_zero_stage_rounds_alike(alone, mesh, zero):
    """Bit for bit, though shards are padded and pipelines store layers in another order."""
    rows = {"rows": 24} if mesh.get("dp") == 3 else {}
    got = updated(Cell(mesh, zero, **rows))
    jax.tree.map(np.testing.assert_array_equal, got, alone)
    kinds = {x.dtype for x in jax.tree.leaves((got["params"], got["opt"]["mu"]))}
    assert kinds == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision.params=bfloat16"], "updates below half a bf16 step would vanish"),
        (["optimizer.stochastic_rounding=true"], "no effect with .*nothing is stored in bf16"),
        (["optimizer.mu_dtype=bfloat16", "optimizer.b1=0.999"], "stands still"),
        (["optimizer.name=muon", "optimizer.offload=true"], "built for elementwise updates"),
    ],
)
def test_what_cannot_work_is_refused(overrides, message):
    from mjax.config.validate import validate

    with pytest.raises(UserError, match=message):
        validate(load(None, ["data.mock=true", *overrides]))


def test_specs_are_partitions_of_the_stored_state():
    """Guards `updated`: it would prove nothing on a mesh that cuts nothing."""
    trainer = make_trainer("odd widths", Cell({"dp": 8}, 1), *SR, "train.remat=dots")
    assert trainer.state_layout.partitions()["params"]["head"] != P(None, None)
    assert any(trainer.storage.paddings.values())
