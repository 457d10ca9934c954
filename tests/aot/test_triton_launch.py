"""Triton kernels that XLA launches itself, compiled for an H200: they are kernels of its own, and
the code is what jax-triton would give it."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.base.triton_ptx import without_sources
from mjax.kernels.elementwise.adam import AdamNumbers, Betas, row_update
from mjax.kernels.elementwise.norm import measured_rows
from mjax.kernels.fp8.channels import ChannelTile, multiply_few
from mjax.kernels.recurrence.gated_delta_fused import states_of
from mjax.plan.absent_devices import as_on, compiler_devices
from tests.aot.common import H200, missing

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

KERNELS = "round_rows", "multiply_channels", "update_row", "delta_states"


def step(x, weight, scales, stacks, grad, chunks, state):
    """A product of 8 bits in two kernels, a row of AdamW in place, and a walk over 3 chunks.

    Their shared memory is above 48 KiB in the product; the walk is given a number, no constant.
    """
    number = jnp.float32(1)
    numbers = AdamNumbers(number, number, number, jnp.int32(1), number > 0)
    y = multiply_few(x, weight, scales, ChannelTile(stages=6))
    new = row_update(stacks, grad, 1, numbers, Betas(0.9, 0.95, 1e-8))
    return y, new, states_of(SimpleNamespace(**chunks), state)


def arguments():
    one = SingleDeviceSharding(compiler_devices(H200, 1)[0])

    def array(shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    tokens = 1, 3, 64, 2  # rows, chunks, tokens, heads
    chunks = {name: array((*tokens, 64), "bfloat16") for name in ("values", "readers", "writers")}
    product = array((2, 1024), "bfloat16"), array((128, 1024), "float8_e4m3fn"), array((128,))
    rows = [array((4, 1000))] * 3, array((1000,))
    return *product, *rows, chunks | {"left": array((1, 3, 2))}, array((1, 2, 64, 64))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The compiled program's text and the folder with XLA's list of what it launches."""
    folder = tmp_path_factory.mktemp("dump")
    with pytest.MonkeyPatch.context() as patch, as_on(H200):
        patch.setenv("MJAX_TRITON_LAUNCH", "xla")
        lowered = jax.jit(step, donate_argnums=3).lower(*arguments())
        made = lowered.compile(compiler_options={"xla_dump_to": str(folder)})
    return made.as_text(), folder


def test_xla_launches_each_kernel_itself(compiled):
    text, folder = compiled
    (launches,) = (file.read_text() for file in folder.glob("*thunk_sequence.txt"))
    for name in KERNELS:
        assert len(re.findall(rf"kCustomKernel .*\b{name} grid", launches)) == 1, launches
    assert "kCustomCall" not in launches
    assert max(int(n) for n in re.findall(r"shared_memory: (\d+) bytes", launches)) > 48 * 1024
    row = re.search(r"custom-call\(.*/update_row/triton_kernel_call.*", text)[0]
    assert "{0}: (0, {}), {1}: (1, {}), {2}: (2, {})" in row  # outputs in the place of inputs
    assert not re.search(r"= f32\[4,1000\]\S* copy\(", text)


def test_the_code_is_that_of_jax_triton(compiled, monkeypatch, tmp_path):
    """But for sources' names and parameters: a pointer for each array that XLA passes."""
    from jax_triton import triton_lib

    compile_inplace, theirs = triton_lib.compile_ttir_to_ptx_inplace, {}

    def watched(*args):
        made = compile_inplace(*args)
        theirs[made.name] = made.binary, made.shared_mem_bytes
        return made

    monkeypatch.setenv("MJAX_TRITON_LAUNCH", "jax-triton")
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", watched)
    with as_on(H200):
        jax.jit(lambda *given: step(*given)).lower(*arguments())  # traced anew
    ours = {}
    for line in re.findall(r"custom-call\(.*/triton_kernel_call.*", compiled[0]):
        ptx = re.search(r'kernel_data = "(.*?)", grid_x', line)[1]
        ptx = ptx.encode().decode("unicode_escape")
        name = re.search(r"\.entry (\w+)\(", ptx)[1]
        shared = int(re.search(r"shared_mem_bytes = (\d+)", line)[1])
        places = re.search(r"output_indices = \[(.*?)\]", line)[1].split(", ")
        assert int(places[-1]) == ptx.count(".param .u64") - 1
        ours[name] = ptx, shared
    assert set(ours) == set(theirs) == set(KERNELS)
    for name, (ptx, shared) in ours.items():
        assert "mjax" not in ptx
        assemble(ptx, tmp_path / f"{name}.ptx")
        if name not in ("update_row", "delta_states"):  # whose parameters differ
            old = without_sources(theirs[name][0])
            assert body(ptx) == body(old) and shared == theirs[name][1]


def test_no_output_comes_after_one_in_the_place_of_an_input(monkeypatch):
    """jax-triton passes no pointer to the latter, but counts it: the former would be lost in it."""
    monkeypatch.setenv("MJAX_TRITON_LAUNCH", "jax-triton")
    one = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    x, gain = (jax.ShapeDtypeStruct(s, "bfloat16", sharding=one) for s in ((64, 256), (256,)))
    with as_on(H200):
        text = jax.jit(lambda x, gain: measured_rows(x, gain, 1e-5)).lower(x, gain).as_text()
    (aliased,) = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = 1", text)
    assert aliased == "2", text


@pytest.mark.parametrize("launch", ["jax-triton", "xla"])
def test_xla_takes_no_slice_into_a_kernel_that_writes_to_an_input(launch, monkeypatch):
    """Of a loop's arrays: there the output in an input's place is another, which nothing writes."""

    def layer(x, gain):
        y, stream, _ = measured_rows(x, gain, 1e-5)
        return y, stream

    def again(total, saved):
        return total + sum(measured_rows(*saved, 1e-5)[:2]), None

    def loops(x, gains):
        y, saved = jax.lax.scan(layer, x, gains)
        return jax.lax.scan(again, y, (saved, gains))[0]

    monkeypatch.setenv("MJAX_TRITON_LAUNCH", launch)
    one = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    shapes = (64, 256), (5, 256)
    x, gains = (jax.ShapeDtypeStruct(s, "bfloat16", sharding=one) for s in shapes)
    with as_on(H200):
        text = jax.jit(loops).lower(x, gains).compile().as_text()
    calls = re.findall(r"custom-call\(.*output_to_operand_aliasing=.*rmsnorm_forward", text)
    assert len(calls) == 2
    for fused in re.findall(r"^%dynamic-slice-fusion.*?^}", text, re.M | re.S):
        assert "output_to_operand_aliasing" not in fused


def body(ptx: str) -> str:
    """Instructions, without labels of debuggers."""
    return re.sub(r"^\$L__(tmp|func)\w+:\n", "", ptx[ptx.index("\n{") :], flags=re.M)


def assemble(ptx: str, file: Path) -> None:
    """Fails where the ptxas of jax's wheels does not take the PTX."""
    (folder,) = find_spec("nvidia.cu13").submodule_search_locations
    file.write_text(ptx)
    command = [f"{folder}/bin/ptxas", "-arch=sm_90a", str(file), "-o", "/dev/null"]
    subprocess.run(command, check=True, capture_output=True, text=True)
