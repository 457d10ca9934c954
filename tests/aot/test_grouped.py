"""The grouped matmul's Hopper kernels compile for H200, in place and without spilled registers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.matmul.grouped import (
    grouped_matmul,
    grouped_matmul8,
    grouped_weight_gradient,
    grouped_weight_gradient8,
)
from mjax.plan.absent_devices import as_on, compiler_devices
from tests.aot.common import H200, missing
from tests.marks import exhaustive, slow

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SHAPES = [(16384, 8, 4096, 14336), (65536, 64, 2048, 1408), (65536, 128, 2048, 768)]
SMALL = 64 * 1024  # bytes: the tables of tiles


def compiled(run, *arguments, **options):
    """`run` for one H200, from shapes and dtypes."""
    where = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    described = [jax.ShapeDtypeStruct(*a, sharding=where) for a in arguments]
    with as_on(H200):
        return jax.jit(run, **options).lower(*described).compile()


@exhaustive
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("down", [False, pytest.param(True, marks=slow)], ids=["up", "down"])
def test_products_are_one_call_each_and_copy_nothing(monkeypatch, capfd, shape, down):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    m, groups, k, n = shape
    if down:
        k, n = n, k
    x, w, g = ((s, jnp.bfloat16) for s in ((m, k), (groups, k, n), (m, n)))
    sizes, total = ((groups,), jnp.int32), ((groups, k, n), jnp.float32)
    ours = {"implementation": "mosaic"}
    adds = functools.partial(grouped_weight_gradient, **ours)
    products = {
        "forward": compiled(functools.partial(grouped_matmul, **ours), x, w, sizes),
        "d_input": compiled(
            functools.partial(grouped_matmul, transposed=True, **ours), g, w, sizes
        ),
        "d_weight": compiled(adds, x, g, sizes),
        "d_weight added": compiled(adds, x, g, sizes, total, donate_argnums=3),
    }
    for name, program in products.items():
        assert program.as_text().count('custom_call_target="mosaic_gpu') == 1, name
        assert program.memory_analysis().temp_size_in_bytes < SMALL, name
    in_place = products["d_weight added"].memory_analysis()
    assert in_place.alias_size_in_bytes == 4 * groups * k * n
    spills_nothing(capfd, len(products))


def spills_nothing(capfd, kernels):
    told = capfd.readouterr()
    said = told.out + told.err
    assert said.count("spill stores") == said.count(" 0 bytes spill stores") == kernels
    assert "C7510" not in said  # the compiler would have made wgmma wait for each other


def test_products_of_8_bits_are_one_call_each_and_copy_nothing(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    m, groups, k, n = SHAPES[0]
    e4m3, e5m2, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
    facts = ((groups,), jnp.int32), ((), jnp.float32)
    total = (groups, k, n), jnp.float32

    def product(rows, w, sizes, scale):
        return grouped_matmul8(rows, w, sizes, scale, bf16, "mosaic", precise=rows.dtype == e5m2)

    def gradient(x, g, sizes, scale, total=None):
        return grouped_weight_gradient8(x, g, sizes, scale, bf16, total, "mosaic")

    x, g = ((k, m), e4m3), ((n, m), e5m2)
    products = [
        compiled(product, ((m, k), e4m3), ((groups, n, k), e4m3), *facts),
        compiled(product, ((m, n), e5m2), ((groups, k, n), e4m3), *facts),
        compiled(gradient, x, g, *facts),
        compiled(gradient, x, g, *facts, total, donate_argnums=4),
    ]
    for program in products:
        assert program.as_text().count('custom_call_target="mosaic_gpu') == 1
        assert program.memory_analysis().temp_size_in_bytes < SMALL
    assert products[-1].memory_analysis().alias_size_in_bytes == 4 * groups * k * n
    spills_nothing(capfd, len(products))
