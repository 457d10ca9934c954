"""The kernels of 128-blocks compile for H200: registers do, nothing is copied in between."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.fp8.block_recipes import Block128, TwoRoundings
from mjax.kernels.fp8.blocks import Blocks
from mjax.models.base.weight import Weight, matmul
from mjax.plan.absent_devices import as_on, compiler_devices
from tests.aot.common import H200, compile_step, missing
from tests.aot.test_grouped import SMALL, compiled
from tests.marks import exhaustive, slow

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
M, K, N = 8192, 4096, 14336


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=slow)])
def test_products_spill_nothing(monkeypatch, capfd, dtype):
    """Forward, gradient of the input, and of the weight, of gradients in either format."""
    from mjax.kernels.fp8.block_mosaic import multiply_on_hopper

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")

    def product(a, a_factors, b, b_factors, square):
        right = (128, 128) if square else (1, 128)
        left = Blocks(a, a_factors.T, block=(1, 128))
        return multiply_on_hopper(left, Blocks(b, b_factors, block=right), dtype)

    def square(*operands):
        return product(*operands, True)

    def lines(a, a_factors, b, b_factors):
        return product(a, a_factors, b, b_factors.T, False)

    fp32 = jnp.float32
    forward = [((M, K), E4M3), ((K // 128, M), fp32), ((N, K), E4M3), ((N // 128, K // 128), fp32)]
    back = [((M, N), E5M2), ((N // 128, M), fp32), ((K, N), E4M3), ((K // 128, N // 128), fp32)]
    x, g = [((K, M), E4M3), ((M // 128, K), fp32)], [((N, M), E5M2), ((M // 128, N), fp32)]
    programs = [compiled(square, *forward), compiled(square, *back), compiled(lines, *x, *g)]
    for program in programs:
        assert program.as_text().count('custom_call_target="mosaic_gpu') == 1
        assert program.memory_analysis().temp_size_in_bytes == 0
    said = capfd.readouterr()
    text = said.out + said.err
    types = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k32)\.f32\.(\w+)\.(\w+)", text)
    e4m3, e5m2 = "e4m3", "e5m2"
    assert set(types) == {("m64n192k32", *f) for f in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2))}
    spilled = re.findall(r"stack frame, (\d+) bytes spill stores", text)
    assert len(spilled) == len(programs) and not any(map(int, spilled))
    assert "C7510" not in text  # the compiler would have made wgmma wait for each other


def test_a_weight_s_gradient_is_added_to_its_sum_in_place():
    recipe = Block128()

    def add(x, of_x, g, of_g, total):
        x8, g8 = Blocks(x, of_x.T, block=(1, 128)), Blocks(g, of_g.T, block=(1, 128))
        zeros = jnp.zeros(2)
        both = TwoRoundings(None, x8, zeros), TwoRoundings(None, g8, zeros)
        return recipe.weight_gradient(*both, jnp.float32, total)

    x, g = (((n, M), E4M3) for n in (K, N))
    of_x, of_g = (((M // 128, n), jnp.float32) for n in (K, N))
    program = compiled(add, x, of_x, g, of_g, ((K, N), jnp.float32), donate_argnums=4)
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 1
    memory = program.memory_analysis()
    assert (memory.alias_size_in_bytes, memory.temp_size_in_bytes) == (4 * K * N, 0)


# rows, experts, inputs, outputs: Mixtral's, and those of Qwen3-30B-A3B
EXPERTS = [(16384, 8, 4096, 14336), (65536, 128, 2048, 768)]


@pytest.mark.parametrize("shape", [EXPERTS[0], pytest.param(EXPERTS[1], marks=exhaustive)])
@slow
def test_products_of_experts_are_one_call_each_and_copy_nothing(monkeypatch, capfd, shape):
    """Forward, both gradients, and a weight's gradient added to its sum in place."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    m, experts, k, n = shape
    padded = m + 128 * (experts + 1)
    counts, bf16 = ((experts,), jnp.int32), jnp.bfloat16

    def rows(a, of_a, b, of_b, sizes):
        from mjax.kernels.fp8.block_mosaic import multiply_rows_of_groups

        left, right = Blocks(a, of_a.T, block=(1, 128)), Blocks(b, of_b, block=(128, 128))
        return multiply_rows_of_groups(left, right, sizes, bf16)

    def gradient(x, of_x, g, of_g, sizes, total=None):
        from mjax.kernels.fp8.block_mosaic import weight_gradient_of_groups

        left, right = Blocks(x, of_x.T, block=(1, 128)), Blocks(g, of_g.T, block=(1, 128))
        return weight_gradient_of_groups(left, right, sizes, bf16, total)

    def lines(r, c, dtype):
        return ((r, c), dtype), ((c // 128, r), jnp.float32)

    def squares(r, c):
        return ((experts, r, c), E4M3), ((experts, r // 128, c // 128), jnp.float32)

    x, g = lines(k, padded, E4M3), lines(n, padded, E5M2)
    total = (experts, k, n), jnp.float32
    programs = [
        compiled(rows, *lines(m, k, E4M3), *squares(n, k), counts),
        compiled(rows, *lines(m, n, E5M2), *squares(k, n), counts),
        compiled(gradient, *x, *g, counts),
        compiled(gradient, *x, *g, counts, total, donate_argnums=5),
    ]
    for program in programs:
        assert program.as_text().count('custom_call_target="mosaic_gpu') == 1
        assert program.memory_analysis().temp_size_in_bytes < SMALL
    assert programs[-1].memory_analysis().alias_size_in_bytes == 4 * experts * k * n
    told = capfd.readouterr()
    spilled = re.findall(r"stack frame, (\d+) bytes spill stores", told.out + told.err)
    assert len(spilled) == len(programs) and max(map(int, spilled)) <= 4
    assert "C7510" not in told.out + told.err


def test_a_matmul_is_seven_calls_and_copies_nothing():
    """Three products; x, its gradient and the weight, for each way, are rounded in a pass each."""
    where = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    shapes = (M, K), (K, N), (M, N)
    x, w, g = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where) for s in shapes)

    def all_three(x, w, g):
        scales = jnp.zeros(3)
        y, pull = jax.vjp(lambda x, w: matmul(x, Weight(w, scales=scales, recipe=Block128())), x, w)
        return y, *pull(g)

    with as_on(H200):
        text = jax.jit(all_three).lower(x, w, g).compile().as_text()
    assert calls(text) == {"mosaic": 3, "round_lines_both_ways": 2, "round_squares": 2}
    large = re.findall(
        r"= (?:bf16|f32|f8\w+)\[\d{4,},\d{4,}\]\S* (?:copy|transpose|fusion)\(", text
    )
    assert not large


def calls(text: str) -> Counter:
    found = Counter(re.findall(r"custom-call\(.*\b(round_\w+)\)*/triton_kernel_call", text))
    return found + Counter({"mosaic": text.count('custom_call_target="mosaic_gpu')})


@exhaustive
def test_a_step_multiplies_blocks_by_our_kernels():
    keys = "model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "train.unroll=1"
    rows = "train.micro_batch_size=1", "train.global_batch_size=1"
    with as_on(H200):
        made = compile_step("configs/models/llama3_8b.yaml", *keys, *rows, "precision.fp8=block128")
    assert calls(made.text)["mosaic"] >= 5 * 3 - 2  # q, kv, out, up, down, in a loop
    assert made.calls("__cublas$lt$matmul") == 3, "the head's alone may be of 16 bits"
