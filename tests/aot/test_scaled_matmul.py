"""MXFP8 and NVFP4 compiled for a described B200: cuDNN's scaled product in all three places."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.fp8.block_recipes import MxFp8, NvFp4
from mjax.plan.absent_devices import as_on, compiler_devices
from mjax.plan.chips import named_chips
from tests.aot.common import H200, compile_step, missing
from tests.marks import exhaustive
from tests.unit.kernels.test_scaled_matmul import three_products

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

B200 = named_chips()["b200"]
SCALED = re.compile(r"\((\w+)\[1,(\d+),(\d+)\].* custom-call\((.*)\), .*__cudnn\$blockScaledDot")
PRODUCTS = re.compile(r"__cublas|__triton_gemm|gemm_fusion| dot\(")


def compiled(chip, recipe, m: int, k: int, n: int) -> str:
    """The text of the three products of x [m, k] and a weight [k, n] in bf16, for one chip."""
    where = SingleDeviceSharding(compiler_devices(chip, 1)[0])
    half, full = jnp.bfloat16, jnp.float32
    arrays = ((m, k), half), ((k, n), half), ((m, n), half), ((k, n), full)
    described = [jax.ShapeDtypeStruct(*a, sharding=where) for a in arrays]
    with as_on(chip):
        program = jax.jit(lambda *a: three_products(recipe, *a)).lower(*described).compile()
    return program.as_text()


@pytest.mark.parametrize("recipe", [MxFp8(), MxFp8("e5m2"), NvFp4()])
def test_a_b200_multiplies_scaled_blocks_in_all_three_products(recipe):
    """Of sizes that are no multiples of a tile, which XLA fills up with zeros."""
    text = compiled(B200, recipe, 1000, 480, 368)
    found = [(dtype, int(m), int(n)) for dtype, m, n, _ in SCALED.findall(text)]
    is_four = isinstance(recipe, NvFp4)
    half = "f32" if is_four else "bf16"  # NVFP4 is divided by the tensors' scales in fp32
    assert sorted(found) == sorted([(half, 1024, 384), (half, 1024, 512), ("f32", 512, 384)])
    codes = set(re.findall(r"(f[48]e\w+)\[1,\d+,\d+\]", text))
    others = {"f8e5m2"} if recipe.gradients == "e5m2" else set()
    scales = "f8e4m3fn" if is_four else "f8e8m0fnu"
    assert codes == {"f4e2m1fn" if is_four else "f8e4m3fn", scales} | others
    # The Hadamard transform is a product of its own.
    assert is_four or not PRODUCTS.search(text)


def test_an_h200_does_not():
    """Its compiler takes the same call apart, so the choice must not make it."""
    text = compiled(H200, MxFp8(emulates=True), 256, 128, 256)
    assert not SCALED.search(text) and PRODUCTS.search(text)


@exhaustive
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_step_over_tp_multiplies_scaled_blocks(recipe):
    """q, kv, out, up and down, three products each, within the program's shard_map."""
    keys = "model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "mesh.tp=2"
    rows = "train.unroll=1", "train.micro_batch_size=1", "train.global_batch_size=1"
    more = f"precision.fp8={recipe}", "train.remat=none", "mesh.tp_overlap=never"
    with as_on(B200):
        path = "configs/models/llama3_8b.yaml"
        made = compile_step(path, *keys, *rows, *more, chip=B200)
    assert made.calls("__cudnn$blockScaledDot") == 5 * 3
