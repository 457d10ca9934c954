"""Plans for devices that this machine lacks: `--dry-run --on NAME:COUNT`."""

import contextlib
import io
import sys

import jax
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.plan.absent_devices import (
    as_on,
    compiler_target,
    compiler_told,
    described_devices,
    parse_described,
)
from mjax.plan.auto import device_memory
from mjax.plan.chips import CHIPS, chip_of_kind, named_chips
from mjax.plan.hlo_collectives import exchange_lines, read_exchanges
from mjax.run import dry_run as dry_run_module
from mjax.run.dry_run import dry_run
from mjax.train.__main__ import main
from tests.marks import slow

LLAMA = "configs/models/llama3_8b.yaml"


TINY = ["data.mock=true", "model.hidden_size=64", "model.num_hidden_layers=1"]


def plan(on: str, *overrides: str, path: str | None = LLAMA, compiles: bool = False) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        dry_run(load(path, overrides), parse_described(on), compiles)
    return said.getvalue()


def test_a_plan_is_that_of_the_described_devices():
    text = plan("h200:8")
    assert "pp=1 x dp=8 x ep=1 x cp=1 x tp=1: 8 x NVIDIA H200" in text
    assert "train.remat=none optimizer.offload=false: fits 132 GB" in text
    assert "attention: cudnn" in text and "there is no GPU" not in text
    assert "(of 138.7 that JAX may use)" in text
    assert "time        estimate" in text and "weights and gradients over dp:" in text
    assert "compiled    not: --no-compile" in text
    assert "not measured" not in text and "between nodes" not in text


@slow
def test_auto_is_decided_by_the_memory_of_the_described_device():
    assert "optimizer.offload=true" in plan("h200:1", "train.global_batch_size=8")
    mesh = plan("h100:64", "mesh=auto", "model.num_hidden_layers=4")
    assert "that fits 75 GB a device" in mesh and "64 x NVIDIA H100" in mesh
    assert "an H200's shares of the peak, not measured" in mesh
    assert "network between nodes: 50 GB/s a GPU, an assumption" in mesh


def test_a_plan_leaves_this_machine_as_it_was():
    before = chooser.this_device()
    with_memory_kind = jax.sharding.NamedSharding.with_memory_kind
    with pytest.raises(UserError), as_on(named_chips()["b200"]):
        triton, is_new = chooser.has_triton(), jax.__version_info__ >= (0, 11)
        assert chooser.this_device() == chooser.Device(
            "gpu", triton=triton, blackwell=is_new, memory=2**37
        )
        raise UserError("a mistake")
    assert chooser.this_device() == before
    assert jax.sharding.NamedSharding.with_memory_kind is with_memory_kind


def test_programs_of_this_machine_run_while_others_are_compiled_for_described_devices():
    """An optimizer by name is tried on numbers before its programs are traced."""
    with compiler_told((9, 0)):
        assert jax.jit(lambda x: 3 * x + 1)(2.0) == 7


def test_an_a100_has_no_fp8():
    with pytest.raises(UserError, match="compute capability 8.0, FP8 needs"):
        plan("a100:8", "precision.fp8=delayed", "model.num_hidden_layers=1")


@pytest.mark.parametrize(
    "text,words",
    [
        ("h201:8", "no GPU called h201 is known; use one of b200, h200, h100, a100"),
        ("h200", "not of the form NAME:COUNT"),
        ("h200:", "not of the form"),
        ("h200:-1", "not of the form"),
        ("h200:8x8", "not of the form"),
        ("h200:0", "the count must be 1 to 16,384"),
        ("h200:999999999", "the count must be 1 to 16,384"),
        ("h200:99999999999999999999", "not of the form"),
        ("h200:12", "a node has 8 of them, so more must be a multiple of 8"),
    ],
)
def test_devices_that_cannot_be_are_one_line(text, words):
    with pytest.raises(UserError, match=words) as error:
        parse_described(text)
    assert f"--on {text}: " in str(error.value) and "\n" not in str(error.value)


