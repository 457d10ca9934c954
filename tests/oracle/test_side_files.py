"""Exports of models with processors: transformers' Auto classes read them as the import."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file

from mjax.checkpoint.base.safetensors import pack
from tests.oracle import test_clip, test_llava
from tests.oracle.families import make, there_and_back

VOCABULARY = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "##s"]


def words() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that knows an image's place."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {"<unk>": 0, "a": 1, "cat": 2, "<image>": test_llava.IMAGE}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<image>"])
    options = {"unk_token": "<unk>", "extra_special_tokens": {"image_token": "<image>"}}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **options)


def llava(folder: Path) -> None:
    sides = {"height": test_llava.SIDE, "width": test_llava.SIDE}
    images = transformers.CLIPImageProcessor(size=sides, crop_size=sides, image_std=[0.1, 0.2, 0.3])
    own = {"patch_size": 4, "vision_feature_select_strategy": "default"}
    processor = transformers.LlavaProcessor(
        images, words(), num_additional_image_tokens=1, chat_template="{{ 1 }}", **own
    )
    processor.save_pretrained(folder)
    images.save_pretrained(folder)  # preprocessor_config.json, as published
    test_llava.make().save_pretrained(folder)


def clip(folder: Path) -> None:
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 12}, crop_size=12)
    transformers.CLIPProcessor(images, words()).save_pretrained(folder)
    test_clip.make("clip").save_pretrained(folder)


def gpt2(folder: Path) -> None:
    """As published: masks among the tensors, names without their prefix, `gelu_new`."""
    make("gpt2").save_pretrained(folder)
    weights = folder / "model.safetensors"
    found = load_file(weights)
    found = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
    mask = np.tril(np.ones((1, 1, 128, 128), np.uint8))
    weights.write_bytes(pack(found | {f"h.{layer}.attn.bias": mask for layer in range(3)}))
    words().save_pretrained(folder)


@pytest.mark.parametrize("kind", [llava, clip, gpt2])
def test_auto_classes_read_an_export_as_they_read_the_import(kind, tmp_path, monkeypatch):
    folder, out = tmp_path / "hf", tmp_path / "out"
    folder.mkdir()
    kind(folder)
    before, after = there_and_back(folder, tmp_path / "ckpt", out, monkeypatch)
    for name in ("transformer.", "vision_tower.vision_model."):
        start = "vision_tower." if "vision" in name else ""
        after = {k.replace(name, start, 1): tensor for k, tensor in after.items()}
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert after[name].tobytes() == tensor.tobytes() and after[name].dtype == tensor.dtype
    configs = (json.loads((at / "config.json").read_text()) for at in (folder, out))
    assert next(configs) == next(configs)
    pair = [transformers.AutoProcessor.from_pretrained(at) for at in (folder, out)]
    given = {"text": "a cat"}
    if kind is not gpt2:
        pixels = np.random.default_rng(0).integers(0, 255, (20, 16, 3)).astype(np.uint8)
        given |= {"images": Image.fromarray(pixels)}
        given |= {"text": "a <image> cat"} if kind is llava else {}
    inputs = [dict(of(**given, return_tensors="pt")) for of in pair]
    for name, tensor in inputs[0].items():
        assert torch.equal(tensor, inputs[1][name]), name
    auto = transformers.AutoModelForCausalLM if kind is gpt2 else transformers.AutoModel
    with torch.no_grad():
        models = (auto.from_pretrained(at).eval() for at in (folder, out))
        outputs = [next(iter(model(**inputs[0]).values())) for model in models]
    assert torch.equal(*outputs)


def test_a_vocabulary_of_word_pieces_travels(tmp_path, monkeypatch):
    folder, out = tmp_path / "hf", tmp_path / "out"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    config = transformers.BertConfig(**sizes, num_attention_heads=2, hidden_act="gelu_new")
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    there_and_back(folder, tmp_path / "ckpt", out, monkeypatch)
    ids = [
        transformers.AutoTokenizer.from_pretrained(at)("a dogs")["input_ids"]
        for at in (folder, out)
    ]
    assert ids == [[2, 5, 7, 8, 3]] * 2
    assert transformers.AutoConfig.from_pretrained(out).hidden_act == "gelu_new"
