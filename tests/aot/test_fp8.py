"""Gate: in FP8 every matmul of a block is one of cuBLASLt's 8-bit kernels, forward and backward,
and ZeRO gathers their weights as bytes."""

import math
import re
from collections import Counter

import pytest

from tests.aot.common import compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAYERS = ("model.num_hidden_layers=3", "mesh.dp=1", "train.global_batch_size=1")
LLAMA = "configs/models/llama3_8b.yaml"


# q, kv, out, up, down; y, dx and dw. Current scaling rounds x once for q and kv, so that XLA makes
# one product of both: one of y and one of dw.
@pytest.mark.parametrize("recipe, products", [("current", 5 * 3 - 2), ("delayed", 5 * 3)])
def test_all_matmuls_of_blocks_are_8_bit(recipe, products):
    keys = "train.micro_batch_size=1", "train.unroll=1", f"precision.fp8={recipe}"
    made = compile_step(LLAMA, *LAYERS, *keys)
    assert made.calls("__cublas$lt$matmul$f8") == products
    assert made.calls("__cublas$lt$matmul") == 3, "the head's alone may be of 16 bits"
    assert not re.search(r"\bdot\(|__triton_gemm", made.text), "a matmul outside cuBLASLt"
    # dw alone needs turned operands, and those are turned while they are rounded: a transpose with
    # an 8-bit input would be a pass of its own. Weights, which the forward turns, are rounded and
    # turned before the loops.
    assert not re.search(r"= f8e\w+\[[\d,]+\]\S* transpose\(%?param", _roots(made.text))


@exhaustive
@pytest.mark.parametrize("zero, gathers", [(1, 1), (3, 2)])  # a step; a micro-batch, in a loop
def test_zero_gathers_the_weights_of_blocks_as_bytes(zero, gathers):
    keys = "mesh.dp=8", f"mesh.zero={zero}", "train.remat=dots", "precision.fp8=delayed"
    sizes = "model.num_hidden_layers=2", "train.micro_batch_size=1", "train.global_batch_size=16"
    text = compile_step(LLAMA, *keys, *sizes).text
    matmuls = 4096 * (4096 + 2048 + 4096 + 3 * 14336)
    moved = _gathered(text)
    assert moved["u8"] == gathers * 2 * matmuls
    assert moved["bf16"] < 1.001 * 2 * 128256 * 4096, "embedding, head and norms alone"


def _gathered(text: str) -> Counter:
    """Dtype -> elements that come out of the program's all-gathers."""
    out: Counter = Counter()
    for kind, start in re.findall(r"= (.*?) all-gather(-start)?\(", text):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", kind)
        for dtype, sizes in shapes[len(shapes) // 2 :] if start else shapes:
            out[dtype] += math.prod(int(n) for n in sizes.split(",") if n)
    return out


def _roots(text: str) -> str:
    """The computations that consist of one transpose."""
    found = re.findall(r"^%?wrapped_transpose\w* .*?^}", text, re.M | re.S)
    return "\n".join(found)
