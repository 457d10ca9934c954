"""Gate: attention to shared prefixes is two of cuDNN's packed calls, forward and backward."""

import pytest

from tests.aot.common import TWO_LAYERS, compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAYERS = 2
KEYS = (
    *TWO_LAYERS,
    "train.objective=preference",
    "train.loss_divisor=tokens",
    "preference.reference_free=true",
)
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@exhaustive
@pytest.mark.parametrize("tp", [1, 2])
def test_two_packed_calls_a_layer(tp):
    path = "configs/models/llama3_8b.yaml"
    keys = *KEYS, f"mesh.tp={tp}"
    plain = compile_step(path, *keys, documents=16)
    made = compile_step(path, *keys, "data.shared_prefixes=true", documents=16)
    assert plain.calls(FORWARD) == plain.calls(BACKWARD) == LAYERS
    assert made.calls(FORWARD) == 2 * LAYERS, "remat must not run attention again"
    assert made.calls(BACKWARD) == 2 * LAYERS
    assert made.temp < 1.3 * plain.temp, (made.temp, plain.temp)
