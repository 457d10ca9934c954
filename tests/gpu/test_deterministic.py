"""run.deterministic on GPUs: two runs, each compiled in a process of its own, give equal bits."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu import count_gpus

GPUS = count_gpus()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")

# Tokens that repeat within a batch, so that the embedding's gradient has sums.
BASE = [
    "model.vocab_size=500",
    "model.hidden_size=512",
    "model.attention.num_attention_heads=8",
    "model.attention.num_key_value_heads=2",
    "model.num_hidden_layers=3",
    "data.mock=true",
    "data.seq_length=2048",
    "train.global_batch_size=32",
    "train.micro_batch_size=4",
    "train.steps=20",
    "schedule.lr=1e-3",
    "log.interval=1",
    "run.deterministic=true",
]
STATE = """
import hashlib, sys
import jax, numpy as np
from mjax.config import load
from mjax.train import Trainer
from mjax.run.loop import train
cfg = load(None, sys.argv[1:])
made, init = [], Trainer.__init__
def kept(self, *args):
    init(self, *args)
    made.append(self)
Trainer.__init__ = kept
train(cfg)
bits = hashlib.sha256()
for leaf in jax.tree.leaves(made[0].state):
    bits.update(np.asarray(leaf).tobytes())
print("bits of the state:", bits.hexdigest())
"""


def run(folder, *overrides) -> tuple[list, str]:
    """(the losses and norms of all steps, the digest of the last state)."""
    env = os.environ | {"MJAX_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", STATE, *BASE, f"run.dir={folder / 'run'}", *overrides]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    figures = [(r["loss"], r["grad_norm"]) for r in records if "loss" in r]
    return figures, done.stdout[done.stdout.index("bits of the state:") :]


@pytest.mark.parametrize(
    "keys",
    [
        ["train.attention=cudnn", f"mesh.dp={GPUS}"],
        ["train.attention=cudnn", f"mesh.dp={GPUS}", "mesh.zero=3", "train.remat=full"],
        ["train.attention=auto", f"mesh.tp={min(GPUS, 2)}"],
    ],
    ids=["cudnn", "cudnn, zero 3", "tp"],
)
def test_two_runs_give_the_same_bits(tmp_path, keys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = run(tmp_path / "one", *keys), run(tmp_path / "two", *keys)
    assert len(one[0]) == 20 and one == two
