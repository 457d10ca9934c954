"""Small models, batches and comparisons that the law tests share."""

import functools

import jax
import numpy as np

from mjax.config import Config, load
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer

SEQ, ROWS, VOCAB = 16, 32, 251
BASE = [
    f"model.vocab_size={VOCAB}",
    "model.hidden_size=32",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=2",
    "model.head_dim=6",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.initializer_range=0.1",
    "data.mock=true",
    f"data.seq_length={SEQ}",
    f"train.global_batch_size={ROWS}",
    "train.steps=20",
    "precision.compute=float32",
    "schedule.lr=1e-2",
    "schedule.warmup_steps=2",
    "schedule.decay=constant",
]
# Each is a feature whose sharding could go wrong on its own.
MODELS = {
    "gqa_kv1": ["model.num_key_value_heads=1"],
    "tied": ["model.tie_word_embeddings=true"],
    "biased": [
        "model.attention_bias=true",
        "model.attention_out_bias=true",
        "model.mlp_bias=true",
        "model.norm=layernorm",
        "model.mlp_gated=false",
        "model.hidden_act=gelu_tanh",
    ],
    "windowed": [
        "model.layer_pattern=LG",
        "model.num_hidden_layers=3",
        "model.sliding_window=5",
        "model.rope_local_theta=100.0",
        "model.qk_norm=true",
        "model.norm_placement=sandwich",
        "model.norm_zero_centered=true",
    ],
    "learned_positions": [
        "model.position_embedding=learned",
        "data.reset_position_ids=true",
        "data.eod_token_id=0",
    ],
    "sinks_softcap": [
        "model.attention_sinks=true",
        "model.attn_logit_softcapping=2.0",
        "model.final_logit_softcapping=3.0",
        "model.embedding_multiplier=4.0",
        "model.num_key_value_heads=8",
        "train.loss_chunk=48",
    ],
    "dropout": ["model.hidden_dropout=0.2", "model.attention_dropout=0.1"],
    "odd_heads_muon": [
        "model.num_attention_heads=24",
        "model.num_key_value_heads=6",
        "model.head_dim=4",
        "optimizer.name=muon",
    ],
}
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]  # every dp x tp factorisation of 8


def config(name: str, *overrides: str) -> Config:
    return load(None, [*BASE, *MODELS[name], *overrides])


def make_batch(seed: int = 0, rows: int = ROWS, seq: int = SEQ, vocab: int = VOCAB) -> dict:
    """Packed documents, an uneven loss mask, and a first eighth with no valid token at all."""
    rng = np.random.default_rng(seed)
    segments = np.cumsum(rng.random((rows, seq)) < 0.15, axis=1).astype(np.int32) + 1
    mask = (rng.random((rows, seq)) < rng.random((rows, 1))).astype(np.float32)
    mask[: rows // 8] = 0
    new = np.diff(segments, axis=1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(new, np.arange(seq), 0), axis=1)
    return {
        "tokens": rng.integers(0, vocab, (rows, seq)).astype(np.int32),
        "labels": rng.integers(0, vocab, (rows, seq)).astype(np.int32),
        "loss_mask": mask,
        "segment_ids": segments,
        "positions": (np.arange(seq) - starts).astype(np.int32),
    }


def trainer(name: str, dp: int, tp: int, micro_batches: int, *overrides: str) -> Trainer:
    cfg = config(
        name,
        f"mesh.dp={dp}",
        f"mesh.tp={tp}",
        f"train.micro_batch_size={ROWS // dp // micro_batches}",
        *overrides,
    )
    made = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: dp * tp]))
    made.init()
    return made


@functools.cache
def one_device_gradients(name: str) -> tuple:
    """(loss, norm, gradients) on one device in one micro-batch."""
    loss, norm, grads = trainer(name, 1, 1, 1).grads(make_batch())
    return float(loss), float(norm), jax.tree.map(np.asarray, grads)


@functools.cache
def one_device_curve(name: str, steps: int) -> tuple[float, ...]:
    return curve(trainer(name, 1, 1, 1), steps)


def curve(made: Trainer, steps: int) -> tuple[float, ...]:
    """Losses of `steps` training steps, one batch each."""
    return tuple(float(made.step(make_batch(seed))["loss"]) for seed in range(steps))


def deviation(tree: dict, reference: dict) -> float:
    """Largest |a - b| over the largest |b|, of any leaf."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, tree, reference)))
