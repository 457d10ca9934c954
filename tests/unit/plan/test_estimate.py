"""Laws of `--dry-run`: it says what a run would be and leaves nothing behind."""

import math

import jax
import pytest

from mjax.config import load
from mjax.run.dry_run import dry_run, memory_per_device
from mjax.train import Trainer
from tests.marks import slow

OVERRIDES = [
    "model.vocab_size=256",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "data.mock=true",
    "data.seq_length=64",
    "mesh.tp=4",
    "train.micro_batch_size=4",
    "log.peak_tflops=1",
]


@slow
def test_dry_run_prints_the_plan_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "init", lambda self: pytest.fail("state was made"))
    monkeypatch.setattr(Trainer, "step", lambda self, batch: pytest.fail("a step was run"))
    more = f"run.dir={tmp_path / 'run'}", "train.freeze=[embedding]"
    dry_run(load(None, [*OVERRIDES, *more]))
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert "pp=1 x dp=2 x ep=1 x cp=1 x tp=4: 8 x cpu" in text
    assert "dense.mlp.down 2 128 64 layers mlp embed - tp - - tp+dp - 2 16 64".split() in lines
    assert any(line[:1] == ["total"] for line in lines)
    assert "frozen 16,384 of them, by train.freeze".split() in lines
    assert "layers      run in a loop; weights are rows of stacks" in text
    assert "gradients   1 micro-batches a step" in text
    assert "kernels     attention: xla, because there is no GPU" in text
    assert not (tmp_path / "run").exists()


@slow
def test_the_memory_of_the_state_is_what_one_device_holds():
    trainer = Trainer(load(None, OVERRIDES))
    sizes = memory_per_device(trainer.lower().compile())
    state = sum(map(_local_bytes, jax.tree.leaves(trainer.abstract_state())))
    batch = 8 * 64 // 2 * 5 * 4  # 8 sequences over dp=2, five fields of four bytes
    assert state + batch <= sizes["arguments"] < state + batch + 4096
    assert max(sizes["arguments"], sizes["output"]) < sizes["total"] < sum(sizes.values())


def _local_bytes(a: jax.ShapeDtypeStruct) -> int:
    return a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape))
