"""Laws of overlapped tensor parallelism: the numbers of plain exchanges, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mjax.models.base.tensor_parallel_overlap import gather_matmul, matmul_scatter
from mjax.plan.xla_options import accepted
from mjax.prove import Cell, compare, deviation, holds, make_trainer
from mjax.sharding.collectives import Parallel
from tests.marks import exhaustive, slow

ALWAYS = "mesh.tp_overlap=always"


def products(x: jax.Array, weights: dict) -> dict:
    """Contracts what the weights' first axes, all but their last, have in common with x."""
    return {name: jnp.tensordot(x, w, w.ndim - 1) for name, w in weights.items()}


def column(x, weights, parallel, overlap: bool):
    if overlap:
        return gather_matmul(products, x, weights, parallel)
    return products(parallel.gather_seq(x), weights)


def row(h, weights, parallel, overlap: bool):
    if overlap:
        return matmul_scatter(products, h, weights, parallel)
    return jax.tree.map(parallel.scatter_seq, products(h, weights))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_results_and_gradients_are_those_of_plain_exchanges(tp):
    parallel = Parallel(tp=tp)
    mesh = Mesh(np.array(jax.devices()[:tp]), ("tp",), axis_types=(AxisType.Auto,))

    def block(x, up, down, weight, overlap):
        h = column(x, up, parallel, overlap)
        h = jnp.tanh(h["gate"]) * h["value"]
        y = row(h.reshape(*h.shape[:2], -1, 2), down, parallel, overlap)["down"]
        return jnp.sum(jnp.sin(y) * weight), y

    def run(overlap):
        fun = jax.value_and_grad(functools.partial(block, overlap=overlap), (0, 1, 2), has_aux=True)

        def inner(*args):
            return jax.tree.map(lambda a: a, (fun(*args)[0][1], fun(*args)[1]))

        seq, cut = P(None, "tp"), P("tp")
        specs = seq, {"gate": seq, "value": seq}, {"down": cut}, seq
        mapped = jax.shard_map(
            inner, mesh=mesh, in_specs=specs, out_specs=(seq, specs[:3]), check_vma=False
        )
        return jax.device_get(jax.jit(mapped)(x, up, down, weight))

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, weight = rng.normal(size=(2, 2, 16, 6))
        up = {"gate": rng.normal(size=(6, 16)), "value": rng.normal(size=(6, 16))}
        down = {"down": rng.normal(size=(8, 2, 6))}
        got, want = run(True), run(False)
    assert got[0].dtype == np.float64
    assert deviation(got, want) < 1e-13


CASES = [
    ("biases", {"tp": 8}, 1, 1),
    ("dropout", {"cp": 2, "tp": 4}, 3, 2),
    ("tied", {"pp": 2, "dp": 2, "tp": 2}, 1, 3),
]


@exhaustive
@pytest.mark.parametrize("feature,mesh,zero,micro_batches", CASES)
def test_training_equals_one_device(feature, mesh, zero, micro_batches):
    record = compare(feature, Cell(mesh, zero, micro_batches), ALWAYS, steps=1)
    assert holds(record), record


@slow
def test_the_key_decides_and_nothing_is_exchanged_twice():
    """Per block 4 exchanges forward and 4 backward, of log2(4) transfers each; x is gathered anew
    for the weights of 2 matmuls. Remat adds none."""

    def count(mode: str) -> tuple[int, int]:
        cell = Cell({"tp": 4})
        made = make_trainer("dense", cell, f"mesh.tp_overlap={mode}", "train.remat=dots")
        text = made.lower().as_text()
        return text.count("stablehlo.collective_permute"), text.count('"stablehlo.all_gather"')

    never, always = count("never"), count("always")
    assert never[0] == 0 and always[0] == 8 * 2
    assert always[1] == never[1] - 4
    assert count("auto") == never, "CPUs do not copy to each other"


def test_options_are_tried_before_use():
    assert not accepted((("xla_no_such_option", True),), jax.devices()[0])
    assert not accepted((("xla_gpu_collective_permute_mode", "NO_SUCH_MODE"),), jax.devices()[0])
    assert accepted((("xla_embed_ir_in_executable", True),), jax.devices()[0])
