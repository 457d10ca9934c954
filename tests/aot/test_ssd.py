"""The scan of Mamba-2, compiled for H200: products once or twice, and memory that has a bound.

It has not run on a GPU: these tests hold what the compiler made of it.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from mjax.kernels.ssd import SsdInputs, ssd
from mjax.plan.described import compiler_devices
from tests.aot.common import H200, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GIB = 2**30


def compiled(length, batch=8, heads=80, groups=8, size=64, state=128, chunk=256):
    """The scan forward and backward in bf16 on one device; the issue's sizes by default."""
    where = jax.sharding.SingleDeviceSharding(compiler_devices(H200, 1)[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    wide = jnp.float32
    inputs = SsdInputs(
        x=array(batch, length, heads, size),
        dt=array(batch, length, heads, dtype=wide),
        a=array(heads, dtype=wide),
        b=array(batch, length, groups, state),
        c=array(batch, length, groups, state),
    )

    def scan(inputs, starts, d_y):
        y, back = jax.vjp(lambda v: ssd(v, chunk=chunk, starts=starts)[0], inputs)
        return y, back(d_y)

    starts = array(batch, length, dtype=jnp.bool_)
    return jax.jit(scan).lower(inputs, starts, inputs.x).compile()


def test_memory_is_bounded():
    """Eight rows of 4096 tokens of 80 heads hold 0.8 GiB of inputs; chunks add a bound."""
    program = compiled(4096)
    assert len(re.findall(r" dot\(", program.as_text())) <= 24  # each product once or twice
    assert program.memory_analysis().temp_size_in_bytes < 3 * GIB  # 2.66 when it was written
