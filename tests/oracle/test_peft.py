"""Adapters against PEFT: it runs what mjax writes, and mjax merges what it wrote."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mjax.checkpoint.base.source import flat
from mjax.checkpoint.merged import merged
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.families.table import FAMILIES
from mjax.interop.huggingface.files import export
from mjax.interop.peft.adapter_reader import read_adapter
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.peft.modules import TAKEN_FOR_EXPERTS, WITH_OLD_EXPERTS, modules_of, with_family
from mjax.interop.sources import source_of
from mjax.models import definition_of
from tests.adapters import drawn_adapters, of_matmuls
from tests.marks import quick, slow
from tests.oracle.families import MODELS, make

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(0))
BOUND = 1e-5  # largest difference of logits over the largest logit; the adapters change them by 1
QUICK = ("llama2", "phi3", "gpt2", "qwen3_moe")
# PEFT refuses adapters of what these models call out_proj.
NO_OUT = ("mamba2", "nemotron_h", "falcon_h1")


def test_peft_runs_what_mjax_writes(case, tmp_path):
    base, cfg, specs = make_base(case, tmp_path)
    targets = of_matmuls
    if case.startswith(NO_OUT):
        targets = lambda spec: of_matmuls(spec) and spec.matmul != "ssm_proj"  # noqa: E731
    adapters = drawn_adapters(specs, targets)
    write_adapter(tmp_path / "adapter", cfg, specs, adapters)
    with torch.no_grad():
        before = base(IDS).logits
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    wanted = merged_logits(tmp_path, adapters)
    assert_near(logits_of(adapted), wanted)
    assert float((before - wanted).abs().max() / wanted.abs().max()) > 0.1


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_peft_runs_what_mjax_writes":
        rest = (name for name in MODELS if name not in QUICK)
        cases = [*QUICK, *(pytest.param(name, marks=slow) for name in rest)]
        metafunc.parametrize("case", cases)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OF_PEFT = {
    "patterns": (
        "llama2",
        dict(
            target_modules=[*ATTENTION, "down_proj"],
            r=4,
            rank_pattern={"k_proj": 6, "layers.1.q_proj": 2},
            alpha_pattern={"v_proj": 32, r"layers\.0\.self_attn\.o_proj": 3},
        ),
    ),
    "rslora": ("llama2", dict(target_modules=ATTENTION, r=8, use_rslora=True, lora_alpha=16)),
    "dora": ("llama2", dict(target_modules=[*ATTENTION, "up_proj", "down_proj"], use_dora=True)),
    "dora_of_gpt2": ("gpt2", dict(target_modules=["c_attn", "c_fc"], use_dora=True)),
    "saved_whole": (
        "qwen3",
        dict(target_modules=ATTENTION, modules_to_save=["lm_head", "q_norm", "model.norm"]),
    ),
    "tables": ("llama2", dict(target_modules=["embed_tokens", "lm_head", "q_proj"], r=3)),
    "one_a_for_fused": ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj"], r=6)),
    "some_layers": ("llama2", dict(target_modules=["q_proj"], layers_to_transform=[1])),
    "experts": (
        "mixtral",
        dict(
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            r=2,
        ),
    ),
    "down_of_experts": ("qwen3_moe", dict(target_parameters=["experts.down_proj"], r=2)),
    "interleaved_experts": ("gpt_oss", dict(target_parameters=["experts.gate_up_proj"], r=2)),
    "parts_of_deltanet": (
        "qwen3_5",
        dict(
            target_modules=["in_proj_qkv", "in_proj_z", "in_proj_b"],
            rank_pattern={"in_proj_z": 3},
            alpha_pattern={"in_proj_qkv": 7},
        ),
    ),
    "dora_of_parts": (
        "qwen3_5",
        dict(target_modules=["in_proj_qkv", "in_proj_z", "in_proj_a", "q_proj"], use_dora=True),
    ),
    "names_of_old_experts": (
        "hunyuan_v1_moe",
        dict(target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"], r=2),
    ),
    "shared_experts": (
        "hunyuan_v1_moe",
        dict(
            target_parameters=["shared_mlp.down_proj.weight", "shared_mlp.gate_proj.weight"],
            target_modules=["wg"],
        ),
    ),
    "all_linear": ("bamba", dict(target_modules="all-linear", exclude_modules=["conv1d"])),
}
QUICK_OF_PEFT = ("patterns", "dora", "saved_whole", "one_a_for_fused", "experts")


@pytest.mark.parametrize(
    "name", [n if n in QUICK_OF_PEFT else pytest.param(n, marks=slow) for n in OF_PEFT]
)
def test_what_peft_writes_is_merged(name, tmp_path):
    case, options = OF_PEFT[name]
    base, cfg, specs = make_base(case, tmp_path)
    options = dict(init_lora_weights=False, lora_alpha=12) | options
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if parameter.requires_grad and ("magnitude" in path or "to_save" in path):
                parameter.mul_(1.0 + 0.3 * torch.rand_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    adapters = read_adapter(tmp_path / "adapter", cfg, specs)
    assert_near(merged_logits(tmp_path, adapters), logits_of(adapted))
    write_adapter(tmp_path / "again", cfg, specs, adapters)
    again = peft.PeftModel.from_pretrained(make(case), tmp_path / "again").eval()
    assert_near(logits_of(again), logits_of(adapted))


def test_families_whose_modules_peft_takes_for_experts_are_known():
    mapping = pytest.importorskip("peft.utils.transformers_weight_conversion")
    like = mapping._MODEL_TO_CONVERSION_PATTERN  # model_type -> that whose experts it has
    taken = {name for name in FAMILIES if like.get(name) == "qwen2_moe"}
    assert taken and taken <= WITH_OLD_EXPERTS
    others = {like.get(name) for name in FAMILIES} & set(mapping._MOE_TARGET_MODULE_MAPPING)
    assert others <= {"qwen2_moe", "mixtral"}  # nothing outside of Mixtral's experts is w1, w2, w3
    assert set(mapping._MOE_TARGET_MODULE_MAPPING["qwen2_moe"]) == {"gate", *TAKEN_FOR_EXPERTS}


_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
_IMAGES = dict(_SIZES, image_size=16, patch_size=8)
_TOWER = dict(_IMAGES, projection_dim=16)
_TEXT = dict(_SIZES, vocab_size=99, num_key_value_heads=2, max_position_embeddings=64)
_TEXTS = dict(_SIZES, vocab_size=99, max_position_embeddings=32)
OTHERS = {
    "ViTForImageClassification": dict(_IMAGES, num_labels=7),
    "LlavaForConditionalGeneration": dict(
        vision_config=dict(_TOWER, model_type="clip_vision_model"),
        text_config=dict(_TEXT, model_type="llama"),
        image_token_index=98,
    ),
    "BertForMaskedLM": dict(_SIZES, vocab_size=99),
    "CLIPModel": dict(
        vision_config=_TOWER, text_config=dict(_TEXTS, projection_dim=16), projection_dim=16
    ),
    "SiglipModel": dict(vision_config=_IMAGES, text_config=dict(_TEXTS, projection_size=32)),
    "T5ForConditionalGeneration": dict(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    ),
}


@pytest.mark.parametrize("name", quick(OTHERS, 0, 1))
def test_modules_are_those_of_transformers(name, tmp_path):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**OTHERS[name]))
    model.save_pretrained(tmp_path)
    cfg = source_of(tmp_path).cfg
    found = modules_of(with_family(cfg), definition_of(cfg).specs)
    shapes = {path: tuple(parameter.shape) for path, parameter in model.named_parameters()}
    for module in found.values():
        shape = shapes[module.name if module.is_parameter else f"{module.name}.weight"]
        assert shape[-2:] == (module.outputs, module.inputs) or module.role == "embedding"


def make_base(case: str, tmp_path: Path):
    """(the model of transformers, its config in mjax, its declarations), in tmp_path/base."""
    model = make(case)
    model.save_pretrained(tmp_path / "base")
    cfg = source_of(tmp_path / "base").cfg
    return model, cfg, definition_of(cfg).specs


def merged_logits(tmp_path: Path, adapters) -> torch.Tensor:
    """The logits of transformers' model of tmp_path/base with merged adapters."""
    source = source_of(tmp_path / "base")
    specs = definition_of(source.cfg).specs
    read = merged(source, adapters, flat(specs)).read
    extras = {"config.json": (tmp_path / "base" / "config.json").read_bytes()}
    places = slots(source.cfg, specs)
    export(read, source.cfg, specs, places, tmp_path / "out", "float32", extras=extras)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    return logits_of(model.eval())


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = np.abs((got - wanted).numpy()).max() / float(wanted.abs().max())
    assert error < BOUND, error
