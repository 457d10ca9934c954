"""A step compiled for H200 runs our backward once a norm, and adds the stream's gradient in it."""

import re

import pytest

from tests.aot.common import compile_step, missing
from tests.devices import GPU, choose_for

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

SMALL = ["model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "train.unroll=1"]
CALL = re.compile(r"custom-call\(([^)]*)\).*/norm_backward/triton_kernel_call")


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_one_call_a_norm(monkeypatch, compute):
    """Two in the body of the scan, which also take the stream's gradient, and the final one."""
    choose_for(monkeypatch, GPU, "norm")
    keys = *SMALL, "train.micro_batch_size=8", f"precision.compute={compute}"
    step = compile_step("configs/models/gpt2_124m.yaml", *keys)
    operands = [len(set(m[1].split(", "))) for m in CALL.finditer(step.text)]
    assert sorted(operands) == [3, 4, 4]  # gain, x, its norm's gradient, the stream's
