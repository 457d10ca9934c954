"""Oracle: a tiny Llama of `transformers` with copied weights gives the same numbers as ours."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mjax.config import load
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer

VOCAB, HIDDEN, HEADS, KV, SIZE, FFN, LAYERS = 251, 48, 6, 2, 8, 80, 3
ROWS, SEQ, STEPS, LR = 8, 24, 20, 3e-3
VARIANTS = {
    "llama": {},
    "llama3_rope_tied": {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "yarn_biased": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


@pytest.fixture(params=VARIANTS, scope="module")
def pair(request):
    """(torch model, our trainer holding the same weights, to-torch-names function)."""
    options = VARIANTS[request.param]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=SIZE,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.15,
        attn_implementation="eager",
        **copy.deepcopy(options),  # transformers writes into rope_scaling
    )
    theirs = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
    ours = Trainer(_config(options), make_mesh(_config(options).mesh, jax.devices()[:4]))
    ours.init()
    weights = _from_torch(
        {n: p.detach().numpy().copy() for n, p in theirs.named_parameters()}, options
    )
    place = jax.tree.map(lambda w, old: jax.device_put(w, old.sharding), weights, ours.params())
    ours.state = {**ours.state, "params": place}
    return theirs, ours, options


def _config(options):
    rope = [f"model.rope.rope_scaling.{k}={v}" for k, v in options.get("rope_scaling", {}).items()]
    flags = [f"model.{k}={v}".lower() for k, v in options.items() if not isinstance(v, dict)]
    flags = [flag.replace(".attention_bias", ".attention.attention_bias") for flag in flags]
    if options.get("attention_bias"):
        flags.append("model.attention.attention_out_bias=true")
    return load(
        None,
        [
            f"model.vocab_size={VOCAB}",
            f"model.hidden_size={HIDDEN}",
            f"model.attention.num_attention_heads={HEADS}",
            f"model.attention.num_key_value_heads={KV}",
            f"model.attention.head_dim={SIZE}",
            f"model.intermediate_size={FFN}",
            f"model.num_hidden_layers={LAYERS}",
            "model.max_position_embeddings=64",
            "data.mock=true",
            f"data.seq_length={SEQ}",
            f"train.global_batch_size={ROWS}",
            "train.micro_batch_size=2",
            "mesh.dp=2",
            "mesh.tp=2",
            "precision.compute=float32",
            f"schedule.lr={LR}",
            "schedule.decay=constant",
            *rope,
            *flags,
        ],
    )


def _from_torch(named, options):
    """transformers' Llama names -> our nested dict (also used for gradients)."""

    def layers(name, transform=lambda w: w):
        return np.stack([transform(named[f"model.layers.{i}.{name}"]) for i in range(LAYERS)])

    def heads(n):
        return lambda w: w.T.reshape(HIDDEN, n, SIZE)

    def pad(w):
        return np.pad(w, ((0, 256 - VOCAB), (0, 0)))

    def pair(a, b, axis):
        return np.stack([a, b], axis)

    attention = {
        "q": layers("self_attn.q_proj.weight", heads(HEADS)),
        "kv": pair(
            layers("self_attn.k_proj.weight", heads(KV)),
            layers("self_attn.v_proj.weight", heads(KV)),
            2,
        ),
        "out": layers("self_attn.o_proj.weight", lambda w: w.T.reshape(HEADS, SIZE, HIDDEN)),
    }
    mlp = {
        "up": pair(
            layers("mlp.gate_proj.weight", np.transpose),
            layers("mlp.up_proj.weight", np.transpose),
            2,
        ),
        "down": layers("mlp.down_proj.weight", np.transpose),
    }
    if options.get("attention_bias"):
        attention["q_bias"] = layers("self_attn.q_proj.bias", lambda b: b.reshape(HEADS, SIZE))
        k_bias, v_bias = (
            layers(f"self_attn.{x}_proj.bias", lambda b: b.reshape(KV, SIZE)) for x in "kv"
        )
        attention["kv_bias"] = pair(k_bias, v_bias, 1)
        attention["out_bias"] = layers("self_attn.o_proj.bias")
        mlp["up_bias"] = pair(layers("mlp.gate_proj.bias"), layers("mlp.up_proj.bias"), 1)
        mlp["down_bias"] = layers("mlp.down_proj.bias")
    tree = {
        "embedding": pad(named["model.embed_tokens.weight"]),
        "dense": {
            "attention_norm": {"gain": layers("input_layernorm.weight")},
            "attention": attention,
            "mlp_norm": {"gain": layers("post_attention_layernorm.weight")},
            "mlp": mlp,
        },
        "final_norm": {"gain": named["model.norm.weight"]},
    }
    if not options.get("tie_word_embeddings"):
        tree["head"] = pad(named["lm_head.weight"])
    return tree


def _batch(seed):
    ids = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, SEQ + 1))
    shape = (ROWS, SEQ)
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "labels": ids[:, 1:].astype(np.int32),
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(SEQ, dtype=np.int32), shape),
    }


def _torch_loss(model, batch):
    logits = model(torch.tensor(batch["tokens"]).long()).logits.float()
    labels = torch.tensor(batch["labels"]).long()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def test_logits_gradients_and_twenty_adamw_steps(pair):
    theirs, ours, options = pair
    batch = _batch(0)
    params = jax.tree.map(np.asarray, ours.params())
    mine = ours.definition.bind(jax.tree.map(jnp.asarray, params))(jnp.asarray(batch["tokens"]))
    with torch.no_grad():
        expected = theirs(torch.tensor(batch["tokens"]).long()).logits.numpy()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-4 * np.abs(expected).max())

    theirs.zero_grad()
    _torch_loss(theirs, batch).backward()
    expected = _from_torch({n: p.grad.numpy() for n, p in theirs.named_parameters()}, options)
    for a, b in zip(jax.tree.leaves(ours.grads(batch)[2]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())

    decayed = [p for n, p in theirs.named_parameters() if p.ndim == 2]
    plain = [p for n, p in theirs.named_parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        batch = _batch(step)
        optimizer.zero_grad()
        loss = _torch_loss(theirs, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        metrics = ours.step(batch)
        assert abs(float(metrics["loss"]) - loss.item()) <= 1e-4 * loss.item(), step
