"""Gated DeltaNet compiled for H200: which kernels a layer of Qwen3-Next calls."""

import re
from collections import Counter

import pytest

from tests.aot.common import compile_step, missing
from tests.devices import GPU, choose_for
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))


@exhaustive
def test_a_layer_solves_and_walks_by_our_kernels(monkeypatch):
    """The backward solves again, and the transposed system; it keeps the states."""
    choose_for(monkeypatch, GPU, "gated_delta", "causal_conv")
    small = ["model.num_hidden_layers=1", "model.hidden_size=512", "model.vocab_size=512"]
    small += [
        "model.layer_pattern='[TE]'",
        "model.attention.qk_norm=false",
        "model.attention.attention_output_gate=false",
    ]
    small += ["model.moe.num_experts=16", "train.remat=none"]
    path = "configs/models/qwen3_next_80b_a3b.yaml"
    step = compile_step(path, *small, "mesh.dp=1", "train.micro_batch_size=1")
    called = re.findall(r" custom-call\(.*[/(](\w+)\)?/triton_kernel_call", step.text)
    calls = Counter(called)
    assert {name: calls[name] for name in calls if name.startswith("delta")} == {
        "delta_solve": 3,
        "delta_states": 1,
        "delta_state_gradients": 1,
    }
    assert "triangular" not in step.text and "trsm" not in step.text
