"""Which kernel is chosen for what, on which device, and that every answer says why."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from mjax.config import load
from mjax.kernels import choose
from mjax.kernels.base.attention_call import AttentionCall
from mjax.kernels.base.chooser import (
    MOST_SCRATCH,
    NO_GPU,
    RULES,
    SPARED_SCRATCH,
    Device,
    believed,
    this_device,
)
from mjax.kernels.base.device_facts import rounded_memory
from mjax.plan.kernel_lines import (
    attention_choices,
    document_lines,
    kernel_choices,
    kernel_lines,
    reads_pairs,
)
from tests.devices import CPU, GPU, HOPPER

AUTO = AttentionCall(scale=1.0)
ALONE = AttentionCall(scale=1.0, max_documents=1)
ASKED = AttentionCall(scale=1.0, implementation="xla")
PAGES = {"call": AUTO, "value_size": 128, "page": 64}
PADDED = AttentionCall(scale=1.0, max_documents=2, padded=True)
NEAR = AttentionCall(scale=1.0, mask="full", window=65)
FIXED = AttentionCall(scale=1.0, max_documents=1, deterministic=True)
CAPPED = AttentionCall(scale=1.0, softcap=30.0)
WHOLE = AttentionCall(scale=1.0, mask="full", max_documents=2, padded=True)
PACKED = AttentionCall(scale=1.0, mask="full")
FEW, MANY = (AttentionCall(scale=1.0, max_documents=most) for most in (16, 512))
Q = (2, 1024, 8, 128)
SHORT_Q = (2, 512, 8, 64)
LONGEST_Q = (1, 2**20, 10, 64)  # a row of queries, keys and values has 0.94 * 2**31 elements
MLA_Q = (2, 1024, 8, 192)
BIG = (2**14, 2**10)
UP = (2**14, 1024, 4096)
EXPERTS = (2**14, 8, 4096, 14336)
OF_XLA, OF_TE = {"backend": "xla"}, {"backend": "te"}
FP8_EXPERTS = {"asked": "auto", "eight_bits": True}
BARE = Device("gpu", triton=False)

OF_128, OF_32 = ({"side": side, "emulates": False} for side in (128, 32))
ASKS = {"side": 128, "emulates": True}
HALF_BLOCK = (5, 192, 256)

# op, dtype, shape, device, facts, the implementation, a word of why
TABLE = [
    ("block_matmul", "bfloat16", (5, 4096, 1024), HOPPER, OF_128, "mosaic", "128 terms"),
    ("block_matmul", "bfloat16", (5, 4096), HOPPER, OF_128, "mosaic", "128 terms"),
    ("block_matmul", "bfloat16", (5, 4096), HOPPER, ASKS, "xla", "fp8_emulate"),
    ("block_matmul", "bfloat16", (5, 4096), CPU, OF_128, "xla", "Hopper"),
    ("block_matmul", "bfloat16", (5, 4096), GPU, OF_128, "xla", "Hopper"),
    ("block_matmul", "bfloat16", (5, 4096), HOPPER, OF_32, "xla", "blocks of 128"),
    ("block_matmul", "bfloat16", HALF_BLOCK, HOPPER, OF_128, "xla", "whole blocks"),
    ("channels8", "bfloat16", (64, 4096, 1024), CPU, {}, "xla", "Hopper"),
    ("channels8", "bfloat16", (64, 4096, 1024), GPU, {}, "xla", "Hopper"),
    ("channels8", "bfloat16", (64, 4096, 1024), HOPPER, {}, "triton", "once"),
    ("channels8", "bfloat16", (65, 4096, 1024), HOPPER, {}, "xla", "more than 64 rows"),
    ("channels8", "bfloat16", (64, 96, 1024), HOPPER, {}, "xla", "no 96 inputs"),
    ("attention", "bfloat16", Q, CPU, {"call": AUTO}, "xla", NO_GPU),
    ("attention", "bfloat16", Q, GPU, {"call": AUTO}, "cudnn", "no faster"),
    ("attention", "bfloat16", Q, HOPPER, {"call": AUTO}, "cudnn", "no faster"),
    ("attention", "bfloat16", Q, HOPPER, {"call": CAPPED}, "mosaic", "soft-caps"),
    ("attention", "bfloat16", Q, HOPPER, {"call": AUTO, "sinks": True}, "mosaic", "sinks"),
    ("attention", "bfloat16", Q, GPU, {"call": CAPPED}, "cudnn", ""),  # which refuses it
    ("attention", "float16", Q, HOPPER, {"call": CAPPED}, "cudnn", ""),
    ("attention", "bfloat16", Q, HOPPER, {"call": CAPPED, "value_size": 64}, "cudnn", ""),
    ("attention", "bfloat16", MLA_Q, CPU, {"call": AUTO, "value_size": 128}, "xla", NO_GPU),
    ("attention", "bfloat16", MLA_Q, HOPPER, {"call": AUTO, "value_size": 128}, "cudnn", "192"),
    ("attention", "bfloat16", Q, HOPPER, {"call": NEAR}, "xla", "windows to both sides"),
    ("attention", "bfloat16", SHORT_Q, HOPPER, {"call": NEAR}, "triton", "windows to both sides"),
    ("attention", "bfloat16", SHORT_Q, BARE, {"call": NEAR}, "xla", "windows to both sides"),
    ("attention", "bfloat16", LONGEST_Q, GPU, {"call": NEAR}, "triton", "windows to both sides"),
    ("attention", "bfloat16", (1, 2**20, 11, 64), GPU, {"call": NEAR}, "xla", "windows"),
    ("attention", "bfloat16", SHORT_Q, GPU, {"call": NEAR, "by_blocks": True}, "xla", "windows"),
    ("attention", "bfloat16", SHORT_Q, GPU, {"call": WHOLE}, "triton", "rows of 512 tokens"),
    ("attention", "float16", SHORT_Q, GPU, {"call": WHOLE}, "triton", "rows of 512 tokens"),
    ("attention", "float32", SHORT_Q, GPU, {"call": WHOLE}, "cudnn", ""),  # which refuses it
    ("attention", "bfloat16", SHORT_Q, BARE, {"call": WHOLE}, "cudnn", "no faster"),
    ("attention", "bfloat16", SHORT_Q, GPU, {"call": WHOLE, "by_blocks": True}, "cudnn", ""),
    ("attention", "bfloat16", SHORT_Q, GPU, {"call": PACKED}, "cudnn", "no faster"),
    ("attention", "bfloat16", (2, 4096, 8, 64), GPU, {"call": WHOLE}, "cudnn", "no faster"),
    # 88 rows of 512 answers, that an H200 ran out of memory with: 22.4 GiB beside the step's own.
    ("attention", "bfloat16", (88, 512, 4, 64), HOPPER, {"call": MANY}, "mosaic", "24 GB for 512"),
    ("attention", "bfloat16", (88, 512, 4, 64), GPU, {"call": MANY}, "xla", "24 GB for 512"),
    ("attention", "bfloat16", (1, 8192, 32, 128), HOPPER, {"call": FEW}, "mosaic", "2 GB for 16"),
    ("attention", "bfloat16", (1, 2048, 32, 128), HOPPER, {"call": FEW}, "cudnn", "no faster"),
    ("attention", "bfloat16", (8, 8192, 32, 128), GPU, {"call": FEW}, "cudnn", "no faster"),
    ("attention", "bfloat16", Q, CPU, {"call": NEAR}, "xla", NO_GPU),
    ("norm", "bfloat16", BIG, CPU, {}, "xla", NO_GPU),
    ("norm", "bfloat16", BIG, GPU, {}, "triton", "one pass"),
    ("norm", "bfloat16", (2**14, 8192), GPU, {}, "xla", "4096 columns"),
    ("norm", "bfloat16", (2**14, 8192), GPU, {"layernorm": True}, "triton", "one pass"),
    ("norm", "bfloat16", BIG, BARE, {}, "xla", "pip install"),
    ("norm", "bfloat16", (1, 1024), GPU, {}, "xla", "launch"),
    ("norm", "bfloat16", (2**21, 2**10), GPU, {}, "xla", "32-bit"),
    ("gate", "bfloat16", BIG, CPU, {}, "xla", NO_GPU),
    ("gate", "bfloat16", BIG, GPU, {"act": "gelu_tanh"}, "triton", "one pass"),
    (
        "gate",
        "bfloat16",
        BIG,
        GPU,
        {"act": "relu"},
        "xla",
        "silu, gelu_tanh, gelu",
    ),
    ("gate", "bfloat16", (2**14 + 1, 2**10), GPU, {"rows": 2}, "xla", "2 rows"),
    ("attention", "bfloat16", Q, GPU, {"call": AUTO, "relative": True}, "xla", "documents"),
    ("attention", "bfloat16", Q, GPU, {"call": ALONE, "relative": True}, "cudnn", "no faster"),
    ("attention", "bfloat16", Q, GPU, {"call": PADDED, "relative": True}, "cudnn", "no faster"),
    ("attention", "bfloat16", Q, GPU, {"call": FIXED, "relative": True}, "xla", "fixed order"),
    ("attention", "bfloat16", Q, CPU, {"call": ALONE, "relative": True}, "xla", NO_GPU),
    ("attention", "float16", Q, HOPPER, {"call": AUTO}, "cudnn", "no faster"),
    ("attention", "float16", Q, HOPPER, {"call": CAPPED}, "cudnn", ""),  # which refuses it
    ("norm", "float16", BIG, GPU, {}, "triton", "one pass"),
    ("gate", "float16", BIG, GPU, {}, "triton", "one pass"),
    ("quantize", "float16", BIG, GPU, OF_XLA, "xla", "no float16"),
    ("experts", "float16", EXPERTS, HOPPER, {"asked": "auto"}, "loop", "not float16"),
    ("grouped_matmul", "float16", EXPERTS, HOPPER, {}, "xla", "not float16"),
    ("grouped_matmul", "bfloat16", EXPERTS, CPU, {}, "xla", NO_GPU),
    ("grouped_matmul", "bfloat16", EXPERTS, GPU, {}, "xla", ""),
    ("grouped_matmul", "bfloat16", EXPERTS, HOPPER, {}, "mosaic", "its own expert"),
    ("activated_matmul", "bfloat16", UP, HOPPER, {"act": "gelu"}, "mosaic", "keep all"),
    ("activated_matmul", "bfloat16", UP, GPU, {"act": "gelu"}, "xla", "Hopper"),
    ("activated_matmul", "bfloat16", UP, CPU, {"act": "gelu"}, "xla", "Hopper"),
    ("activated_matmul", "bfloat16", UP, HOPPER, {"act": "relu"}, "xla", "compute silu"),
    ("activated_matmul", "bfloat16", UP, HOPPER, {"act": "gelu", "plain": False}, "xla", "gate"),
    ("activated_matmul", "float32", UP, HOPPER, {"act": "gelu"}, "xla", "no float32"),
    (
        "activated_matmul",
        "bfloat16",
        (2**14, 768, 1000),
        HOPPER,
        {"act": "gelu"},
        "xla",
        "multiple",
    ),
    ("activated_matmul", "bfloat16", (16389, 768, 3072), HOPPER, {"act": "gelu"}, "xla", "of 8"),
    ("activated_matmul", "bfloat16", (512, 768, 3072), HOPPER, {"act": "gelu"}, "xla", "too few"),
    ("loss_rows", "float32", (16384, 151936), CPU, {"tp": 1}, "xla", NO_GPU),
    ("loss_rows", "float32", (16384, 151936), GPU, {"tp": 1}, "triton", "one read"),
    ("loss_rows", "float32", (16384, 151936), BARE, {"tp": 1}, "xla", "jax-triton"),
    ("loss_rows", "float32", (16384, 151936), GPU, {"tp": 2}, "xla", "tp cuts"),
    ("loss_rows", "float32", (16384, 50257), GPU, {"tp": 1}, "xla", "multiple of 128"),
    ("loss_rows", "float32", (64, 50304), GPU, {"tp": 1}, "xla", "nothing is won"),
    ("loss_rows", "float32", (2**20, 151936), GPU, {"tp": 1, "chunk": 16384}, "xla", "32-bit"),
    ("quantize", "bfloat16", BIG, CPU, OF_XLA, "xla", NO_GPU),
    ("experts", "bfloat16", EXPERTS, CPU, {"asked": "auto"}, "xla", "no GPU"),
    ("experts", "bfloat16", EXPERTS, HOPPER, {"asked": "auto"}, "mosaic", "its own expert"),
    ("experts", "bfloat16", EXPERTS, GPU, {"asked": "auto"}, "loop", "needs a Hopper GPU"),
    ("experts", "float32", EXPERTS, HOPPER, {"asked": "auto"}, "loop", "not float32"),
    ("experts", "bfloat16", (2, 8, 64, 64), HOPPER, {"asked": "auto"}, "loop", "multiple of 8"),
    ("experts", "bfloat16", EXPERTS, HOPPER, {"asked": "loop"}, "loop", "asks for it"),
    ("experts", "bfloat16", EXPERTS, HOPPER, FP8_EXPERTS, "mosaic", "in 8 bits"),
    ("experts", "bfloat16", EXPERTS, GPU, FP8_EXPERTS, "xla", "rounded to 8 bits"),
    ("experts", "bfloat16", (64, 8, 128, 128), HOPPER, FP8_EXPERTS, "xla", "multiple of 128"),
    ("quantize", "bfloat16", BIG, GPU, OF_XLA, "triton", "one pass"),
    ("quantize", "bfloat16", BIG, GPU, OF_TE, "te", "fp8_backend"),
    ("ssd", "bfloat16", (8, 4096, 80, 64), CPU, {"state": 128}, "xla", NO_GPU),
    ("ssd", "bfloat16", (8, 4096, 80, 64), HOPPER, {"state": 128}, "triton", "walks the chunks"),
    ("ssd", "bfloat16", (8, 4096, 80, 64), BARE, {"state": 64}, "xla", "pip install"),
    ("ssd", "float32", (8, 4096, 80, 64), HOPPER, {"state": 128}, "xla", "no float32"),
    ("ssd", "bfloat16", (8, 4096, 80, 80), HOPPER, {"state": 128}, "xla", "multiple of 64"),
    ("ssd", "bfloat16", (8, 4096, 80, 128), HOPPER, {"state": 256}, "xla", "not 256"),
    ("adam_row", "float32", BIG, CPU, {}, "xla", NO_GPU),
    ("adam_row", "float32", BIG, GPU, {}, "triton", "where it lies"),
    ("adam_row", "float32", BIG, BARE, {}, "xla", "pip install"),
    ("nf4", "bfloat16", BIG, CPU, {}, "xla", NO_GPU),
    ("nf4", "bfloat16", BIG, GPU, {}, "triton", "once for its block"),
    ("paged_attention", "bfloat16", (64, 8, 128), CPU, PAGES, "xla", NO_GPU),
    ("paged_attention", "bfloat16", (64, 8, 128), GPU, PAGES, "triton", "where they lie"),
    ("paged_attention", "bfloat16", (64, 8, 128), BARE, PAGES, "xla", "pip install"),
    ("paged_attention", "float32", (64, 8, 128), GPU, PAGES, "xla", "no float32"),
    (
        "paged_attention",
        "bfloat16",
        (64, 8, 96),
        GPU,
        PAGES,
        "xla",
        "keys of 96 with values of 128",
    ),
    ("paged_attention", "bfloat16", (64, 8, 128), GPU, PAGES | {"page": 16}, "xla", "not 16"),
    ("paged_attention", "bfloat16", (64, 8, 128), GPU, PAGES | {"call": ASKED}, "xla", "asks"),
    ("causal_conv", "bfloat16", BIG, CPU, {"taps": 4}, "xla", NO_GPU),
    ("causal_conv", "bfloat16", BIG, GPU, {"taps": 4}, "triton", "one pass"),
    ("causal_conv", "bfloat16", BIG, BARE, {"taps": 4}, "xla", "pip install"),
    ("causal_conv", "bfloat16", BIG, GPU, {"taps": 3}, "xla", "4 taps, not 3"),
    ("causal_conv", "bfloat16", (1, 1024), GPU, {"taps": 4}, "xla", "launch"),
]


@pytest.mark.parametrize("op,dtype,shape,device,facts,name,why", TABLE)
def test_each_op_gets_the_documented_kernel(op, dtype, shape, device, facts, name, why):
    choice = choose(op, jnp.dtype(dtype), shape, device, **facts)
    assert choice.name == name and why in choice.why and choice.why


@pytest.mark.parametrize("name", ["xla", "cudnn", "mosaic", "triton"])
def test_what_is_asked_for_is_not_replaced(name):
    call = AttentionCall(scale=1.0, softcap=30.0, implementation=name)
    for device in (CPU, GPU, HOPPER):
        choice = choose("attention", jnp.bfloat16, Q, device, call=call)
        assert choice == (name, "train.attention asks for it")


@pytest.mark.parametrize(
    "model, mesh, wanted, pairs",
    [
        ("modernbert_base", {}, ["cudnn", "triton"], False),
        ("modernbert_base", {"cp": 2}, ["cudnn", "xla"], False),
        ("vit_l16", {}, ["triton"], True),
        ("clip_vit_l14", {}, ["triton", "triton"], True),
        ("llava_1_5_7b", {}, ["cudnn"], False),
        ("gpt_oss_20b", {}, ["mosaic"], False),
        ("t5_base", {}, ["cudnn"], False),
        ("llava_onevision_0_5b", {}, ["cudnn"], False),
    ],
)
def test_a_dry_run_names_what_each_kind_of_attention_gets(model, mesh, wanted, pairs):
    cfg = load(Path(__file__).parents[3] / f"configs/models/{model}.yaml", ["mesh.dp=1"])
    with believed(HOPPER):
        sizes = dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1) | mesh
        found = attention_choices(cfg, sizes)
        assert reads_pairs(cfg, sizes) == pairs
    assert [choice.name for choice in found.values()] == wanted


def test_a_dry_run_knows_the_mesh_of_a_tower():
    """It has all keys of a row where its own cp is 1, so that our kernel of short rows may run."""
    vision = "model.vision={image_size: 224, patch_size: 14, hidden_size: 1024}"
    path = Path(__file__).parents[3] / "configs/models/llava_1_5_7b.yaml"
    found = []
    for towers in ("{}", "{vision: {tp: 1, cp: 1}}"):
        cfg = load(path, ["mesh.cp=2", "mesh.tp=2", "mesh.dp=1", f"mesh.towers={towers}", vision])
        sizes = dict.fromkeys(("pp", "dp", "ep"), 1) | {"cp": 2, "tp": 2}
        with believed(HOPPER):
            found.append([choice.name for choice in attention_choices(cfg, sizes).values()])
            assert reads_pairs(cfg, sizes) == (towers != "{}")  # the tower's, not Llama's
    assert found == [["cudnn"], ["cudnn", "triton"]]


def test_a_run_lists_every_op_once():
    experts = ["model.layer_pattern=GEMT", "model.moe.num_experts=8"]
    experts += ["model.mamba.mamba_num_heads=4", "model.num_hidden_layers=6"]
    experts += ["model.deltanet={linear_num_key_heads: 2, linear_num_value_heads: 4}"]
    cfg = load(None, ["precision.fp8=delayed", "mesh.dp=1", "data.mock=true", *experts])
    sizes = dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1)
    ops = [op.replace(" ", "_") for op in kernel_choices(cfg, sizes)]
    # No block calls grouped_matmul yet, keys ask for others, nf4 for adapters, and some are for
    # serving.
    serving = {"paged_attention", "channels8", "token_step"}
    by_key = {"attention_in_8_bits", "nf4", "block_matmul"}
    assert sorted(ops) == sorted(RULES.keys() - {"grouped_matmul"} - by_key - serving)
    lines = kernel_lines(cfg, sizes)
    assert len(lines) == len(ops) and lines[0].startswith("kernels     attention: xla, because")


@pytest.mark.parametrize(
    "size, images, memory, name",
    [
        (16384, 64, None, "cudnn"),  # 4 x 16384 x 16 x (80 + 1) x 64 bytes = 5.4 GB
        (16384, 64, 2**37, "cudnn"),
        (16384, 64, 2**34, "xla"),  # of 17 GB; 1024 scores are fewer than 80 x 64 gradients
        (16384, 32, 2**33, "xla"),  # 2.7 GB of 8.6
        (16384, 202, 2**36, "cudnn"),  # 17.16 GB of 68.7, a quarter of which is 17.18
        (16384, 203, 2**36, "xla"),
        (16385, 64, 2**34, "cudnn"),  # no whole chunks: 16385 scores are more than 80 x 64
        (16384, 205, None, "xla"),  # 16384 scores are fewer than 80 x 205
        (65536, 512, 2**37, "xla"),  # 174 GB
    ],
)
def test_scratch_memory_of_packed_images_is_at_most_a_quarter(size, images, memory, name):
    call = AttentionCall(scale=1.0, mask="full", max_documents=images)
    device = Device("gpu", hopper=True, memory=memory)
    found = choose("attention", jnp.bfloat16, (1, size, 16, 80), device, call=call)
    assert found.name == name, found


def test_the_memory_of_a_device_is_rounded_so_that_all_processes_choose_alike():
    near = 138_692_558_848
    assert rounded_memory(near) == rounded_memory(near + 2**28) == 2**37
    assert rounded_memory(2**37 - 1) == 2**36 and rounded_memory(0) is None
    assert rounded_memory(None) is None and this_device().memory is None  # a CPU


def test_a_plan_says_from_how_many_documents_on_attention_gets_another_kernel():
    """The bound is the last power of two whose gradients cuDNN's backward has room for."""
    keys = ["model.hidden_size=4096", "model.attention.num_attention_heads=32", "data.mock=true"]
    keys += ["data.seq_length=8192", "model.max_position_embeddings=8192", "mesh.dp=1"]
    keys += ["train.micro_batch_size=1", "train.global_batch_size=1", "precision.compute=bfloat16"]
    sizes = dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1)
    for device, name, most in (HOPPER, "mosaic", SPARED_SCRATCH), (GPU, "xla", MOST_SCRATCH):
        bound = 1 << (most // (4 * 8192 * 32 * (128 + 1))).bit_length() - 1
        with believed(device):
            (line,) = document_lines(load(None, keys), sizes)
            assert f": {name}, because" in line
            assert line.strip().startswith("attention (full) of rows with more than ")
            if device is HOPPER:
                assert f"more than {bound} documents: mosaic, because cuDNN's backward" in line
            assert line in kernel_lines(load(None, keys), sizes)
            assert document_lines(load(None, [*keys, "data.document_mask=false"]), sizes) == []
    assert document_lines(load(None, keys), sizes) == []  # a CPU has one kernel
