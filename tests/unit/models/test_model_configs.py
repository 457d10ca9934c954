"""The shipped configs load, and their architectures have the published parameter counts."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mjax.config import dump, load
from mjax.config.schema.keys import leaf_keys, value_of
from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.engine import config_from_hf, config_to_hf
from mjax.models import build, definition_of, split
from mjax.models.base.context import Context, tokens_of
from mjax.models.runtime.execution import Execution
from mjax.models.runtime.run import LayerInputs, Layers
from mjax.models.towers.image_places import PLACES, TIME_AXES, PackedImages
from mjax.models.towers.tiles import Tiled
from mjax.plan.execution import model_layers

CONFIGS = Path(__file__).parents[3] / "configs"
PUBLISHED = {
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "modernbert_base": 149_655_232,
    "nemotron3_nano_30b_a3b": 31_577_940_288,
    "t5_base": 222_903_552,
    "t5_3b": 2_851_598_336,
    "gpt2_124m": 124_439_808,
    "gpt_1b3": 1_315_723_264,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "gemma_2b": 2_506_172_416,
    "gemma2_9b": 9_241_705_984,
    "gemma3_27b": 27_009_346_304,  # 27,432,406,640 with its vision tower
    "phi3_mini": 3_821_079_552,
    "olmo2_7b": 7_298_617_344,
    "smollm3_3b": 3_075_098_624,
    "granite3_8b": 8_170_848_256,
    "mixtral_8x7b": 46_702_792_704,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,  # its choosing biases among them, its prediction layer not
    "glm45_air": 106_852_251_264,
    "gpt_oss_20b": 20_914_757_184,
    "mamba2_2_7b": 2_702_599_680,
    "nemotron_h_8b": 8_100_852_736,
    "granite4_h_tiny": 6_939_037_248,
    "falcon_h1_7b": 7_585_513_568,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "olmo3_7b": 7_298_011_136,
    "seed_oss_36b": 36_151_104_512,
    "glm47_flash": 29_943_393_920,  # its prediction layer is not among them
    "minimax_m2": 228_689_764_864,  # 228,703,644,928 with the scales of its 8-bit files
    "kimi_k2": 1_026_408_232_448,
    "qwen3_5_9b": 8_953_803_264,  # text alone, as of transformers' class
    "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "vit_l16": 304_326_632,
    "clip_vit_l14": 427_616_513,
    "siglip_so400m": 877_960_498,
    "llava_1_5_7b": 7_050_828_800,  # 7,063,427,072 with what of its tower is not read
    "llava_onevision_0_5b": 893_673_248,  # 893,675,552 with a norm that is not read
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen3_vl_8b": 8_767_123_696,
}


def test_every_model_config_is_listed():
    assert {p.stem for p in (CONFIGS / "models").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_says_the_same_in_hugging_face_words(name):
    cfg = load(CONFIGS / "models" / f"{name}.yaml")
    assert cfg.data.mock and cfg.run.dir == f"runs/{name}"
    back = config_from_hf(config_to_hf(cfg.model))
    skipped = {"model_type", "vocab_multiple", "scaled_output_init"}
    skipped |= {"hidden_dropout", "attention.attention_dropout", "initializer_range"}
    skipped |= {"vision.length_multiple"}  # what a config.json says nothing of
    for key in leaf_keys(ModelConfig).keys() - skipped:
        assert value_of(back, key) == value_of(cfg.model, key), key


@pytest.mark.parametrize("name", ["llava_1_5_7b", "llava_onevision_0_5b"])
def test_the_images_of_a_row_do_not_keep_a_model_from_its_export(name):
    keys = ["model.vision.max_images=3", "model.vision.length_multiple=32"]
    cfg = load(CONFIGS / "models" / f"{name}.yaml", keys)
    assert config_to_hf(cfg.model)["model_type"] == cfg.model.model_type


SHARED = {"sft.yaml", "lora.yaml", "dpo.yaml"}  # parts of recipes, without a model
FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.name not in SHARED]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_shipped_configs_load_and_reload(path, tmp_path):
    cfg = load(path)
    (tmp_path / "resolved.yaml").write_text(dump(cfg))
    assert load(tmp_path / "resolved.yaml") == cfg


@pytest.mark.grid
@pytest.mark.parametrize("name", PUBLISHED)
def test_traces_abstractly_at_full_size(name):
    """The whole loss and its gradient trace at full size; nothing is allocated."""
    cfg = load(CONFIGS / "models" / f"{name}.yaml", ["train.remat=dots"])
    _, params = split(nnx.eval_shape(lambda: build(cfg.model, nnx.Rngs(0))))
    definition = definition_of(cfg.model)
    padding = (cfg.model.padded_vocab_size - cfg.model.vocab_size) * cfg.model.hidden_size
    tables = 1 if cfg.model.tie_word_embeddings or cfg.model.architecture.compares else 2
    tables = 0 if not cfg.model.architecture.reads_tokens else tables
    if cfg.model.bert.mlm_head:  # a bias of the vocabulary
        padding += cfg.model.padded_vocab_size - cfg.model.vocab_size
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert total == PUBLISHED[name] + tables * padding

    shape = (1, cfg.data.seq_length)
    if not cfg.model.architecture.reads_tokens:
        side = cfg.model.vision.image_size
        images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
        grads = jax.eval_shape(
            jax.grad(lambda p, x: definition.bind(p).classify_images(x).sum()), params, images
        )
        assert jax.tree.map(lambda g: g.shape, grads) == jax.tree.map(lambda p: p.shape, params)
        return
    if "vision" in cfg.model.modalities:
        side, shape = cfg.model.vision.image_size, (1, cfg.data.seq_length)
        images = jax.ShapeDtypeStruct((1, 1, side, side, 3), jnp.float32)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        if cfg.model.vision.is_tiled:
            corners = jax.ShapeDtypeStruct((1, 50, 4), jnp.int32)
            images = Tiled(images, corners, jax.ShapeDtypeStruct((1, 50, 4), jnp.float32))
        if cfg.model.vision.is_packed:
            patches = jax.ShapeDtypeStruct((1, 64, cfg.model.vision.numbers), jnp.float32)
            facts = [(1, 64, PLACES), shape, (*shape, TIME_AXES)]
            images = PackedImages(patches, *(jax.ShapeDtypeStruct(f, jnp.int32) for f in facts))

        def total(params, tokens, images):
            model = definition.bind(params)
            if not cfg.model.architecture.compares:
                return model(tokens, images=images).sum()
            embedded = model.image_embeddings(images[0])
            return model.pair_logits(embedded, model.text_embeddings(tokens)).sum()

        grads = jax.eval_shape(jax.grad(total), params, tokens, images)
        assert jax.tree.map(lambda g: g.shape, grads) == jax.tree.map(lambda p: p.shape, params)
        return
    fields = {"tokens": jnp.int32, "labels": jnp.int32, "loss_mask": jnp.float32}
    batch = {k: jax.ShapeDtypeStruct(shape, dtype) for k, dtype in fields.items()}
    both = cfg.model.architecture.reads_target  # its two sequences are of one length here

    def loss(params, batch):
        edges, info, ctx = definition.edges.bind(params), tokens_of(shape), Context()
        info = replace(info, others={"encoder": info}) if both else info
        embed = edges.embed_streams if both else edges.embed
        tokens = [batch["tokens"]] * (1 + both)
        layers = Layers(definition.blocks, Execution(model_layers(cfg)), ctx)
        inputs = LayerInputs(info, edges.rope(info, ctx))
        x, *_ = layers.run(params, embed(*tokens, info, ctx), inputs)
        x = x.decoder if both else x
        return edges.head_loss(x, batch["labels"], batch["loss_mask"], ctx)

    grads = jax.eval_shape(jax.grad(loss), params, batch)
    assert jax.tree.map(lambda g: g.shape, grads) == jax.tree.map(lambda p: p.shape, params)
