"""A step with our own attention kernels compiles for H200 and runs each kernel once a layer."""

import re
from collections import Counter

import pytest

from mjax.kernels.base import chooser
from tests.aot.common import compile_step, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SMALL = ["model.num_hidden_layers=2", "model.vocab_size=512", "mesh.dp=1", "train.unroll=1"]
CALL = re.compile(r"= (.*?) custom-call\(.*custom_call_target=\"mosaic_gpu")


@pytest.mark.parametrize("extra", [[], ["model.attention.attn_logit_softcapping=30"]])
def test_each_kernel_once_a_layer(monkeypatch, extra):
    """Forward, d_q, and d_k with d_v: no remat policy and no fusion of XLA's calls one again."""
    monkeypatch.setattr(chooser, "on_hopper", lambda: True)
    options = ["train.attention=mosaic", *SMALL, *extra]
    step = compile_step("configs/models/gpt2_124m.yaml", *options)
    outputs = [tuple(re.findall(r"(\w+)\[", m[1])) for m in CALL.finditer(step.text)]
    calls = Counter(outputs)  # by the dtypes of their outputs
    layers = calls["bf16", "f32"]
    assert layers == 1 and "fmha" not in step.text  # the layers are scanned
    assert calls == {("bf16", "f32"): layers, ("bf16",): layers, ("bf16", "bf16"): layers}