def test_a_count_that_the_mesh_does_not_divide_is_one_line():
    with pytest.raises(UserError, match="make 3, which does not divide the 8 devices"):
        plan("h200:8", "mesh.pp=3", "mesh.pipeline_layout='Et*11|t*11|t*10L'")


def test_every_described_chip_is_found_by_its_own_kind():
    for name, chip in named_chips().items():
        assert chip_of_kind(chip.kind) is chip and chip.details.usable < chip.details.memory
        devices = described_devices(parse_described(f"{name}:16"))
        assert [d.process_index for d in devices] == [0] * 8 + [1] * 8
        assert device_memory(devices) == chip.details.usable
        assert f'"{chip.kind}"' in compiler_target(chip)
    assert [chip.kind for chip in CHIPS if chip.details and chip.name is None] == []


def test_jax_s_fraction_of_memory_is_the_environment_s(monkeypatch):
    details = named_chips()["h200"].details
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert details.usable == pytest.approx(138.7e9, rel=1e-3)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert details.usable == details.memory // 2
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "half")
    with pytest.raises(UserError, match="'half' is not a number"):
        details.usable  # noqa: B018


def test_what_the_compiler_refuses_is_one_line(monkeypatch):
    def refuse(trainer):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such kernel\nmore")

    monkeypatch.setattr(dry_run_module, "compiled_lines", refuse)
    monkeypatch.setattr(dry_run_module, "cannot_compile", lambda: None)
    text = plan("h200:1", *TINY, compiles=True, path=None)
    assert "compiled    not: the compiler says UNIMPLEMENTED: no such kernel\n" in text


@pytest.mark.parametrize("option", [["--on", "h200:8"], ["--on", ""], ["--no-compile"]])
def test_a_run_takes_no_option_of_a_plan(option, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "data.mock=true", *option])
    with pytest.raises(UserError, match=f"{option[0]} is for a plan.* add --dry-run"):
        main()


HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %rs = f32[2,4]{1,0} reduce-scatter(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %cp-start = (bf16[8,4], bf16[8,4]) collective-permute-start(%y), source_target_pairs={{0,1},{2,3}}
  %mm = bf16[8,4] custom-call(%y, %z), custom_call_target="__cublas$gemm"
  %cp-done = bf16[8,4]{1,0} collective-permute-done(%cp-start)
}

%cond (p: (s32[], bf16[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[4,4]) -> bf16[8,4] {
  %ag-start = (bf16[4,4], bf16[8,4]) all-gather-start(%a), replica_groups={{0,2},{1,3}}
  %other = bf16[8,4] fusion(%a), kind=kLoop, calls=%add
  %ag-done = bf16[8,4]{1,0} all-gather-done(%ag-start)
  %loop = (s32[], bf16[8,4]) while(%t), condition=%cond, body=%body, KNOWN_TRIPS
  ROOT %ar = (f32[], f32[3]) all-reduce(%l, %m), BY_NAME, to_apply=%add
}
"""
KNOWN_TRIPS = 'backend_config={"known_trip_count":{"n":"5"}}'
BY_NAME = "replica_groups=mesh['dp'=2,'tp'=2] {'dp','tp'}"


def test_exchanges_are_read_with_axes_bytes_loops_and_what_hides_them():
    text = HLO.replace("KNOWN_TRIPS", KNOWN_TRIPS).replace("BY_NAME", BY_NAME)
    found = {e.op: e for e in read_exchanges(text, {"dp": 2, "tp": 2})}
    facts = {op: (e.axes, e.bytes, e.times, e.exposed) for op, e in found.items()}
    assert facts == {
        "all-gather": (("dp",), 64, 1, True),  # a fusion without a matmul hides nothing
        "reduce-scatter": (("dp",), 2 * 32, 5, True),
        "collective-permute": (("tp",), 64, 5, False),
        "all-reduce": (("dp", "tp"), 16, 1, True),
    }
    lines = exchange_lines(list(found.values()))
    assert lines[0] == "compiled    exposed: reduce-scatter over dp, 5 a step, 0.0 MB"
    assert any("hidden under matmuls: collective-permute over tp, 5 a step" in x for x in lines)
