"""run.deterministic: a compiler without it is refused, and the user's NCCL_ALGO stays."""

import os
from types import SimpleNamespace

import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.plan import xla_options
from mjax.plan.execution import decide_execution

GPU = SimpleNamespace(platform="cuda", process_index=0)
ONE = dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1)


@pytest.mark.parametrize("known", [True, False])
def test_options_reach_the_compiler_or_the_start_is_refused(monkeypatch, known):
    monkeypatch.setattr(xla_options, "accepted", lambda options, device: known)
    execution = decide_execution(load(None, ["data.mock=true"]), ONE)
    usual = xla_options.compiler_options(execution, False, [GPU])
    assert usual == ({"xla_gpu_enable_triton_gemm": False} if known else {})
    apart = xla_options.compiler_options(execution, False, [GPU], reads_pairs=True)
    assert apart == (usual | {"xla_gpu_dot_merger_threshold_mb": 0} if known else {})
    if known:
        made = xla_options.compiler_options(execution, False, [GPU], deterministic=True)
        assert made == usual | dict(xla_options.DETERMINISTIC) and made["xla_gpu_deterministic_ops"]
    else:
        with pytest.raises(UserError, match="run.deterministic: this jaxlib lacks xla_gpu_det"):
            xla_options.compiler_options(execution, False, [GPU], deterministic=True)


def test_the_environment_says_first_how_nccl_sums(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    xla_options.fix_reduction_order()
    assert os.environ == {"NCCL_ALGO": "Ring"}
    os.environ["NCCL_ALGO"] = "Tree"
    xla_options.fix_reduction_order()
    assert os.environ == {"NCCL_ALGO": "Tree"}
