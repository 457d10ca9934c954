"""One process a GPU against one process for all: the same run, saved by one and resumed by the
other. JAX is not started here, or this process would hold memory on every GPU."""

import json
import os
import sys

import pytest

from tests.gpu import count_gpus
from tests.processes import free_port, start_process

GPUS = count_gpus()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

BASE = [
    "model.vocab_size=1000",
    "model.hidden_size=256",
    "model.attention.num_attention_heads=4",
    "model.attention.num_key_value_heads=2",
    "model.num_hidden_layers=3",
    "data.mock=true",
    "data.seq_length=512",
    "mesh.tp=2",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "schedule.lr=1e-3",
    "schedule.decay_steps=12",
    "log.interval=1",
]


def train(folder, processes, *overrides):
    """`python -m mjax.train`, started as torchrun starts it; losses of its steps."""
    port = free_port()
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    command = [sys.executable, "-m", "mjax.train", *BASE, f"run.dir={folder}", *overrides]
    running = [
        start_process(command, env=env | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(processes)
    ]
    try:
        assert [p.wait(timeout=120) for p in running] == [0] * processes
    finally:
        for p in running:
            p.kill()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r["loss"] for r in records if "loss" in r]


def test_one_process_a_gpu_trains_saves_and_resumes_as_one_process(tmp_path):
    whole = train(tmp_path / "one", 1, "train.steps=12")
    train(tmp_path / "many", GPUS, "train.steps=6")
    resumed = train(tmp_path / "many", 1, "train.steps=12")
    assert resumed == pytest.approx(whole, rel=2e-3)  # bf16; reductions in another order
