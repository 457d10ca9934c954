"""Gate: what the H200 programs must contain, read from programs compiled without a GPU."""

import pytest

from tests.aot.common import compile_step, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LLAMA = "configs/models/llama3_8b.yaml"
EIGHT_LAYERS = ("model.num_hidden_layers=8", "mesh.dp=1", "train.global_batch_size=2")


def test_one_gpu_program_runs_attention_once_and_fits():
    made = compile_step(LLAMA, *EIGHT_LAYERS, "train.micro_batch_size=2")
    assert made.calls("__cudnn$fmhaSoftmax") == 1, "remat must not run attention again"
    assert made.calls("__cudnn$fmhaSoftmaxBackward") == 1
    assert made.aliased >= 0.99 * made.arguments - 1e7, "the state must be donated"
    assert made.temp < 26e9
    logits = 2 * 8192 * 128256
    assert f"[{logits // 128256},128256]" not in made.text, "whole logits exist"


def test_zero_1_stores_an_eighth_and_gathers_once_a_step():
    eight = ("mesh.dp=8", "train.global_batch_size=32", "train.micro_batch_size=1")
    one = compile_step(LLAMA, *eight, "mesh.zero=1")
    none = compile_step(LLAMA, *eight, "mesh.zero=0")
    assert one.arguments < none.arguments / 7
    assert one.temp + one.arguments < 135e9
