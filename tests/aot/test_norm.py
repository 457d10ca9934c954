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


def test_no_small_gradient_is_a_kernel_of_its_own(monkeypatch):
    """Those of gain and bias are slices of one sum, and the norm of all is one sum at its end."""
    choose_for(monkeypatch, GPU, "norm")
    keys = "model.num_hidden_layers=4", "mesh.dp=1", "train.micro_batch_size=8", "train.remat=none"
    step = compile_step("configs/models/gpt2_124m.yaml", *keys)
    assert not re.search(r"wrapped_slice\S* = bf16\[1,768\]", step.text)
    assert len(re.findall(r" = f32\[\]\S* fusion\(.*/reduce/reduce_sum", step.text)) <= 3
