"""Config.json as published: read exactly, or refused by name."""

import json
from pathlib import Path

import pytest

from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import train_tokenizer
from mjax.errors import UserError
from mjax.interop.huggingface.exported_files import side_files
from mjax.interop.huggingface.families.engine import config_from_hf, config_to_hf, slots
from mjax.interop.huggingface.families.table import FAMILIES
from mjax.models import definition_of
from mjax.models.flops import flops_per_token
from mjax.sharding.spec import count_parameters

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
LLAMA_31 = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=128000,
    eos_token_id=128001,
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    pretraining_tp=1,
    num_key_value_heads=8,
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=500000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.43.0.dev0",
    use_cache=True,
    vocab_size=128256,
)
QWEN3_32B = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=5120,
    initializer_range=0.02,
    intermediate_size=25600,
    max_position_embeddings=40960,
    max_window_layers=64,
    model_type="qwen3",
    num_attention_heads=64,
    num_hidden_layers=64,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
GEMMA3_27B = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    boi_token_index=255999,
    model_type="gemma3",
    text_config=dict(
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        model_type="gemma3_text",
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    ),
    vision_config=dict(hidden_size=1152),
)

QWEN15_MOE = dict(
    architectures=["Qwen2MoeForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151643,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=5632,
    max_position_embeddings=8192,
    max_window_layers=21,
    model_type="qwen2_moe",
    moe_intermediate_size=1408,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts=60,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=16,
    output_router_logits=False,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=5632,
    sliding_window=32768,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.39.0.dev0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
OLMOE = dict(
    architectures=["OlmoeForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    clip_qkv=None,
    eos_token_id=50279,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=1024,
    max_position_embeddings=4096,
    model_type="olmoe",
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
    num_hidden_layers=16,
    num_key_value_heads=16,
    output_router_logits=False,
    pad_token_id=1,
    rope_scaling=None,
    rope_theta=10000.0,
    router_aux_loss_coef=0.01,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.43.0.dev0",
    use_cache=True,
    vocab_size=50304,
)
GPT_OSS_20B = dict(
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    initializer_range=0.02,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    model_type="gpt_oss",
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    output_router_logits=False,
    pad_token_id=199999,
    quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    transformers_version="4.55.0.dev0",
    use_cache=True,
    vocab_size=201088,
)
GPT_OSS_120B = GPT_OSS_20B | dict(
    num_local_experts=128,
    num_hidden_layers=36,
    layer_types=["sliding_attention", "full_attention"] * 18,
)

QWEN3_NEXT_80B = dict(
    architectures=["Qwen3NextForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151645,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=5120,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    model_type="qwen3_next",
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_hidden_layers=48,
    num_key_value_heads=2,
    output_router_logits=False,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=10000000,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.57.0.dev0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)

PYTHIA_1B = dict(
    architectures=["GPTNeoXForCausalLM"],
    bos_token_id=0,
    eos_token_id=0,
    hidden_act="gelu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=8192,
    layer_norm_eps=1e-05,
    max_position_embeddings=2048,
    model_type="gpt_neox",
    num_attention_heads=8,
    num_hidden_layers=16,
    rotary_emb_base=10000,
    rotary_pct=0.25,
    tie_word_embeddings=False,
    torch_dtype="float16",
    use_cache=True,
    use_parallel_residual=True,
    vocab_size=50304,
)
PHI_2 = dict(
    architectures=["PhiForCausalLM"],
    attention_dropout=0.0,
    embd_pdrop=0.0,
    hidden_act="gelu_new",
    hidden_size=2560,
    initializer_range=0.02,
    intermediate_size=10240,
    layer_norm_eps=1e-05,
    max_position_embeddings=2048,
    model_type="phi",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    partial_rotary_factor=0.4,
    qk_layernorm=False,
    resid_pdrop=0.1,
    rope_scaling=None,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    vocab_size=51200,
)


def llama(hidden: int, ffn: int, layers: int, heads: int) -> dict:
    sizes = dict(hidden_size=hidden, intermediate_size=ffn)
    return LLAMA_31 | sizes | dict(num_hidden_layers=layers, num_attention_heads=heads)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (llama(4096, 14336, 32, 32), 8_030_261_248),
        (llama(8192, 28672, 80, 64), 70_553_706_496),
        (llama(16384, 53248, 126, 128), 405_853_388_800),
        (QWEN3_32B, 32_762_123_264),
        (GEMMA3_27B, 27_432_406_640 - 423_060_336),  # less its vision tower and projector
        (QWEN15_MOE, 14_315_784_192),
        (OLMOE, 6_919_161_856),
        (GPT_OSS_20B, 20_914_757_184),
        (GPT_OSS_120B, 116_829_156_672),
        (QWEN3_NEXT_80B, 79_674_391_296),  # without its prediction layer
        (PYTHIA_1B, 1_011_781_632),
        (PHI_2, 2_779_683_840),
    ],
    ids="llama-8b llama-70b llama-405b qwen3-32b gemma3-27b qwen1.5-moe olmoe gpt-oss-20b "
    "gpt-oss-120b qwen3-next-80b pythia-1b phi-2".split(),
)
def test_published_configs_give_the_published_count(config, published):
    cfg = config_from_hf(config)
    padding = (cfg.padded_vocab_size - cfg.vocab_size) * cfg.hidden_size
    tables = 1 if cfg.tie_word_embeddings else 2
    assert count_parameters(definition_of(cfg).specs) - tables * padding == published


@pytest.mark.parametrize(
    ("config", "total", "active"), [(GPT_OSS_20B, 20.91, 3.61), (GPT_OSS_120B, 116.83, 5.13)]
)
def test_gpt_oss_has_the_active_parameters_of_its_card(config, total, active):
    """arXiv:2508.10925, table 1, in billions; a token is multiplied with all but the embedding."""
    cfg = config_from_hf(config)
    assert round(count_parameters(definition_of(cfg).specs) / 1e9, 2) == total
    assert round(flops_per_token(cfg, 1) / 6e9, 2) == active
    assert cfg.layer_kinds[:3] == ("window+experts", "full+experts", "window+experts")
    assert not cfg.rope.rope_scaling.truncate


def test_the_shipped_config_of_qwen3_next_is_the_published_one():
    cfg, shipped = config_from_hf(QWEN3_NEXT_80B), load(CONFIGS / "qwen3_next_80b_a3b.yaml").model
    assert cfg == shipped
    assert cfg.layer_kinds == (*["deltanet+experts"] * 3, "full+experts") * 12


def test_gpt_oss_without_rope_keys_has_the_yarn_that_transformers_assumes():
    bare = {k: v for k, v in GPT_OSS_20B.items() if k not in ("rope_scaling", "rope_theta")}
    assert config_from_hf(bare) == config_from_hf(GPT_OSS_20B)


def nas(*blocks: tuple[dict, dict]) -> dict:
    """Of layers (attention, ffn), as Llama-3_3-Nemotron-Super-49B's config.json says them."""
    said = [{"attention": attention, "ffn": ffn} for attention, ffn in blocks]
    sizes = dict(hidden_size=8192, num_attention_heads=64, num_hidden_layers=len(blocks))
    unsaid = dict(num_key_value_heads=None, intermediate_size=None)
    return LLAMA_31 | sizes | unsaid | dict(model_type="nemotron-nas", block_configs=said)


ATTENTION, MATRIX, NO_OP = {"n_heads_in_group": 8}, {"replace_with_linear": True}, {"no_op": True}


def test_layers_of_nemotron_nas_have_their_branches_and_sizes():
    wide, narrow = {"ffn_mult": 2.625}, {"ffn_mult": 1.0, "no_op": False}
    config = nas((ATTENTION, wide), (NO_OP, narrow), (MATRIX, MATRIX), (ATTENTION, NO_OP))
    cfg = config_from_hf(config)
    assert cfg.layer_kinds == ("full+mlp", "mlp@1", "linear+linear_mlp", "full")
    assert cfg.attention.num_key_value_heads == 8
    assert [model.intermediate_size for model in cfg.sizes] == [14336, 5632]  # 5461.3 and up
    assert config_from_hf(config_to_hf(cfg)) == cfg
    names = {s.tensor for places in slots(cfg, definition_of(cfg).specs).values() for s in places}
    assert {name for name in names if "layers.1." in name or "layers.2." in name} == {
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.2.self_attn.linear_attn.weight",
        "model.layers.2.post_attention_layernorm.weight",
        "model.layers.2.mlp.linear_mlp.weight",
    }


TINY = llama(64, 128, 2, 8)
REFUSED = {
    "other quantization": (
        GPT_OSS_20B | dict(quantization_config=dict(quant_method="awq")),
        "quantization_config has quant_method='awq', which mjax does not read (only fp8, mxfp4,",
    ),
    "layers with unlike experts": (
        dict(model_type="hunyuan_v1_moe", num_experts=4, moe_topk=[2, 1]),
        "moe.num_experts_per_tok",
    ),
    "experts of other widths": (
        dict(model_type="hunyuan_v1_moe", num_experts=4, moe_intermediate_size=[64, 32]),
        "moe_intermediate_size=[64, 32] is not supported",
    ),
    "two bases": (
        dict(model_type="granite_swa", rope_scaling=None, layer_rope_theta=[10.0, 20.0, 30.0])
        | dict(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "layer_rope_theta=[10.0, 20.0, 30.0] is not supported (only one base, or 0",
    ),
    "another share of a head": (
        dict(model_type="mistral4", qk_rope_head_dim=4, qk_nope_head_dim=4, kv_lora_rank=8)
        | dict(v_head_dim=8, rope_parameters=dict(partial_rotary_factor=0.25)),
        "partial_rotary_factor=0.25 is not supported (only 0.5)",
    ),
    "sharper gate": (GPT_OSS_20B | dict(swiglu_alpha=2.0), "swiglu_alpha=2.0 is not supported"),
    "model_type": (
        dict(model_type="mamba"),
        "model_type='mamba' is not supported; near are",
    ),
    "unknown key": (dict(altup_num_inputs=4), "altup_num_inputs=4 is not known to mjax"),
    "tensor parallel pretraining": (dict(pretraining_tp=2), "pretraining_tp=2 is not supported"),
    "activation": (dict(hidden_act="mish"), "hidden_act='mish' is not supported"),
    "rope type": (dict(rope_scaling={"rope_type": "dynamic"}), "rope_type 'dynamic'"),
    "rope key": (dict(rope_scaling={"rope_type": "linear", "gamma": 2}), "key 'gamma'"),
    "rope factor": (dict(rope_scaling={"rope_type": "linear"}), "of type 'linear' lacks 'factor'"),
    "rope length": (
        dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "lacks 'original_max_position_embeddings'",
    ),
    "missing": (dict(hidden_size=None), "lacks 'hidden_size'"),
    "blocks": (nas((ATTENTION, NO_OP)) | dict(num_hidden_layers=2), "must be a list of 2 layers"),
    "no block": (nas((NO_OP, NO_OP)), "block_configs[0] has neither attention nor ffn"),
    "layer with a state": (
        TINY | dict(model_type="minimax_m2", head_dim=8, rope_scaling=None, attn_type_list=[1, 0]),
        "attn_type_list=[1, 0] is not supported (only ones)",
    ),
    "kinds of mlp": (
        TINY | dict(model_type="hy_v3", rope_scaling=None, mlp_layer_types=["dense", "moe"]),
        "mlp_layer_types=['dense', 'moe'], num_hidden_layers=2",
    ),
    "no rope": (
        TINY | dict(model_type="ministral3", rope_scaling=None),
        "lacks 'rope_parameters', which its model_type needs",
    ),
    "temperature without yarn": (
        dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}),
        "has llama_4_scaling_beta=0.1, which is not supported",
    ),
    "norms of heads": (
        TINY | dict(model_type="stablelm", rope_scaling=None, rms_norm_eps=None, qk_layernorm=True),
        "qk_layernorm=True is not supported (only False)",
    ),
    "clipped": (
        TINY | dict(model_type="olmo", rope_scaling=None, rms_norm_eps=None, clip_qkv=8.0),
        "clip_qkv=8.0",
    ),
    "half a block": (nas((ATTENTION, None)), "block_configs[0] must have attention and ffn"),
    "no group": (nas(({}, NO_OP)), "block_configs[0] has n_heads_in_group=None; give a number"),
    "ffn_mult": (nas((NO_OP, dict(ffn_mult="2"))), "has ffn_mult='2'; give a number"),
    "window": (nas((ATTENTION | dict(window_length=9), NO_OP)), "window_length=9 is not supported"),
    "block key": (nas((ATTENTION | dict(gamma=9), NO_OP)), "has 'gamma', which is not known"),
    "type": (dict(hidden_size="64"), "hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case):
    require_refused(*REFUSED[case])


def require_refused(changes, message):
    with pytest.raises(UserError) as e:
        config_from_hf(TINY | changes)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_lists_of_hunyuan_with_one_value_are_read():
    said = dict(model_type="hunyuan_v1_moe", num_experts=8, moe_topk=[3] * 2, use_mla=False)
    said |= dict(moe_intermediate_size=[128] * 2, num_shared_expert=[1] * 2)
    moe = config_from_hf(TINY | said | dict(rope_scaling=None)).moe
    assert (moe.num_experts_per_tok, moe.moe_intermediate_size) == (3, 128)
    assert moe.shared_expert_intermediate_size == 128


def test_both_spellings_of_rope_are_read():
    new = {k: v for k, v in TINY.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **TINY["rope_scaling"]}
    assert config_from_hf(new) == config_from_hf(TINY)


def test_any_spelling_of_the_layers_is_written():
    cfg = config_from_hf(GPT_OSS_20B)
    words = cfg.model_copy(update={"layer_pattern": "(window+experts, full+experts)*12"})
    assert config_to_hf(words) == config_to_hf(cfg)
    with pytest.raises(UserError, match="no model.layer_pattern='GE'"):
        config_to_hf(cfg.model_copy(update={"layer_pattern": "GE"}))


@pytest.mark.parametrize("config", [QWEN15_MOE, OLMOE, GPT_OSS_20B, QWEN3_NEXT_80B])
def test_the_balance_loss_of_a_file_keeps_its_meaning(config):
    """transformers averages over layers; no coefficient says a sum, so an export has none."""
    cfg = config_from_hf(config)
    assert cfg.moe.router_aux_loss_type == "mean_over_layers"
    assert config_to_hf(cfg)["router_aux_loss_coef"] == config["router_aux_loss_coef"] > 0
    summed = cfg.moe.model_copy(update={"router_aux_loss_type": "sum"})
    written = config_to_hf(cfg.model_copy(update={"moe": summed}))
    assert written == config_to_hf(cfg) | {"router_aux_loss_coef": 0.0}


def test_a_model_that_no_family_has_is_not_written():
    with pytest.raises(UserError, match="no Hugging Face family can express this model"):
        config_to_hf(ModelConfig(attention={"attention_sinks": True}))
    with pytest.raises(UserError, match="llama: no model.attention.qk_norm=True"):
        config_to_hf(ModelConfig(model_type="llama", attention={"qk_norm": True}))


def test_fused_tensors_are_covered_without_gap_or_overlap():
    cfg = config_from_hf(
        TINY
        | dict(model_type="phi3", rope_scaling=None, max_position_embeddings=64)
        | {k: None for k in ("attention_bias", "mlp_bias")}
    )
    places = slots(cfg, definition_of(cfg).specs)
    fused = [
        s for p in places.values() for s in p if s.tensor.endswith("0.self_attn.qkv_proj.weight")
    ]
    assert sorted(s.start for s in fused) == [0, 64, 128]  # 8 query heads, 8 + 8 kv heads of 8
    assert set(FAMILIES) >= {"llama", "phi3", "gpt2", "mixtral"}


def test_the_tokenizer_of_a_run_travels_with_its_export(tmp_path):
    """A run on `data.text` keeps it in data/, beside its checkpoints."""
    (tmp_path / "data").mkdir()
    train_tokenizer(["some text, some more text"] * 9, 260, tmp_path / "data" / "tokenizer.json")
    found = side_files(ModelConfig(vocab_size=260), tmp_path, "bfloat16")
    assert found["tokenizer.json"] == (tmp_path / "data" / "tokenizer.json").read_bytes()
    assert json.loads(found["config.json"])["eos_token_id"] is not None
    assert "tokenizer_config.json" in found


# ---- what stands in two places, and what is not read ---------------------------------------------

LENGTH = "original_max_position_embeddings"
TWICE = {
    "theta": (
        dict(rope_theta=10000.0, rope_parameters=dict(rope_theta=500000.0)),
        "rope_theta=10000.0 and rope_parameters.rope_theta=500000.0 say the same",
    ),
    "kind": (
        dict(
            rope_scaling=dict(type="linear", factor=2.0),
            rope_parameters=dict(rope_type="default", factor=2.0),
        ),
        "rope_scaling.rope_type='linear' and rope_parameters.rope_type='default' say the same",
    ),
    "hidden": (
        dict(
            rope_theta=None,
            rope_scaling=dict(rope_type="linear", factor=2.0),
            rope_parameters=dict(rope_theta=500000.0),
        ),
        "rope_parameters.rope_theta=500000.0 has no effect beside rope_scaling",
    ),
    "length": ({LENGTH: 4096}, f"rope_scaling.{LENGTH}=8192"),
    "nested": (
        dict(rope_scaling=None, rope_parameters=dict(full_attention=dict(rope_theta=1.0))),
        "key 'full_attention'",
    ),
    "mscale": (
        dict(rope_scaling=dict(rope_type="linear", factor=2.0, mscale_all_dim=1.0)),
        "has mscale_all_dim=1.0, which is not supported",
    ),
    "no object": (dict(rope_scaling=["linear"]), "rope_scaling=['linear'] must be an object"),
    "gemma 3": (
        GEMMA3_27B["text_config"] | dict(rope_parameters=dict(rope_theta=1e6)),
        "rope_parameters has 'rope_theta', which is not known",
    ),
    "gemma 3, twice": (
        GEMMA3_27B["text_config"]
        | dict(rope_theta=1e6, rope_parameters=dict(full_attention=dict(rope_theta=1e5))),
        "rope_theta=1000000.0 and rope_parameters.full_attention.rope_theta=100000.0",
    ),
    "gemma": (
        dict(model_type="gemma", rope_scaling=None, hidden_act="gelu", hidden_activation="gelu"),
        "hidden_activation='gelu' is not supported (only 'gelu_pytorch_tanh')",
    ),
    "quantized": (dict(quantization_config=dict(bits=4)), "quant_method=None, which mjax does not"),
    "turned otherwise": (dict(rope_interleaved=True), "rope_interleaved=True is not supported"),
    "biased head": (dict(lm_head_bias=True), "lm_head_bias=True is not supported (only False)"),
}


@pytest.mark.parametrize("case", TWICE)
def test_one_key_with_two_values_is_refused(case):
    require_refused(*TWICE[case])


def test_one_value_in_two_places_is_taken():
    scaling = TINY["rope_scaling"]
    both = dict(rope_theta=5e5, rope_parameters=scaling | dict(rope_theta=500000))
    assert config_from_hf(TINY | both) == config_from_hf(TINY)


# Words of others in the config.json of SmolLM2, Falcon 3, Unsloth, Phi-4-mini, and of older ones.
OTHERS = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "activation": "swiglu",
    "unsloth_fixed": True,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
}
SILENT = dict(_attn_implementation="eager", torch_dtype="bfloat16", dtype="bfloat16")
SILENT |= dict(quantization_config=None, pad_token_id=0, do_sample=False, pruned_heads={})


def test_keys_that_cannot_change_the_numbers_are_taken_with_one_line(capsys):
    plain = config_from_hf(TINY)
    assert config_from_hf(TINY | SILENT) == plain and not capsys.readouterr().err
    assert config_from_hf(TINY | OTHERS | SILENT) == plain
    (line,) = capsys.readouterr().err.splitlines()
    assert all(key in line for key in OTHERS)


def test_what_a_kind_of_scaling_does_not_use_is_left_out_with_one_line(capsys):
    linear = dict(rope_type="linear", factor=2.0)
    plain = config_from_hf(TINY | dict(rope_scaling=linear))
    more = TINY | dict(rope_scaling=linear | dict(beta_fast=8.0, low_freq_factor=2.0))
    assert config_from_hf(more) == plain
    (line,) = capsys.readouterr().err.splitlines()
    assert "'linear' does not use beta_fast, low_freq_factor" in line
    assert config_to_hf(plain)["rope_scaling"] == linear


def test_the_published_gemma_3_4b_leaves_out_what_its_class_has():
    """Sizes of transformers' Gemma3TextConfig, and a scaled RoPE in full layers alone."""
    text = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)
    text |= dict(sliding_window=1024, rope_scaling=dict(factor=8.0, rope_type="linear"))
    cfg = config_from_hf(GEMMA3_27B | dict(text_config=text | dict(model_type="gemma3_text")))
    heads = cfg.attention
    assert (heads.num_attention_heads, heads.num_key_value_heads, heads.head_dim) == (8, 4, 256)
    assert heads.attention_multiplier is None and cfg.tie_word_embeddings  # 256 ** -0.5
    assert (cfg.vocab_size, cfg.rope.rope_theta, cfg.rope.rope_local_theta) == (262208, 1e6, 1e4)


def test_a_head_of_a_composite_is_tied_where_either_part_says_so():
    text = {k: v for k, v in TINY.items() if k != "tie_word_embeddings"}
    for above, within, want in ((None, None, False), (True, False, True), (False, True, True)):
        says = {} if within is None else {"tie_word_embeddings": within}
        config = dict(model_type="llava_next", text_config=text | says)
        config |= {} if above is None else {"tie_word_embeddings": above}
        assert config_from_hf(config).tie_word_embeddings is want
