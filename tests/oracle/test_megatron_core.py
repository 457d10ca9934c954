"""Oracle: Megatron-core itself, on CPU, writes what mjax reads and loads what mjax writes.

It needs Megatron-core, which its wheel has for Python 3.12 alone and which runs on CPU where torch
does (docs/lab/2026-11-28-megatron.md says how to install it). MJAX_MEGATRON_PYTHON names a Python
that has it; without one these tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.checkpoint.base.source import Source, flat
from mjax.config import Config, load
from mjax.config.schema.model import ModelConfig
from mjax.interop.megatron.arguments import model_config
from mjax.interop.megatron.parameters import megatron_source
from mjax.interop.megatron.run_folder import import_run
from mjax.interop.megatron.writing import export_torch_dist
from mjax.interop.megatron.written_run import run_to_write
from mjax.interop.sources import source_of
from mjax.models import definition_of
from mjax.train.trainer import Trainer

PYTHON = os.environ.get("MJAX_MEGATRON_PYTHON")
JOB = Path(__file__).with_name("megatron_job.py")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="MJAX_MEGATRON_PYTHON names no Python with megatron-core"
)

VOCAB = 256
BASE = {
    "num_layers": 4, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 6,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8,
    "max_position_embeddings": 32, "vocab_size": VOCAB, "padded_vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 64, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "bias_gelu_fusion": False, "num_experts": None,
    "mtp_num_layers": None, "multi_latent_attention": False, "moe_grouped_gemm": False,
    "transformer_impl": "local", "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_layer_freq": [0, 1, 1, 1], "moe_router_topk": 2,
    "moe_ffn_hidden_size": 20, "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "qk_layernorm": True, "rope_type": "rope",
    "group_query_attention": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
T5 = {
    "num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": 3, "swiglu": False,
    "group_query_attention": False, "normalization": "LayerNorm", "add_bias_linear": True,
    "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
}  # fmt: skip
NO_OP, MATRIX = {"no_op": True}, {"replace_with_linear": True}


def blocks(*layers: tuple[dict, dict]) -> str:
    sizes = {"n_heads_in_group": None}, {"ffn_mult": None}
    parts = [[size | part for size, part in zip(sizes, layer, strict=True)] for layer in layers]
    entries = [{"attention": attention, "ffn": ffn} for attention, ffn in parts]
    return json.dumps({"block_configs": entries})


EMPTY = {"add_bias_linear": True, "normalization": "LayerNorm"}  # some layers are, as Megatron's
LLAVA = {
    "num_layers": 3, "encoder_num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 48,
    "group_query_attention": False, "normalization": "LayerNorm", "add_bias_linear": True,
    "swiglu": False, "img_h": 8, "img_w": 8, "patch_dim": 2, "disable_vision_class_token": True,
    "pixel_shuffle": False,
}  # fmt: skip
MODELS = {
    "llama": {},
    "experts": EXPERTS,
    "sigmoid": EXPERTS | {
        "moe_shared_expert_intermediate_size": 12, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2,
        "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5,
    },
    "latent experts": EXPERTS | {
        "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True,
        "moe_latent_size": 16,
    },
    "mla": EXPERTS | LATENT | {"moe_shared_expert_intermediate_size": 12},
    "mla yarn": LATENT | YARN,
    "mtp": EXPERTS | {"mtp_num_layers": 1},
    "hybrid": EXPERTS | {
        "hybrid_layer_pattern": "M*-ME", "is_hybrid_model": True, "num_layers": 5,
        "moe_layer_freq": 1, "position_embedding_type": "none", "mamba_num_heads": 4,
        "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 2,
    },
    "bert": {
        "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
        "swiglu": False, "add_bias_linear": True, "untie_embeddings_and_output_weights": False,
        "group_query_attention": False, "kv_channels": 4, "bert_binary_head": True,
    },
    "heterogeneous": {
        "num_layers": 6,
        "heterogeneous_layers_config_encoded_json": blocks(
            ({"n_heads_in_group": 3}, {"ffn_hidden_size": 40}),
            (NO_OP, {"ffn_hidden_size": 32}),
            ({"num_query_groups": 2}, MATRIX),
            (MATRIX, {"ffn_hidden_size": 32}),
            ({"n_heads_in_group": 1}, NO_OP),
            ({"n_heads_in_group": 1}, {"ffn_hidden_size": 24}),
        ),
    },
    "empty layers": EMPTY | {
        "num_layers": 5, "heterogeneous_layers_config_encoded_json": blocks(
            (NO_OP, NO_OP), ({"n_heads_in_group": 3}, NO_OP), (NO_OP, NO_OP),
            (NO_OP, {"ffn_hidden_size": 32}),
            ({"n_heads_in_group": 1}, {"ffn_hidden_size": 24}),
        ),
    },
    "empty layers left out": EMPTY | {
        "num_layers": 3, "heterogeneous_layers_config_encoded_json": blocks(
            ({"n_heads_in_group": 3}, NO_OP), (NO_OP, {"ffn_hidden_size": 32}),
            ({"n_heads_in_group": 1}, {"ffn_hidden_size": 24}),
        ),
    },
    "llava": LLAVA,
    "llava of CLIP": LLAVA | {"vision_model_type": "clip", "pixel_shuffle": True},
    "llava of SigLIP": LLAVA | {
        "vision_model_type": "siglip", "pixel_shuffle": True, "disable_vision_class_token": False,
    },
    "t5": T5,
    "t5 relative": T5 | {
        "position_embedding_type": "relative", "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12, "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    },
}  # fmt: skip
KINDS = {"hybrid": "hybrid", "bert": "bert", "t5": "t5", "t5 relative": "t5", "llava": "llava"}
KINDS |= dict.fromkeys(("llava of CLIP", "llava of SigLIP"), "llava")
EXPORTED = {"empty layers": "empty layers left out"}  # as which model another is written
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "clip": 1.0}
SCHEDULE = {"min_lr": 1e-3, "warmup": 2, "decay_steps": 8, "decay": "cosine"}


def run_megatron(folder: Path, name: str, sizes: tuple[int, int, int], **more) -> dict:
    """The results of Megatron-core with these tp, pp and ep."""
    folder.mkdir(exist_ok=True)
    tp, pp, ep = sizes
    job = {"args": BASE | MODELS[name], "kind": KINDS.get(name, "gpt"), "tp": tp, "pp": pp}
    job |= {"ep": ep, "result": str(folder / "result.npz"), "tokens": tokens().tolist(), **more}
    (folder / "job.json").write_text(json.dumps(job))
    command = [PYTHON, "-W", "ignore", str(JOB), str(folder / "job.json")]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(job["result"]))


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (2, 16))


def assert_equal_sources(one: Source, other: Source) -> None:
    other.check()
    assert one.cfg == other.cfg
    for path, spec in flat(definition_of(one.cfg).specs).items():
        box = tuple(map(slice, spec.shape))
        np.testing.assert_array_equal(one.read(path, box), other.read(path, box), str(path))


def logits(folder: Path, name: str) -> np.ndarray:
    source = megatron_source(folder)
    source.check()
    definition = definition_of(source.cfg)
    leaves = {
        path: jnp.asarray(source.read(path, (slice(None),) * len(spec.shape)))
        for path, spec in flat(definition.specs).items()
    }
    params = nnx.traversals.unflatten_mapping(leaves)
    with jax.default_matmul_precision("highest"):
        model, ids = definition.bind(params), jnp.asarray(tokens())
        if KINDS.get(name) == "t5":
            return np.asarray(model(ids, target=ids[:, ::-1]))
        if KINDS.get(name) == "llava":
            import torch

            images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
            count = source.cfg.vision.text_tokens()
            patches = jnp.full((2, count), source.cfg.vision.image_token_id)
            ids = jnp.concatenate([ids[:, :3], patches, ids[:, 4:]], 1)
            images = jnp.asarray(images.permute(0, 2, 3, 1).numpy())[:, None]
            return np.asarray(model(ids, images=images))
        return np.asarray(model(ids))


@pytest.mark.parametrize(
    "name,written,read",
    [("llama", (2, 2, 1), (1, 1, 1)), ("experts", (1, 1, 2), (1, 2, 1))]
    + [("sigmoid", (2, 1, 1), (1, 1, 2)), ("latent experts", (1, 1, 1), (1, 1, 1))]
    + [("mla", (2, 2, 1), (2, 1, 1)), ("mla yarn", (1, 2, 1), (1, 1, 1))]
    + [("mtp", (1, 2, 1), (1, 1, 1)), ("hybrid", (2, 1, 1), (1, 1, 1))]
    + [("heterogeneous", (2, 2, 1), (1, 1, 1)), ("heterogeneous", (1, 1, 1), (2, 1, 1))]
    + [("empty layers", (2, 1, 1), (1, 1, 1))]
    + [("llava", (2, 1, 1), (1, 1, 1)), ("llava of CLIP", (1, 1, 1), (2, 1, 1))]
    + [("llava of SigLIP", (2, 1, 1), (1, 1, 1))]
    + [("bert", (2, 1, 1), (1, 1, 1)), ("t5", (2, 1, 1), (1, 1, 1))]
    + [("t5 relative", (1, 1, 1), (2, 1, 1))],
)
def test_logits_are_equal_both_ways(tmp_path, name, written, read):
    folders = {"write": str(tmp_path / "a/c"), "write_by_rank": str(tmp_path / "a/ranks")}
    theirs = run_megatron(tmp_path / "a", name, written, **folders)["logits"]
    assert_equal_sources(*(megatron_source(tmp_path / "a" / c) for c in ("c", "ranks")))
    bound = 1e-5 * np.abs(theirs).max()
    assert np.abs(logits(tmp_path / "a/c", name) - theirs).max() < bound
    export_torch_dist(megatron_source(tmp_path / "a/c"), tmp_path / "out", "float32", "local")
    name = EXPORTED.get(name, name)
    back = run_megatron(tmp_path / "b", name, read, read=str(tmp_path / "out/release"))
    assert np.abs(back["logits"] - theirs).max() < bound


def test_weights_in_8_bits_give_the_logits_of_their_values(tmp_path):
    """The pickles name functions of Transformer Engine, which is not there."""
    job = {"write_by_rank": str(tmp_path / "a/ranks"), "in_8_bits": True}
    theirs = run_megatron(tmp_path / "a", "llama", (2, 2, 1), **job)["logits"]
    plain = run_megatron(tmp_path / "b", "llama", (2, 2, 1))["logits"]
    bound = 1e-5 * np.abs(theirs).max()
    assert np.abs(logits(tmp_path / "a/ranks", "llama") - theirs).max() < bound
    assert np.abs(plain - theirs).max() > 100 * bound


@pytest.mark.parametrize("name,distributed,ep", [("llama", False, 1), ("experts", True, 2)])
def test_the_next_three_steps_are_equal(tmp_path, name, distributed, ep):
    rng = np.random.default_rng(1)
    before, after = rng.integers(0, VOCAB, (2, 3, 4, 17))
    found = run_megatron(
        tmp_path / "a",
        name,
        (1, 1, ep),
        args=BASE | MODELS[name] | {"global_batch_size": 4, "train_iters": 100},
        iteration=3,
        write=str(tmp_path / "a/c"),
        optimizer=OPTIMIZER | SCHEDULE | {"distributed": distributed},
        metadata={"distrib_optim_sharding_type": "fully_reshardable"},
        batch=4,
        train=before.tolist(),
        then=after.tolist(),
    )
    import_run(tmp_path / "a/c", tmp_path / "run")
    cfg = load(tmp_path / "run/config.yaml", ["data.seq_length=16"])
    with jax.default_matmul_precision("highest"):
        trainer = Trainer(cfg, devices=jax.devices()[:1])
        assert trainer.restore() == 3
        losses = [float(trainer.step(batch(rows))["loss"]) for rows in after]
    np.testing.assert_allclose(losses, found["losses_after"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name,distributed,sizes",
    [("llama", True, (2, 1, 1)), ("llama", False, (1, 1, 1)), ("experts", True, (1, 1, 2))],
)
def test_megatron_takes_the_next_three_steps_of_a_run(tmp_path, name, distributed, sizes):
    """The scheduler's numbers are in the state alone, and Megatron compares them with its own."""
    rng = np.random.default_rng(1)
    before, after = rng.integers(0, VOCAB, (2, 3, 4, 17))
    cfg = run_of_model(model_config(BASE | MODELS[name], name), tmp_path / "run")
    with jax.default_matmul_precision("highest"):
        trainer = Trainer(cfg, devices=jax.devices()[:1])
        trainer.init()
        for rows in before:
            trainer.step(batch(rows))
        trainer.save()
        losses = [float(trainer.step(batch(rows))["loss"]) for rows in after]
    path = str(tmp_path / "run")
    run = run_to_write(path, apart=sizes[2] > 1)
    export_torch_dist(source_of(path), tmp_path / "out", "float32", "local", run)
    back = run_megatron(
        tmp_path / "b",
        name,
        sizes,
        read=str(tmp_path / "out/iter_0000003"),
        optimizer=OPTIMIZER | SCHEDULE | {"distributed": distributed},
        batch=4,
        then=after.tolist(),
    )
    assert (back["iteration"], back["samples"], back["consumed"]) == (3, 12, 12)
    np.testing.assert_allclose(back["losses_after"], losses, atol=1e-5, rtol=0)


