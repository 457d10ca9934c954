"""A step compiled for H200 runs our kernels once a norm, and copies no stream for a sum."""

import re

import pytest

from tests.aot.common import compile_step, missing
from tests.devices import GPU, choose_for
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

SMALL = ["model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "train.unroll=1"]
CALL = r"custom-call\(([^)]*)\).*/norm_%s/triton_kernel_call"


@exhaustive
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_one_call_a_norm(monkeypatch, compute):
    """Two in the body of the scan, which also take the stream's gradient, and the final one."""
    choose_for(monkeypatch, GPU, "norm")
    keys = *SMALL, "train.micro_batch_size=8", f"precision.compute={compute}"
    step = compile_step("configs/models/gpt2_124m.yaml", *keys)

    def operands(name: str) -> list[int]:
        calls = re.finditer(CALL % name, step.text)
        return sorted(len(set(call[1].split(", "))) for call in calls)

    assert operands("forward") == [3] * 5  # gain, bias, x; `dots` norms again in the backward
    assert operands("backward") == [3, 4, 4]  # gain, x, its norm's gradient, the stream's


@exhaustive
def test_no_small_gradient_is_a_kernel_of_its_own(monkeypatch):
    """Those of gain and bias are slices of one sum, and the norm of all is one sum at its end."""
    choose_for(monkeypatch, GPU, "norm")
    keys = "model.num_hidden_layers=4", "mesh.dp=1", "train.micro_batch_size=8", "train.remat=none"
    step = compile_step("configs/models/gpt2_124m.yaml", *keys)
    slices = re.findall(r"wrapped_slice\S* = bf16\[1,768\].*", step.text)
    assert not [line for line in slices if "transpose(" in line], "biases of matmuls are copied"
    assert len(re.findall(r" = f32\[\]\S* fusion\(.*/reduce/reduce_sum", step.text)) <= 3


def test_a_matmul_adds_the_stream_as_it_writes(monkeypatch):
    """Two a layer, and no stream is copied before because the matmul would write over it."""
    choose_for(monkeypatch, GPU, "norm")
    keys = "model.num_hidden_layers=2", "mesh.dp=1", "train.micro_batch_size=8", "train.remat=none"
    step = compile_step("configs/models/vit_l16.yaml", *keys, "train.global_batch_size=8")
    sums = re.findall(
        r"= \(bf16\[1576,1024\]\S* .*__cublas\$lt\$matmul.*\"beta\":1.*\"epilogue\":\"BIAS",
        step.text,
    )
    assert len(sums) == 2 * 2
    assert not re.search(r"= bf16\[(8,197|1576),1024\]\S* copy\(", step.text)
