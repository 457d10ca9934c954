"""Which ptxas makes machine code of Triton kernels: that of jax's own wheels, or a clear line."""

import importlib.util
import os
import shutil
from types import SimpleNamespace

import pytest

from mjax.errors import UserError
from mjax.kernels.base import triton_call
from mjax.kernels.base.triton_call import prefer_own_ptxas


def write_ptxas(folder, version):
    folder.mkdir(parents=True)
    file = folder / "ptxas"
    file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Give the system and a wheel a ptxas of these versions (None: none); no other is found."""
    monkeypatch.setattr(triton_call, "_INSTALLED", ())

    def make(system, wheel):
        if system is not None:
            write_ptxas(tmp_path / "system", system)
        if wheel is not None:
            write_ptxas(tmp_path / "wheel" / "bin", wheel)
        places = SimpleNamespace(submodule_search_locations=[str(tmp_path / "wheel")])
        found = {"nvidia": places, "nvidia.cu13": places if wheel else None}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name])
        monkeypatch.setenv("PATH", f"{tmp_path / 'system'}{os.pathsep}/nowhere")

    return make


@pytest.mark.parametrize("system", ["12.4", "13.0", None])
def test_the_wheels_ptxas_comes_first(machine, system, tmp_path):
    machine(system, "13.5")
    prefer_own_ptxas.__wrapped__()
    assert shutil.which("ptxas") == str(tmp_path / "wheel" / "bin" / "ptxas")
    assert os.environ["PATH"].endswith("/nowhere")


def test_without_a_wheel_a_system_of_cuda_13_serves(machine, tmp_path):
    machine("13.0", None)
    prefer_own_ptxas.__wrapped__()
    assert shutil.which("ptxas") == str(tmp_path / "system" / "ptxas")


@pytest.mark.parametrize(("system", "wheel"), [("12.9", None), (None, "12.8")])
def test_an_older_one_is_one_line_with_both_versions_and_the_remedy(machine, system, wheel):
    machine(system, wheel)
    with pytest.raises(UserError) as error:
        prefer_own_ptxas.__wrapped__()
    line = str(error.value)
    assert "\n" not in line and "PTX 9.0" in line and f"CUDA {system or wheel}" in line
    assert "pip install 'nvidia-cuda-nvcc>=13,<14'" in line


def test_none_at_all_is_left_to_xla(machine):
    machine(None, None)
    prefer_own_ptxas.__wrapped__()
