"""Gate: the optimizer in H200 programs: one pass a leaf, moments of the host by slices."""

import functools
import math
import re

import pytest

from mjax.kernels.base.chooser import Device, believed
from tests.aot.common import Compiled, compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LLAMA = "configs/models/llama3_8b.yaml"
SMALL = ["model.num_hidden_layers=2", "mesh.dp=1", "train.remat=full", "train.micro_batch_size=1"]
LOW = [
    "precision.params=bfloat16",
    "optimizer.mu_dtype=bfloat16",
    "optimizer.nu_dtype=bfloat16",
    "optimizer.stochastic_rounding=true",
]


def large(text: str, scope: str = "") -> list[list[str]]:
    """For each kernel of the main program that writes arrays of a million elements: their types."""
    entry = text[text.index("ENTRY ") :]
    found = []
    for line in re.findall(rf"= (.*?) fusion\(.*?op_name=\"[^\"]*{scope}", entry):
        arrays = re.findall(r"(\w+)\[([\d,]+)\]", line)
        big = [k for k, dims in arrays if math.prod(map(int, dims.split(","))) >= 1e6]
        found += [big] if big else []
    return found


@pytest.mark.parametrize(("overrides", "kind"), [([], "f32"), (LOW, "bf16")])
@pytest.mark.parametrize("batch", [1, 2])  # micro-batches: gradients a layer each, or summed
def test_a_leaf_is_updated_in_one_pass(overrides, kind, batch):
    """Masters and moments come out of one kernel; random bits are in it and nowhere else."""
    rest = ["optimizer.offload=false", f"train.global_batch_size={batch}"]
    made = compile_step(LLAMA, *SMALL, *rest, *overrides)
    leaves = ("q", "kv", "out", "up", "down", "embedding", "head")
    assert large(made.text, "/optimizer/") == [[kind] * 3] * len(leaves)
    assert not any("u32" in kinds for kinds in large(made.text))


@exhaustive
@pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_stacks_are_updated_where_they_lie(batch):
    """A call of our kernel a layer and matmul weight; nothing else writes a stack or copies one."""
    with believed(Device("gpu", hopper=True, triton=True)):
        rest = ["optimizer.offload=false", f"train.global_batch_size={batch}"]
        made = compile_step(LLAMA, *SMALL, *rest)
    matrices, layers, tables = 5, 2, 2
    calls = re.findall(r"custom-call\(.*update_row/triton_kernel_call", made.text)
    assert len(calls) == matrices * layers
    assert large(made.text, "/optimizer/") == [["f32"] * 3] * tables
    entry = made.text[made.text.index("ENTRY ") :]
    assert not re.search(r"= f32\[2,4096,[\d,]+\]\S* (?:copy|fusion)\(", entry)


ROLLED = [*SMALL, "train.global_batch_size=2", "train.unroll=1"]


@functools.cache
def here() -> Compiled:
    """With AdamW's moments on the device: three arrays of the parameters' size."""
    return compile_step(LLAMA, *ROLLED, "optimizer.offload=false")


@exhaustive
def test_host_moments_pass_through_the_device_slice_by_slice():
    away = compile_step(LLAMA, *ROLLED, "optimizer.offload=true")
    masters = here().arguments / 3
    assert away.arguments == pytest.approx(masters, rel=1e-3)
    assert away.host_arguments == pytest.approx(2 * masters, rel=1e-3) == away.host_aliased
    assert away.host == 0, "no copy of the moments on the host"
    assert away.aliased >= 0.999 * masters
    layer = 4 * 4096 * 2 * 14336
    assert away.temp < here().temp + 4 * layer  # less than a moment of the embedding
    for op in ("dynamic-slice", "dynamic-update-slice"):
        assert re.search(rf"{op}\S* = \(+[^=]*S\(5\)[^=]*fusion-start", away.text), op


@exhaustive
@pytest.mark.parametrize(
    ("name", "args", "arrays"),
    [("sgd", "{momentum: 0.9}", 2), ("lion", "{}", 2), ("adabelief", "{}", 3)],
)
def test_a_leaf_is_transformed_in_one_pass(name, args, arrays):
    """By optax's functions as by our own AdamW: parameter and moments come out of one kernel."""
    rest = ["optimizer.offload=false", "train.global_batch_size=1"]
    by_name = [f"optimizer.name=optax.{name}", f"optimizer.args={args}"]
    made = compile_step(LLAMA, *SMALL, *rest, *by_name)
    leaves = ("q", "kv", "out", "up", "down", "embedding", "head")
    assert large(made.text, "/optimizer/") == [["f32"] * arrays] * len(leaves)


@exhaustive
def test_a_transformation_s_moment_on_the_host_passes_slice_by_slice():
    away = compile_step(LLAMA, *ROLLED, "optimizer.name=optax.lion", "optimizer.offload=true")
    masters = here().arguments / 3
    assert away.arguments == pytest.approx(masters, rel=1e-3)
    assert away.host_arguments == pytest.approx(masters, rel=1e-3) == away.host_aliased
    assert away.host == 0, "no copy of the moments on the host"
