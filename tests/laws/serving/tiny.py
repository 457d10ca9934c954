"""Tiny models of the kinds of caches that lie in pages, and their engines."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import MeshConfig
from mjax.infer.engine import Engine
from mjax.infer.records import Request
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.interop.pretrained import Pretrained
from mjax.models import build, definition_of, split
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.sharding.rules import param_partitions

VOCAB = 96
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "attention.num_attention_heads": 4,
    "attention.num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}
KINDS = {
    "keys and values": {"position_embedding": "learned"},
    "windows": {"layer_pattern": "L", "attention.sliding_window": 20},
    "latent": {
        "layer_pattern": "A",
        "attention.num_key_value_heads": 4,
        "mla.q_lora_rank": 24,
        "mla.kv_lora_rank": 12,
        "mla.qk_nope_head_dim": 8,
        "mla.qk_rope_head_dim": 4,
        "mla.v_head_dim": 6,
    },
    "experts": {
        "layer_pattern": "GE",
        "moe.num_experts": 4,
        "moe.num_experts_per_tok": 2,
        "moe.moe_intermediate_size": 16,
    },
    "cut over tp": {"attention.num_key_value_heads": 4, "vocab_multiple": 4},
    "mamba": {
        "layer_pattern": "M",
        "mamba.mamba_num_heads": 8,
        "mamba.mamba_head_dim": 8,
        "mamba.state_size": 6,
        "mamba.chunk_size": 8,
    },
}


def tiny_model(kind: str, **sizes: object) -> Pretrained:
    cfg = ModelConfig(**nested({**SMALL, **KINDS[kind], **sizes}))
    _, params = split(build(cfg, nnx.Rngs(0)))
    return Pretrained(cfg, definition_of(cfg), params, None, None)


def tiny_engine(model: Pretrained, mesh: Mapping[str, int] | None = None, **options) -> Engine:
    params = model.params
    if mesh:
        devices = jax.devices()[: int(np.prod(list(mesh.values())))]
        made = make_mesh(MeshConfig(**mesh), devices)
        places = param_partitions(model.definition.specs, parallel_of(made))
        params = jax.tree.map(
            lambda p, s: jax.device_put(p, NamedSharding(made, s)), params, places
        )
    limits = Limits(rows=2, chunk=options.pop("chunk", 32), length=128)
    given = {"limits": limits, "pages": 40, "dtype": "float32"} | options
    return Engine(model.definition, params, model.cfg, **given)


def served(given: Engine, asks: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Request]:
    requests = [given.add(prompt, params) for prompt, params in asks]
    while given.has_work:
        given.step()
    assert all(lane.pool.used == 0 for lane in given.lanes)
    return requests
