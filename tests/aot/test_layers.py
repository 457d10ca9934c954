"""Gate: matmuls of unrolled layers add their weights' gradients to sums, in place, ZeRO exchanges
each layer's by itself, and a pipeline takes its slots one by one."""

import math
import re

import pytest

from tests.aot.common import Compiled, compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LLAMA, LAYERS = "configs/models/llama3_8b.yaml", 2
KEYS = [f"model.num_hidden_layers={LAYERS}", "train.micro_batch_size=1", "train.remat=none"]


# Of q and kv, which read one x, XLA makes one matmul in bf16, and adds what comes out.
@exhaustive
@pytest.mark.parametrize("fp8, target, each", [("none", "matmul", 3), ("delayed", "matmul$f8", 5)])
def test_sums_are_operands_of_matmuls(fp8, target, each):
    """They write over an fp32 operand. Without Triton, whose choice needs a GPU."""
    more = "mesh.dp=1", "train.global_batch_size=2", f"precision.fp8={fp8}"
    made = compile_step(LLAMA, *KEYS, *more, xla={"xla_gpu_enable_triton_gemm": False})
    calls = [line for line in made.text.splitlines() if f'__cublas$lt${target}"' in line]
    in_place = [c for c in calls if "= (f32[" in c and "output_to_operand_aliasing={{0}: (2" in c]
    assert len(in_place) >= each * LAYERS


@exhaustive
def test_zero_reduces_each_layer_by_itself():
    """And no stack of whole weights or gradients is made of them."""
    made = compile_step(LLAMA, *KEYS, "mesh.dp=4", "mesh.zero=1", "train.global_batch_size=8")
    scattered = re.findall(r"reduce-scatter(?:-start)?\(([^)]*)\)", made.text)
    assert sum(len(operands.split(",")) for operands in scattered) >= 5 * LAYERS
    sizes = re.findall(rf"= f32\[{LAYERS},([\d,]+)\]", made.text)
    largest = max((math.prod(map(int, dims.split(","))) for dims in sizes), default=0)
    assert largest <= 4096 * 2 * 14336 // 4


@exhaustive
def test_one_micro_batch_hides_what_zero_exchanges():
    """Gathers run under the forward; gradients, in bf16, under the backward of the layer before.
    The first two layers and the tables end the step."""
    layers, path = 6, "configs/models/gpt_1b3.yaml"
    keys = f"model.num_hidden_layers={layers}", "train.remat=none", "mesh.dp=4", "mesh.zero=1"
    made = compile_step(path, *keys, "train.global_batch_size=32", "train.micro_batch_size=8")
    exposed = [line.split() for line in made.exposed_outside_loops()]
    sizes = [(op, math.prod(map(int, re.findall(r"\d+", kind[4:])))) for op, kind in exposed]
    assert sum(op == "reduce-scatter" for op, _ in sizes) <= 1, "of all that is little"
    assert not [n for op, n in sizes if op == "reduce-scatter" and n >= 2**22]
    assert sum(op == "all-to-all" and n >= 2**22 for op, n in sizes) <= 2 * 5 + 2
    assert sum(op == "all-gather" and n >= 2**22 for op, n in sizes) <= 2


@exhaustive
def test_one_micro_batch_stacks_gradients_beside_other_work():
    """Each layer's is copied into its place; no kernel puts a stack together in the end."""
    keys = "model.num_hidden_layers=5", "train.remat=none", "mesh.dp=1"
    more = "train.global_batch_size=8", "train.micro_batch_size=8"
    made = compile_step("configs/models/gpt2_124m.yaml", *keys, *more)
    copied = re.findall(r"fusion-start\(.*dynamic_update_slice", made.text)
    assert len(copied) >= 5 * 5
    stacks = re.findall(r"= bf16\[5,768,3072\]\S* (?:fusion|concatenate)\(.*", made.text)
    assert all("/gather/convert_element_type" in made_of for made_of in stacks), "and no gradients"


@pytest.fixture(scope="module")
def pipeline() -> Compiled:
    """Of two devices with two chunks each, of 3 and 2 layers, 2 and 1."""
    keys = "model.num_hidden_layers=8", "model.vocab_size=8192", "train.micro_batch_size=1"
    more = "mesh.dp=1", "mesh.pp=2", "mesh.pipeline_layout='Et*3|t*2|t*2|tL'"
    return compile_step(LLAMA, *keys, *more, "train.global_batch_size=4", "train.remat=dots")


@exhaustive
def test_a_pipeline_copies_no_chunk(pipeline):
    """A device reads weights, and adds to sums, slot by slot: no array of the slots of a chunk is
    made of a stack of all. It takes weights out of the stack under a condition, not in every tick.
    """
    of_chunk = re.findall(r"^ .*= \(?\w+\[(?:1,)?3,4096,2,14336\].* fusion\(", pipeline.text, re.M)
    assert "[6,4096,2,14336]" in pipeline.text and not of_chunk
    of_weights = r"= \(?bf16\[(?:1,)?4096,2,14336\].* fusion\(.*dynamic_slice"
    assert re.search(of_weights, pipeline.text)
    assert not [body for body in pipeline.loops() if re.search(of_weights, body)]


@exhaustive
def test_slots_that_only_some_chunks_have_hand_no_weights_from_forward_to_backward(pipeline):
    assert not re.findall(r"= bf16\[(?:1,)?4096,2,14336\]\S* copy\(%(?!broadcast)", pipeline.text)
