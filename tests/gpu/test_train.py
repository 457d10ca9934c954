"""The training step on a GPU: cuDNN in bf16 against XLA in fp32, packed and not."""

import jax
import numpy as np
import pytest

from mjax.bench.train import random_batch
from mjax.config import load
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

SMALL = [
    "model.vocab_size=1000",
    "model.hidden_size=256",
    "model.attention.num_attention_heads=4",
    "model.attention.num_key_value_heads=2",
    "model.num_hidden_layers=3",
    "data.mock=true",
    "data.seq_length=512",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "schedule.lr=1e-3",
]


def trainer(*overrides, gpus=1):
    cfg = load(None, [*SMALL, *overrides])
    made = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:gpus]))
    made.init()
    return made


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("remat", ["none", "dots", "attention", "full"])
def test_bf16_cudnn_is_near_fp32_xla(documents, remat):
    fast = trainer(f"train.remat={remat}")
    exact = trainer("precision.compute=float32", "train.attention=xla")
    batch = random_batch(fast.cfg, documents)
    with jax.default_matmul_precision("highest"):
        loss, norm, grads = exact.grads(batch)
    loss16, norm16, grads16 = fast.grads(batch)
    assert abs(float(loss16) - float(loss)) < 2e-3 * float(loss)
    assert abs(float(norm16) - float(norm)) < 2e-2 * float(norm)
    for a, b in zip(jax.tree.leaves(grads16), jax.tree.leaves(grads), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


@pytest.mark.parametrize("documents", [1, 5])
def test_fp16_is_nearer_to_fp32_than_bf16(documents):
    fast = trainer("precision.compute=float16", "precision.initial_loss_scale=4096")
    exact = trainer("precision.compute=float32", "train.attention=xla")
    batch = random_batch(fast.cfg, documents)
    with jax.default_matmul_precision("highest"):
        loss, norm, grads = exact.grads(batch)
    loss16, norm16, grads16 = fast.grads(batch)
    assert abs(float(loss16) - float(loss)) < 2e-4 * float(loss)
    assert abs(float(norm16) - float(norm)) < 2e-3 * float(norm)
    for a, b in zip(jax.tree.leaves(grads16), jax.tree.leaves(grads), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)
    assert fast.step(batch)["accepted"]


def test_loss_falls_and_repeats():
    runs = []
    for _ in range(2):
        made = trainer()
        batch = random_batch(made.cfg)
        runs.append([float(made.step(batch)["loss"]) for _ in range(10)])
    assert runs[0][-1] < runs[0][0] - 0.5
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-3)


PLAIN = "norm=layernorm mlp_gated=false hidden_act=gelu_tanh mlp_bias=true"
PLAIN += " attention.attention_bias=true"


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("kind", ["", PLAIN], ids=["llama", "gpt"])
def test_exchanges_by_copies_give_one_gpus_numbers(kind):
    """Of one micro-batch: weights are gathered, gradients summed, layer by layer under matmuls."""
    wide = "model.hidden_size=1024", "model.attention.num_attention_heads=8", "train.remat=none"
    keys = *wide, *(f"model.{key}" for key in kind.split())
    alone = trainer(*keys, "train.micro_batch_size=4")
    two = trainer(*keys, "mesh.dp=2", "mesh.zero=1", gpus=2)
    batch = random_batch(alone.cfg)
    assert two.programs.program(len(batch["tokens"])).execution.overlap
    (loss, norm, grads), (loss2, norm2, grads2) = alone.grads(batch), two.grads(batch)
    assert abs(float(loss2) - float(loss)) < 1e-3 * float(loss)
    assert abs(float(norm2) - float(norm)) < 1e-2 * float(norm)
    for a, b in zip(jax.tree.leaves(grads2), jax.tree.leaves(grads), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)
    curves = [[float(t.step(batch)["loss"]) for _ in range(3)] for t in (alone, two)]
    np.testing.assert_allclose(*curves, rtol=1e-2)
