"""The shipped configs load, and their architectures have the published parameter counts."""

from pathlib import Path

import pytest

from mjax.config import dump, load
from mjax.config.schema import ModelConfig

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
