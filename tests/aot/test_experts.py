"""H200 programs of experts: their matmuls are our kernels, which add to gradient sums in place."""

import re

import pytest

from mjax.config import load
from mjax.kernels.base.chooser import Device, believed
from mjax.models import definition_of
from mjax.plan.memory import bytes_per_device
from tests.aot.common import compile_step, missing
from tests.marks import exhaustive

WHY_NOT = missing(triton=True)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

MIXTRAL_LAYER = [
    "model.num_hidden_layers=1",
    "data.seq_length=4096",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.remat=none",
    "train.experts=mosaic",
]
SUMS = "f32[8,4096,28672]", "f32[8,4096,2,14336]", "f32[8,14336,4096]"


def test_a_mixtral_layer_is_six_kernels_and_copies_neither_weights_nor_sums():
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step("configs/models/mixtral_8x7b.yaml", *MIXTRAL_LAYER)
    assert made.calls("mosaic_gpu_v2") == 6  # two matmuls, forward and each way back
    moved = re.findall(r"= (\S+) (?:copy|transpose|add)\(", made.text)
    assert moved and not [shape for shape in moved if shape.startswith(SUMS)]
    # Sums 5.6 GB, weights 2.8, the layer's activations, the head's chunks and gradients.
    assert made.temp < 15.5e9


@exhaustive
def test_in_fp8_a_mixtral_layer_is_six_kernels_of_8_bits(monkeypatch, capfd):
    """Weights are turned while they are rounded, and the estimate of memory holds."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    keys = [*MIXTRAL_LAYER, "precision.fp8=delayed", "precision.fp8_experts=true"]
    path = "configs/models/mixtral_8x7b.yaml"
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step(path, *keys)
        cfg = load(path, [*keys, "train.attention=cudnn"])
        estimate = sum(bytes_per_device(cfg, cfg.mesh, 1, definition_of(cfg.model).specs).values())
    kernels = re.findall(r"= .* custom-call\(.*mosaic_gpu_v2.*", made.text)
    assert len(kernels) == 6 and all(of.count("f8e") >= 2 for of in kernels)
    moved = re.findall(r"^  \S+ = (\S+) (?:copy|transpose|add)\(", _unfused(made.text), re.M)
    assert moved and not [shape for shape in moved if shape.startswith((*SUMS, "u8[8", "f8e"))]
    assert -0.03 < estimate / (made.arguments + made.temp) - 1 < 0.125
    told = capfd.readouterr()
    said = told.out + told.err
    assert said.count("spill stores") == said.count(" 0 bytes spill stores") == 6


@exhaustive
def test_in_blocks_a_mixtral_layer_is_six_kernels_of_8_bits():
    """Rows, gradients and weights are rounded for each product, once where two read them."""
    keys = [*MIXTRAL_LAYER, "precision.fp8=block128", "precision.fp8_experts=true"]
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step("configs/models/mixtral_8x7b.yaml", *keys)
    kernels = re.findall(r"= .* custom-call\(.*mosaic_gpu_v2.*", made.text)
    of_experts = [of for of in kernels if "/mlp/" in of]
    assert len(of_experts) == 6 and all(of.count("f8e") >= 2 for of in of_experts)
    moved = re.findall(r"^  \S+ = (\S+) (?:copy|transpose|add)\(", _unfused(made.text), re.M)
    assert moved and not [shape for shape in moved if shape.startswith((*SUMS, "u8[8", "f8e"))]


def _unfused(text: str) -> str:
    """A program without the insides of its fusions."""
    return re.sub(r"^%?fused_.*?^}", "", text, flags=re.M | re.S)


OVER_EP = [
    "model.num_hidden_layers=1",
    "model.hidden_size=512",
    "model.moe.moe_intermediate_size=512",
    "model.vocab_size=1024",
    "data.seq_length=1024",
    "mesh.ep=8",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.remat=none",
    "train.experts=loop",
]


@exhaustive
@pytest.mark.parametrize("way,gathers", [("all_to_all", 4), ("all_gather", 0)])
def test_tokens_of_an_expert_group_go_all_to_all_and_gather_only_where_they_do_not_fit(
    way, gathers
):
    """Two exchanges forward and two backward, each a branch beside the gather or the scatter."""
    key = f"train.expert_exchange={way}"
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step("configs/models/mixtral_8x7b.yaml", *OVER_EP, key)
    rows = r"bf16\[(?:8,|8,1,)?360,512\]"  # of 1024 tokens, to each device
    exchanges = re.findall(r"= \(?(\S+).* all-to-all(?:-start)?\(", made.text)
    assert len(re.findall(r" conditional\(", made.text)) == gathers
    assert len([shape for shape in exchanges if re.search(rows, shape)]) == gathers


@exhaustive
def test_in_fp8_tokens_travel_as_bytes_and_sums_do_not():
    keys = [*OVER_EP[:-1], "precision.fp8=delayed", "precision.fp8_experts=true"]
    keys.append("train.expert_exchange=all_to_all")
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step("configs/models/mixtral_8x7b.yaml", *keys)
    for dtype in ("u8", "bf16"):  # of 1024 tokens, to each device, forward and backward
        found = re.findall(rf"= .*{dtype}\[8,360,512\].* all-to-all(?:-start)?\(", made.text)
        assert len(found) == 2, (dtype, found)


OF_BLOCKS = ["precision.fp8=block128", "precision.fp8_experts=true"]
OF_BLOCKS += ["precision.fp8_rules=[['*.attention.*', none]]"]


@exhaustive
@pytest.mark.parametrize("recipe, rounded", [([], [1024]), (OF_BLOCKS, [1024, 8192, 8192])])
def test_in_blocks_the_dispatch_alone_travels_as_bytes(recipe, rounded):
    """A device rounds its 1024 tokens. Products of 128-blocks read those of the group as they came:
    what else is rounded along 512 is the input of `down`, and its output's gradient."""
    keys = [*OVER_EP[:-1], *recipe, "precision.fp8_dispatch=true"]
    keys.append("train.expert_exchange=all_to_all")
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step("configs/models/mixtral_8x7b.yaml", *keys)
    for dtype, width, times in (("u8", 512 + 512 // 128, 1), ("bf16", 512, 3)):
        shape = rf"= .*{dtype}\[8,360,{width}\].* all-to-all(?:-start)?\("
        assert len(re.findall(shape, made.text)) == times, dtype
    kernels = re.findall(r"= \(f8e4m3fn\[(\d+),512\].*triton_kernel_call_ffi", made.text)
    assert sorted(map(int, kernels)) == rounded
