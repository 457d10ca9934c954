"""Each known clash of drivers, libraries and systems is one line; sound machines have none."""

import sys
from dataclasses import replace

import pytest

from mjax import cli
from mjax.doctor import __main__ as command
from mjax.doctor import clashes
from mjax.doctor.clashes import (
    Installed,
    clashes_of,
    installed,
    line_on_error,
    notes_of,
    unused_gpus,
)

WELL = Installed(
    gpus=8,
    plugin=13,
    driver_cuda=(13, 0),
    glibc=(2, 36),
    needed_glibc=(2, 27),
    cudnn=(9, 28, 1),
    needed_cudnn=(9, 12, 0),
    packages={"jax-cuda13-plugin": "0.11.2", "nvidia-cudnn-cu13": "9.28.1.4"},
)
TORCH = {"torch": "2.9.0", "nvidia-cudnn-cu12": "9.10.2.21"}
WRONG = {
    "glibc 2.17 is too old, JAX's wheels need 2.27": {"glibc": (2, 17)},
    "8 NVIDIA GPUs are here, but JAX's CUDA plugin is not: pip install 'mjax": {"plugin": None},
    "no NVIDIA driver (libcuda.so.1 is not found): install version 580": {"driver_cuda": None},
    "the driver is for CUDA 12.4, JAX's plugin for CUDA 13: update": {"driver_cuda": (12, 4)},
    "nvidia-cudnn-cu12 and -cu13 are both installed": {"packages": {**WELL.packages, **TORCH}},
    "cuDNN 9.1.0 is older than 9.12.0, with which JAX's plugin was": {"cudnn": (9, 1, 0)},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_clash_is_one_line_with_the_remedy(words):
    (line,) = clashes_of(replace(WELL, **WRONG[words]))
    assert words in line and "\n" not in line


def test_machines_that_are_well_have_no_clash():
    laptop = Installed(glibc=(2, 36), needed_glibc=(2, 27))
    newer = replace(WELL, driver_cuda=(14, 1), cudnn=(10, 0, 0), glibc=(3, 0))
    assert not [*clashes_of(WELL), *clashes_of(laptop), *clashes_of(newer), *notes_of(WELL)]


def test_torch_is_named_where_it_pins_cudnn():
    packages = {**WELL.packages, "torch": "2.9.0"}
    (line,) = clashes_of(replace(WELL, cudnn=(9, 1, 0), packages=packages))
    assert "give torch a virtual environment of its own" in line


def test_libraries_of_the_search_path_are_noted(tmp_path, monkeypatch):
    cuda, other = tmp_path / "cuda", tmp_path / "other"
    for file in (cuda / "libcudnn_ops.so.9", other / "libssl.so.3"):
        file.parent.mkdir()
        file.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{other}:{tmp_path / 'none'}::{cuda}")
    found = installed()
    assert dict(found.earlier) == {str(cuda): "libcudnn_ops.so.9"}
    (line,) = notes_of(found)
    assert line.startswith(f"LD_LIBRARY_PATH has libcudnn_ops.so.9 in {cuda}")


def test_this_machine_is_read():
    found = installed()
    assert found.packages["jax"] and found.glibc >= found.needed_glibc >= (2, 17)
    if found.plugin is not None:
        assert found.needed_cudnn >= (9, 0) and found.cudnn >= found.needed_cudnn


def test_gpus_that_jax_does_not_use_are_said(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(clashes, "installed", lambda: replace(WELL, driver_cuda=(12, 4)))
    assert unused_gpus("cpu").startswith("the driver is for CUDA 12.4") and not unused_gpus("gpu")
    monkeypatch.setattr(clashes, "installed", lambda: WELL)
    assert "JAX runs on the CPU, though GPUs are here" in unused_gpus("cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # as asked
    assert not unused_gpus("cpu")


SAID = [
    "/lib64/libc.so.6: version `GLIBC_2.27' not found (required by jaxlib/xla_extension.so)",
    "libcuda.so.1: cannot open shared object file: No such file or directory",
    "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
    "Loaded runtime CuDNN library: 9.1.0 but source was compiled with: 9.12.0",
    "FAILED_PRECONDITION: DNN library initialization failed.",
    "CUDA driver version is insufficient for CUDA runtime version",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
]


@pytest.mark.parametrize("said", SAID)
def test_an_error_of_a_clash_is_one_line_of_any_command(said, monkeypatch, capsys):
    def main():
        raise RuntimeError(said + "\nmore\nlines")

    monkeypatch.setattr(command, "main", main)
    monkeypatch.setattr(sys, "argv", ["mjax", "doctor"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    line = capsys.readouterr().err
    assert end.value.code == 2 and len(line.splitlines()) == 1 and said in line


def test_other_errors_keep_their_traceback():
    assert line_on_error(RuntimeError("shapes differ")) == ""
