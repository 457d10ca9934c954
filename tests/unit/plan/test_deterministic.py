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
    cublas = {"xla_gpu_enable_triton_gemm": False} if known else {}
    assert xla_options.compiler_options(execution, False, [GPU]) == cublas
    assert xla_options.compiler_options(execution, False, [GPU] * 2) == {}
    apart = xla_options.compiler_options(execution, False, [GPU] * 2, reads_pairs=True)
    assert apart == ({"xla_gpu_dot_merger_threshold_mb": 0} if known else {})
    images = xla_options.compiler_options(execution, False, [GPU] * 2, reads_images=True)
    assert images == cublas
    if known:
        made = xla_options.compiler_options(execution, False, [GPU] * 2, deterministic=True)
        assert made == dict(xla_options.DETERMINISTIC) and made["xla_gpu_deterministic_ops"]
        layers, draws = (xla_options.serving_options(n, False, GPU, invariant=True) for n in (1, 0))
        assert layers == made == draws | {"xla_gpu_enable_command_buffer": ""} != draws
    else:
        with pytest.raises(
            UserError, match="run.deterministic or batch_invariant: this jaxlib lacks xla_gpu_det"
        ):
            xla_options.compiler_options(execution, False, [GPU], deterministic=True)
        with pytest.raises(UserError, match="batch_invariant: this jaxlib lacks xla_gpu_det"):
            xla_options.serving_options(1, False, GPU, invariant=True)
    assert xla_options.serving_options(10_000, False, GPU) == cublas


def test_models_with_a_tower_of_images_read_images():
    def reads(name):
        return "vision" in load(f"configs/models/{name}.yaml", ["data.mock=true"]).model.embedded

    assert all(map(reads, ("vit_l16", "clip_vit_l14", "siglip_so400m", "llava_1_5_7b")))
    assert not any(map(reads, ("gpt2_124m", "bert_large", "qwen3_30b_a3b")))


def test_the_environment_says_first_how_nccl_sums(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    xla_options.fix_reduction_order()
    assert os.environ == {"NCCL_ALGO": "Ring"}
    os.environ["NCCL_ALGO"] = "Tree"
    xla_options.fix_reduction_order()
    assert os.environ == {"NCCL_ALGO": "Tree"}
