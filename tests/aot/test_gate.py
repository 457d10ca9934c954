"""Steps compiled for H200 run our gate kernels, and their 8-bit products read what those write."""

import re
from collections import Counter

import pytest

from tests.aot.common import compile_step, missing
from tests.devices import GPU, choose_for
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

LLAMA = "configs/models/llama3_8b.yaml"
SMALL = ["model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "train.unroll=1"]


def compiled(monkeypatch, *more: str) -> str:
    choose_for(monkeypatch, GPU, "gate", "quantize")
    keys = "train.micro_batch_size=1", "train.global_batch_size=1"
    return compile_step(LLAMA, *SMALL, *keys, *more).text


def calls(text: str) -> Counter:
    return Counter(
        re.findall(r"custom-call\(.*/((?:act|gate)_\w+|quantize\w*)/triton_kernel_call", text)
    )


@exhaustive
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_a_gate_has_one_call(monkeypatch, compute):
    text = compiled(monkeypatch, f"precision.compute={compute}")
    assert calls(text) == {"gate_backward": 1}
    assert compute == "bfloat16" or "bf16[" not in text


@exhaustive
def test_gelu_has_a_call_each_way_and_keeps_its_input_alone(monkeypatch):
    """And of the bias's gradient sums over tiles leave the kernel, not what they are sums of."""
    choose_for(monkeypatch, GPU, "gate", "quantize")
    keys = "model.num_hidden_layers=2", "mesh.dp=1", "train.remat=none"
    more = "train.micro_batch_size=8", "train.global_batch_size=8"
    text = compile_step("configs/models/gpt2_124m.yaml", *keys, *more).text
    assert calls(text) == {"act_forward": 2, "act_backward": 2}
    assert not re.findall(r"= bf16\[8,1024,3072\]\S* fusion\(", text)


@exhaustive
def test_fp8_products_of_a_block_read_what_kernels_wrote(monkeypatch):
    """Nothing turns, copies or rounds in between: but weights, six products of the block have no
    other operand."""
    text = compiled(monkeypatch, "precision.fp8=delayed")
    # q, kv and out: a gradient each. The block: x, x turned, its gradient.
    assert calls(text) == {
        "gate_forward8": 1,
        "gate_backward8": 1,
        "quantize": 1,
        "quantize_transposed": 3 + 2,
    }
    made = dict(re.findall(r"^ +%?([\w.\-]+) = (.*)$", text, re.M))
    found = Counter()
    for line in made.values():
        if 'custom_call_target="__cublas$lt$matmul$f8"' in line and "/mlp/" in line:
            operands = re.search(r"custom-call\(([^)]*)\)", line)[1].split(", ")[:2]
            found[tuple(sorted(source(text, made, name) for name in operands))] += 1
    assert found == {("kernel", "kernel"): 2, ("kernel", "other"): 4}


@exhaustive
def test_current_scaling_reads_a_block_once_more(monkeypatch):
    """The gate measures each way before it rounds; what else is rounded is so both ways at once."""
    choose_for(monkeypatch, GPU, "norm")
    text = compiled(monkeypatch, "precision.fp8=current")
    # x of q and kv, out's input, the block's x, again in the backward (`dots`); four gradients
    assert calls(text) == {
        "gate_tops": 2,
        "gate_forward8": 1,
        "gate_backward8": 1,
        "quantize_transposed": 2 * 3 + 4,
    }
    assert len(re.findall(r"custom-call\(.*/rmsnorm_forward/triton_kernel_call", text)) == 2 * 2
    assert not re.search(r"= f8e\w+\[[\d,]+\]\S* transpose\(", text)


def source(text: str, made: dict, name: str) -> str:
    """What wrote an operand, behind its views: a kernel, alone or with slices that it reads."""
    line = made[name.strip("%")]
    if view := re.search(r" (?:bitcast|get-tuple-element)\(%?([\w.\-]+)\)", line):
        return source(text, made, view[1])
    if called := re.search(r" fusion\(.*calls=(%[\w.\-]+)", line):
        line = re.search(rf"^{re.escape(called[1])} .*?^}}", text, re.M | re.S)[0]
    return "kernel" if '"triton_kernel_call' in line else "other"  # _ffi, where jax-triton is newer
