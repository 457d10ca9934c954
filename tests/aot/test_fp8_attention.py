"""Gate: with `precision.fp8_attention` a layer's attention is one 8-bit forward call of cuDNN and
one backward call of 16 bits, and takes no more memory."""

import re

import pytest

from tests.aot.common import TWO_LAYERS, compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAYERS = 2
KEYS = (*TWO_LAYERS, "data.document_mask=false", "mesh.tp=2")
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@exhaustive
@pytest.mark.parametrize("remat", ["auto", "none"])
def test_one_8_bit_call_a_layer(remat):
    keys = *KEYS, f"train.remat={remat}"
    plain, made = (
        compile_step("configs/models/llama3_8b.yaml", *keys, f"precision.fp8_attention={on}")
        for on in ("false", "true")
    )
    assert plain.calls(FORWARD) == plain.calls(BACKWARD) == made.calls(BACKWARD) == LAYERS
    assert made.calls(f"{FORWARD}F8") == LAYERS, "remat must not run attention again"
    assert made.calls(FORWARD) == plain.calls(f"{FORWARD}F8") == made.calls(f"{BACKWARD}F8") == 0
    of_two = re.compile(r"^%?fused\S* .*-> \(f8e4m3fn\[[^)]*bf16\[\d+,4096,\d+,128\]", re.M)
    assert not of_two.search(made.text), "the backward is to keep bytes, not what they stand for"
    assert made.temp < 1.01 * plain.temp, (made.temp, plain.temp)
