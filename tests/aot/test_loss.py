"""A step compiled for H200 runs our kernel for its loss: in place, in a loop, within its memory."""

import re

import pytest

from mjax.kernels.loss.cross_entropy import cut_of
from tests.aot.common import compile_step, missing
from tests.devices import GPU, choose_for
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

SMALL = ["model.num_hidden_layers=2", "mesh.dp=1", "train.unroll=1", "train.micro_batch_size=16"]
CALL = re.compile(r"= \((\S+), (\S+)\) custom-call\(.*loss_rows")


@exhaustive
def test_a_step_calls_it_and_copies_nothing(monkeypatch):
    choose_for(monkeypatch, GPU, "loss_rows")
    step = compile_step("configs/models/gpt2_124m.yaml", *SMALL)
    cut = cut_of(16 * 1024, 50304, fused=True)
    assert 1 < cut.chunk // cut.part
    whole = f"bf16[{cut.chunk},50304]"
    made = [(a.split("{")[0], b.split("{")[0]) for a, b in CALL.findall(step.text)]
    assert made == [(f"f32[{cut.part}]", whole)]
    copies = re.findall(r"= (\S+?)\{\S* copy\(", step.text)
    assert whole not in copies and f"f32[{cut.part},50304]" not in copies
    monkeypatch.undo()
    assert not CALL.search(compile_step("configs/models/gpt2_124m.yaml", *SMALL).text)
