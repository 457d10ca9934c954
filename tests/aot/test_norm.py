"""A step compiled for H200 runs our kernels once a norm, and adds to the stream within them."""

import re

import pytest

from tests.aot.common import compile_step, missing
from tests.devices import GPU, choose_for

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

SMALL = ["model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "train.unroll=1"]
CALL = r"custom-call\(([^)]*)\).*/norm_%s/triton_kernel_call"


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_one_call_a_norm(monkeypatch, compute):
    """Two in the body of the scan, which also take the stream's gradient, and the final one.

    The second one in the body also takes what the branch before adds to the stream.
    """
    choose_for(monkeypatch, GPU, "norm")
    keys = *SMALL, "train.micro_batch_size=8", f"precision.compute={compute}"
    step = compile_step("configs/models/gpt2_124m.yaml", *keys)

    def operands(name: str) -> list[int]:
        calls = re.finditer(CALL % name, step.text)
        return sorted(len(set(call[1].split(", "))) for call in calls)

    # gain, bias, x, what is added; `dots` norms again in the backward
    assert operands("forward") == [3, 3, 3, 4, 4]
    assert operands("backward") == [3, 4, 4]  # gain, x, its norm's gradient, the stream's
