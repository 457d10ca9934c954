"""Gate: in FP8 every matmul of a block is one of cuBLASLt's 8-bit kernels, forward and backward."""

import re

import pytest

from tests.aot.common import compile_step, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAYERS = ("model.num_hidden_layers=3", "mesh.dp=1", "train.global_batch_size=1")
LLAMA = "configs/models/llama3_8b.yaml"


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_all_matmuls_of_blocks_are_8_bit(recipe):
    keys = "train.micro_batch_size=1", "train.unroll=1", f"precision.fp8={recipe}"
    made = compile_step(LLAMA, *LAYERS, *keys)
    assert made.calls("__cublas$lt$matmul$f8") == 5 * 3, "q, kv, out, up, down; y, dx and dw"
    assert made.calls("__cublas$lt$matmul") == 3, "the head's alone may be of 16 bits"
    assert not re.search(r"\bdot\(|__triton_gemm", made.text), "a matmul outside cuBLASLt"
    # dw alone needs turned operands, and those are turned while they are rounded: a transpose with
    # an 8-bit input would be a pass of its own. Weights are turned too, in the forward pass.
    assert not re.search(r"= f8e\w+\[[\d,]+\]\S* transpose\(%?param", _roots(made.text))


def _roots(text: str) -> str:
    """The computations that consist of one transpose."""
    found = re.findall(r"^%?wrapped_transpose\w* .*?^}", text, re.M | re.S)
    return "\n".join(found)
