"""Latent attention: against numpy in DeepSeek's own words, its FLOPs, what travels over cp."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mjax.config import load
from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import MeshConfig
from mjax.errors import UserError
from mjax.models.attention.latent import MLA
from mjax.models.attention.positions import rope_tables
from mjax.models.attention.zigzag import zigzag
from mjax.models.base.branch import BranchInputs
from mjax.models.base.context import Context, Kernels, tokens_of
from mjax.models.base.params import split
from mjax.models.flops import flops_by_part, matmul_weights
from mjax.sharding.collectives import Parallel, reduce_gradients
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.sharding.rules import param_partitions

HEADS, RANK, NOPE, ROPE, VALUE, THETA = 4, 12, 10, 6, 14, 50.0
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
SMALL = {
    "layer_pattern": "A",
    "hidden_size": 32,
    "initializer_range": 0.2,
    "attention.num_attention_heads": HEADS,
    "mla.kv_lora_rank": RANK,
    "mla.qk_nope_head_dim": NOPE,
    "mla.qk_rope_head_dim": ROPE,
    "mla.v_head_dim": VALUE,
    "rope.rope_theta": THETA,
}


def layer(**more) -> tuple[ModelConfig, MLA]:
    cfg = ModelConfig(**nested({**SMALL, **more}))
    return cfg, MLA(cfg, 0.2, nnx.Rngs(0))


def apply(cfg, module, x, info, ctx=Context()) -> jax.Array:  # noqa: B008 - frozen
    rope = {"mla": rope_tables(cfg, info.positions, "mla", ctx.parallel)}
    return module(x, BranchInputs(info, ctx, "mla", rope)).y


def by_numpy(module: MLA, x: np.ndarray, frequencies: np.ndarray, factor: float, scale: float):
    """[S, D] of one sequence; a pair of channels is a complex number, and heads come in turn."""
    weights = {name: np.asarray(value[...], np.float64) for name, value in params(module).items()}

    def normed(latent):
        return latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)

    def turned(pairs):
        number = pairs[..., 0::2] + 1j * pairs[..., 1::2]
        number = number * factor * np.exp(1j * np.arange(len(x))[:, None] * frequencies)
        return np.stack([number.real, number.imag], -1).reshape(pairs.shape)

    q_input = normed(x @ weights["q_a"]) if "q_a" in weights else x
    to_queries = weights.get("q_b", weights.get("q"))
    down = x @ weights["kv_a"]
    latent, shared = normed(down[:, :RANK]), turned(down[:, RANK:])
    y = np.zeros_like(x)
    for head in range(HEADS):
        q = q_input @ to_queries[:, head]
        kv = latent @ weights["kv_b"][:, head]
        scores = q[:, :NOPE] @ kv[:, :NOPE].T + turned(q[:, NOPE:]) @ shared.T
        scores = np.where(np.tri(len(x)) > 0, scale * scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        y += probs @ kv[:, NOPE:] @ weights["out"][head]
    return y


def params(module: MLA) -> dict:
    return {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}


@pytest.mark.parametrize("q_rank", [None, 20])
def test_a_layer_equals_numpy(q_rank):
    cfg, module = layer(**{"mla.q_lora_rank": q_rank})
    x = np.random.default_rng(0).normal(size=(2, 9, 32))
    y = apply(cfg, module, jnp.asarray(x, jnp.float32), tokens_of((2, 9)))
    frequencies = THETA ** (-np.arange(0, ROPE, 2) / ROPE)
    for mine, sequence in zip(y, x, strict=True):
        wanted = by_numpy(module, sequence, frequencies, 1.0, (NOPE + ROPE) ** -0.5)
        np.testing.assert_allclose(mine, wanted, atol=1e-5 * np.abs(wanted).max())


def test_yarn_scales_turned_channels_by_a_ratio_and_all_products_by_a_square():
    cfg, module = layer(**{"rope.rope_scaling": YARN})
    x = np.random.default_rng(0).normal(size=(1, 9, 32))
    y = apply(cfg, module, jnp.asarray(x, jnp.float32), tokens_of((1, 9)))
    own, all_dims = (0.1 * m * math.log(8.0) + 1 for m in (1.2, 0.7))
    plain = THETA ** (-np.arange(0, ROPE, 2) / ROPE)
    # 32 turns in 16 tokens: below channel 0; 1 turn: channel 0.72. So all but the first slow down.
    frequencies = np.where(np.arange(ROPE // 2) == 0, plain, plain / 8)
    scale = (NOPE + ROPE) ** -0.5 * all_dims**2
    wanted = by_numpy(module, x[0], frequencies, own / all_dims, scale)
    np.testing.assert_allclose(y[0], wanted, atol=1e-5 * np.abs(wanted).max())


def test_flops_are_those_of_megatron_for_deepseek_v3():
    """Megatron-LM counts the gains of latents, too, which no matmul reads."""
    width, heads, seq, ffn, vocab = 7168, 128, 4096, 18432, 129280
    sizes = {"mla.q_lora_rank": 1536, "mla.kv_lora_rank": 512, "mla.qk_nope_head_dim": 128}
    sizes |= {"mla.qk_rope_head_dim": 64, "mla.v_head_dim": 128, "hidden_size": width}
    sizes |= {"attention.num_attention_heads": heads, "intermediate_size": ffn}
    sizes |= {"vocab_size": vocab, "num_hidden_layers": 2}
    cfg = ModelConfig(**nested({**SMALL, **sizes}))
    queries = 1536 * (width + heads * 192)
    keys_values = 512 * (width + heads * 256) + width * 64
    weights = queries + keys_values + heads * 128 * width + 3 * width * ffn
    assert matmul_weights(cfg) == 2 * weights + width * vocab
    parts = flops_by_part(cfg, seq)
    assert parts["matmul"] == 6 * 2 * weights
    assert parts["attention"] == 6 * 2 * (seq * heads * 192 / 2 + seq * heads * 128 / 2)


def over_cp(cfg: ModelConfig, module: MLA, cp_type: str):
    """The layer over two devices of cp, as a function of x in zigzag order."""
    mesh = make_mesh(MeshConfig(dp=1, cp=2), jax.devices()[:2])
    ctx = Context(parallel_of(mesh), kernels=Kernels(cp_type=cp_type))
    halves = PartitionSpec(None, "cp")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(halves, PartitionSpec("cp")),
        out_specs=halves,
        check_vma=False,
    )
    def run(x: jax.Array, columns: jax.Array) -> jax.Array:
        return apply(cfg, module, x, tokens_of(x.shape[:2], columns=columns), ctx)

    return run


def test_over_cp_the_latent_travels_in_place_of_keys():
    cfg, module = layer()
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    order = zigzag(8, 2)
    run = over_cp(cfg, module, "all_gather")
    text = str(jax.make_jaxpr(run)(x[:, order], jnp.asarray(order)))
    gathered = re.findall(r"f32\[([\d,]+)\] = all_gather\[", text)
    assert gathered == [f"2,8,{RANK + ROPE}"]
    y = jax.jit(run)(x[:, order], jnp.asarray(order))
    np.testing.assert_allclose(y, apply(cfg, module, x, tokens_of((2, 8)))[:, order], atol=1e-6)


def test_rings_refuse_values_of_another_size():
    cfg, module = layer()
    with pytest.raises(UserError, match="cp_type=ring lacks value heads of another size; set"):
        jax.eval_shape(over_cp(cfg, module, "ring"), jnp.zeros((2, 8, 32)), jnp.arange(8))
    keys = [f"model.{key}={value}" for key, value in SMALL.items()]
    with pytest.raises(UserError, match="cannot run with model.mla.v_head_dim"):
        load(None, [*keys, "data.mock=true", "mesh.cp=2", "mesh.cp_type=ring"])


def test_gradients_under_tp_equal_one_device():
    """Those of projections down to latents, too, which each device applies to its own tokens."""
    cfg = ModelConfig(**nested({**SMALL, "mla.q_lora_rank": 20}))
    definition, weights = split(MLA(cfg, 0.2, nnx.Rngs(0)))
    mesh = make_mesh(MeshConfig(dp=1, tp=2), jax.devices()[:2])
    parallel = parallel_of(mesh)
    cuts = param_partitions(definition.specs, parallel)
    x, target = jax.random.normal(jax.random.key(0), (2, 2, 8, 32))
    info = tokens_of((2, 8))

    def share(weights, x, target, parallel):
        y = apply(cfg, definition.bind(weights), x, info, Context(parallel))
        return jnp.sum(y * target)

    def on_mesh(weights, x, target):
        gradients = jax.grad(share, (0, 1))(weights, x, target, parallel)
        return reduce_gradients(gradients[0], cuts, parallel), gradients[1]

    tokens = PartitionSpec(None, "tp")
    places = {"mesh": mesh, "check_vma": False}
    run = jax.shard_map(
        on_mesh, in_specs=(cuts, tokens, tokens), out_specs=(cuts, tokens), **places
    )
    mine = jax.jit(run)(weights, x, target)

    def alone(weights, x):
        return share(weights, x, target, Parallel())

    wanted = jax.jit(jax.grad(alone, (0, 1)))(weights, x)
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
