"""The shipped configs load, and their architectures have the published parameter counts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mjax.config import dump, load
from mjax.config.schema import ModelConfig
from mjax.models import build, split
from mjax.models.context import Context, tokens_of

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt_1b3": 1_315_723_264,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
}


def parameters(m: ModelConfig) -> int:
    """Parameters without vocabulary padding, from the architecture alone."""
    d, q, kv = m.hidden_size, m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    norm = d * (2 if m.norm == "layernorm" else 1)
    attention = d * (q + 2 * kv) + q * d + m.attention_bias * (q + 2 * kv)
    attention += m.attention_out_bias * d + m.qk_norm * 2 * m.head_dim
    up = m.intermediate_size * (2 if m.mlp_gated else 1)
    mlp = up * d + m.intermediate_size * d + m.mlp_bias * (up + d)
    positions = m.max_position_embeddings * d if m.position_embedding == "learned" else 0
    tables = m.vocab_size * d * (1 if m.tie_word_embeddings else 2)
    return m.num_hidden_layers * (attention + mlp + 2 * norm) + norm + tables + positions


def test_every_model_config_is_listed():
    assert {p.stem for p in (CONFIGS / "models").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_count(name):
    cfg = load(CONFIGS / "models" / f"{name}.yaml")
    assert parameters(cfg.model) == PUBLISHED[name]
    assert cfg.data.mock and cfg.run.dir == f"runs/{name}"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_load_and_reload(path, tmp_path):
    cfg = load(path)
    (tmp_path / "resolved.yaml").write_text(dump(cfg))
    assert load(tmp_path / "resolved.yaml") == cfg


@pytest.mark.parametrize("name", PUBLISHED)
def test_traces_abstractly_at_full_size(name):
    """The whole loss and its gradient trace at full size; nothing is allocated."""
    cfg = load(CONFIGS / "models" / f"{name}.yaml")
    definition, params = split(nnx.eval_shape(lambda: build(cfg.model, nnx.Rngs(0))))
    padding = (cfg.model.padded_vocab_size - cfg.model.vocab_size) * cfg.model.hidden_size
    tables = 1 if cfg.model.tie_word_embeddings else 2
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert total == PUBLISHED[name] + tables * padding

    shape = (1, cfg.data.seq_length)
    fields = {"tokens": jnp.int32, "labels": jnp.int32, "loss_mask": jnp.float32}
    batch = {k: jax.ShapeDtypeStruct(shape, dtype) for k, dtype in fields.items()}

    def loss(params, batch):
        out = definition.bind(params).loss(batch, tokens_of(shape), Context(remat="dots"), None)
        return jax.tree.leaves(out)[0]

    grads = jax.eval_shape(jax.grad(loss), params, batch)
    assert jax.tree.map(lambda g: g.shape, grads) == jax.tree.map(lambda p: p.shape, params)
