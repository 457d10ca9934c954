"""Mamba-2 compiled for H200: which kernels a step calls; the plain scan's products and memory."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from mjax.kernels.recurrence.ssd import SsdInputs, ssd
from mjax.plan.absent_devices import compiler_devices
from tests.aot.common import H200, compile_step, missing
from tests.devices import GPU, choose_for
from tests.marks import exhaustive, quick

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


@exhaustive
@pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))
@pytest.mark.parametrize("remat", quick(["none", "dots", "full"], 1))
def test_a_layer_calls_each_kernel_once_but_what_it_computes_again(monkeypatch, remat):
    """The convolution goes over x, and over B and C. `dots` keeps what the scan gives."""
    choose_for(monkeypatch, GPU, "ssd", "causal_conv")
    small = ["model.num_hidden_layers=1", "model.hidden_size=512", "model.vocab_size=512"]
    small += ["model.mamba.mamba_num_heads=16", "mesh.dp=1", "train.micro_batch_size=4"]
    step = compile_step("configs/models/mamba2_2_7b.yaml", *small, f"train.remat={remat}")
    calls = re.findall(r" custom-call\(.*/(\w+)/triton_kernel_call", step.text)
    assert Counter(calls) == {
        "ssd_forward": 2 if remat == "full" else 1,
        "ssd_states": 2,  # from the start, and from the end
        "ssd_gradients": 1,
        "ssd_gradient_c": 1,
        "conv_forward": 2 if remat == "none" else 4,
        "conv_backward": 2,
    }


@exhaustive
def test_memory_of_the_plain_scan_is_bounded():
    """Eight rows of 4096 tokens of 80 heads hold 0.8 GiB of inputs; chunks add a bound."""
    program = compiled(4096)
    assert len(re.findall(r" dot\(", program.as_text())) <= 24  # each product once or twice
    assert program.memory_analysis().temp_size_in_bytes < 3 * GIB  # 2.66 when it was written
