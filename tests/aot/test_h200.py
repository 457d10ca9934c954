"""Gate: what the H200 programs must contain, read from programs compiled without a GPU."""

from collections import Counter

import pytest

from tests.aot.common import compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LLAMA = "configs/models/llama3_8b.yaml"
EIGHT_LAYERS = ("model.num_hidden_layers=8", "mesh.dp=1", "train.global_batch_size=2")


def test_one_gpu_program_runs_attention_once_and_fits():
    made = compile_step(LLAMA, *EIGHT_LAYERS, "train.micro_batch_size=2")
    assert made.calls("__cudnn$fmhaSoftmax") == 8, "remat must not run attention again"
    assert made.calls("__cudnn$fmhaSoftmaxBackward") == 8
    assert made.aliased >= 0.99 * made.arguments - 1e7, "the state must be donated"
    assert made.temp < 32e9
    logits = 2 * 8192 * 128256
    assert f"[{logits // 128256},128256]" not in made.text, "whole logits exist"


@exhaustive
def test_zero_1_stores_an_eighth_and_gathers_once_a_step():
    eight = ("mesh.dp=8", "train.global_batch_size=32", "train.micro_batch_size=1")
    one = compile_step(LLAMA, *eight, "mesh.zero=1")
    none = compile_step(LLAMA, *eight, "mesh.zero=0", "train.unroll=1")  # the same arguments
    assert one.arguments < none.arguments / 7
    assert one.temp + one.arguments < 135e9


# mesh -> overrides, collectives that hot loops may leave exposed, bytes of temporaries. Nothing may
# be added to them unseen. ZeRO-3: the first layer's gathers, once a micro-batch; tensor parallel:
# embedding and head.
EIGHT = {
    "zero3": (
        ["mesh.dp=8", "mesh.zero=3"],
        {"all-gather": 5},
        47e9,
    ),
    "tp8": (
        ["mesh.dp=1", "mesh.tp=8"],
        {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1},
        15e9,
    ),
    "zero3, layers unrolled": (
        ["mesh.dp=8", "mesh.zero=3", "train.unroll=auto"],
        {"all-gather": 3, "reduce-scatter": 1},
        72e9,
    ),
    "tp8, layers unrolled": (
        ["mesh.dp=1", "mesh.tp=8", "train.unroll=auto"],
        {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1},
        21e9,
    ),
    "cp8": (["mesh.dp=1", "mesh.cp=8"], {}, 70e9),
    "pp4": (
        ["mesh.dp=1", "mesh.pp=4", "mesh.virtual_stages=2"],
        {"collective-permute": 4},
        74e9,
    ),
}


@pytest.mark.parametrize("name", EIGHT)
def test_hot_loops_expose_no_more_than_is_known(name):
    overrides, allowed, temp = EIGHT[name]
    batch = ["train.micro_batch_size=1", "train.global_batch_size=16"]
    made = compile_step(LLAMA, "train.unroll=1", *overrides, *batch)
    exposed = Counter(line.split()[0] for line in made.exposed_in_loops())
    assert exposed <= Counter(allowed), made.exposed_in_loops()
    assert made.temp < temp


@exhaustive
def test_pipeline_memory_does_not_grow_with_micro_batches():
    temps = []
    for batch in (16, 32):
        overrides = [*EIGHT["pp4"][0], "train.micro_batch_size=1"]
        temps.append(compile_step(LLAMA, *overrides, f"train.global_batch_size={batch}").temp)
    assert abs(temps[1] - temps[0]) < 0.01 * temps[0]