@pytest.mark.parametrize("distributed", [False, True])
def test_masters_beside_weights_in_bf16_are_those_of_the_run(tmp_path, distributed):
    cfg = run_of_model(model_config(BASE, "llama"), tmp_path / "run")
    trainer = Trainer(cfg, devices=jax.devices()[:1])
    trainer.init()
    trainer.save()
    path = str(tmp_path / "run")
    export_torch_dist(
        source_of(path), tmp_path / "out", "bfloat16", "local", run_to_write(path, apart=False)
    )
    back = run_megatron(
        tmp_path / "b",
        "llama",
        (1, 1, 1),
        args=BASE | {"bf16": True},
        read=str(tmp_path / "out/iter_0000000"),
        optimizer=OPTIMIZER | SCHEDULE | {"distributed": distributed, "bf16": True},
        batch=4,
        then=np.zeros((1, 4, 17), int).tolist(),
    )
    want = sum(np.abs(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(trainer.params()))
    np.testing.assert_allclose(back["masters"], want, rtol=1e-9)


def run_of_model(model: ModelConfig, folder: Path) -> Config:
    groups = {
        "model": model.model_dump(),
        "run": {"dir": str(folder)},
        "data": {"mock": True, "seq_length": 16},
        "train": {"steps": 100, "global_batch_size": 4},
        "optimizer": {"b1": 0.9, "b2": 0.95},
        "schedule": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2, "decay_steps": 8},
        "precision": {"compute": "float32"},
        "checkpoint": {"async_save": False},
    }
    return Config.model_validate(groups)


def batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    rows = rows.astype(np.int32)
    shape = len(rows), rows.shape[1] - 1
    return {
        "tokens": rows[:, :-1],
        "labels": rows[:, 1:],
        "loss_mask": np.ones(shape, np.float32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
    }
