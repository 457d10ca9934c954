"""What `ModelConfig.architecture` derives from a config, and that each has its class."""

import pytest

from mjax.config.schema.architecture import architecture_of
from mjax.config.schema.model import ModelConfig
from mjax.models.architectures import ARCHITECTURES

VISION = {"patch_size": 4, "image_size": 8}
KINDS = {
    "decoder": ({}, ["tokens"], "tokens", True),
    "multi_token_decoder": ({"num_nextn_predict_layers": 1}, ["tokens"], "tokens", True),
    "encoder": ({"layer_pattern": "B"}, ["tokens"], "tokens", False),
    "encoder_decoder": ({"layer_pattern": "B,[GXD]"}, ["tokens", "target"], "tokens", True),
    "retro": ({"layer_pattern": "[BCD],[GRD]"}, ["tokens", "neighbors"], "tokens", False),
    "text_with_items": (
        {"layer_pattern": "V,[P],S,[Q],G"},
        ["tokens", "audio", "vision"],
        "tokens",
        True,
    ),
    "dual_encoder": ({"layer_pattern": "V,G"}, ["tokens", "vision"], "pairs", False),
    "image_encoder": ({"layer_pattern": "B", "vision": VISION}, ["vision"], "classes", False),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_architecture_follows_from_the_config(name):
    keys, reads, predicts, generates = KINDS[name]
    layers = max(2, keys.get("layer_pattern", "").count(",") + 1)
    found = architecture_of(ModelConfig(num_hidden_layers=layers, **keys))
    assert found.name == name and list(found.reads) == reads
    assert (found.predicts, found.generates) == (predicts, generates)
    assert found.has_streams == (len(reads) > 1)
    assert set(found.streams) - {"decoder", "encoder"} == set(reads) & {"vision", "audio"} - (
        {"vision"} if name == "image_encoder" else set()
    )


def test_a_head_for_classes_alone_predicts_no_token():
    one = ModelConfig(layer_pattern="B", bert={"num_labels": 2})
    assert one.architecture.predicts == "classes"
    both = ModelConfig(layer_pattern="B", bert={"num_labels": 2, "mlm_head": True})
    assert both.architecture.predicts == "tokens"
    decoder = ModelConfig(bert={"embedding_norm": True}).architecture
    assert decoder.name == "encoder" and decoder.generates and not decoder.encodes


def test_every_architecture_has_a_class():
    assert set(ARCHITECTURES) == set(KINDS)
