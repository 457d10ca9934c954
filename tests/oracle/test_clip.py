"""CLIP and SigLIP: in from Hugging Face, equal vectors, logits, losses and gradients, out again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import from_pretrained
from tests.oracle.families import add_to_vectors, assert_gradients_near, save_gradients

END, LENGTH, ROWS = 80, 12, 3
TEXT = dict(
    vocab_size=91,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=LENGTH,
    bos_token_id=0,
)
VISION = dict(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=36,
    image_size=14,
    patch_size=4,
)
KINDS = ["clip", "clip_legacy", "siglip"]


def make(kind: str) -> torch.nn.Module:
    """A model whose weights are large and whose biases and norms are random too."""
    torch.manual_seed(0)
    if kind == "siglip":
        text = TEXT | {"projection_size": 24, "eos_token_id": END}
        config = transformers.SiglipConfig(text_config=text, vision_config=VISION)
        model = transformers.SiglipModel(config)
    else:
        text = TEXT | {"eos_token_id": 2 if kind == "clip_legacy" else END}
        vision = VISION | {"image_size": 12}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        model = transformers.CLIPModel(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.2)
            elif name.startswith("logit"):
                p.fill_(1.3)
    return add_to_vectors(model.float().eval())


@pytest.fixture(scope="module", params=KINDS)
def hf(request, tmp_path_factory):
    model, folder = make(request.param), tmp_path_factory.mktemp(request.param) / "hf"
    model.save_pretrained(folder)
    return request.param, model, folder


def inputs(kind: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts, whose end (the first of two, in CLIP) stands elsewhere in each, and images."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, END, (ROWS, LENGTH)).astype(np.int32)
    for row, end in enumerate((4, 11, 7)):
        ids[row, end:] = END
    if kind == "clip":
        ids[:, 1] = 90  # larger than the end
    return ids, rng.normal(size=(ROWS, size, size, 3)).astype(np.float32)


def given(ids: np.ndarray, images: np.ndarray) -> dict:
    pixels = torch.tensor(images).permute(0, 3, 1, 2)
    return {"input_ids": torch.tensor(ids.astype(int)), "pixel_values": pixels}


@pytest.mark.parametrize("size", [None, 22])
def test_vectors_and_logits_with_positions_resized(hf, size):
    kind, theirs, folder = hf
    ours = from_pretrained(folder)
    ids, images = inputs(kind, size or ours.cfg.vision.image_size)
    with torch.no_grad():
        want = theirs(**given(ids, images), interpolate_pos_encoding=size is not None)
    found = jax.jit(lambda images: ours.model.image_embeddings(images))(images)
    texts = jax.jit(lambda ids: ours.model.text_embeddings(ids))(ids)
    logits = ours.model.pair_logits(found, texts)
    for got, like in (
        (found, want.image_embeds),
        (texts, want.text_embeds),
        (logits, want.logits_per_image),
    ):
        like = like.numpy()
        np.testing.assert_allclose(got, like, rtol=0, atol=2e-4 * np.abs(like).max())


def test_loss_and_gradients(hf, tmp_path):
    kind, theirs, folder = hf
    ours = from_pretrained(folder)
    ids, images = inputs(kind, ours.cfg.vision.image_size)

    def loss(params):
        model = ours.definition.bind(params)
        found = model.image_embeddings(jnp.asarray(images))
        logits = model.pair_logits(found, model.text_embeddings(jnp.asarray(ids)))
        own = jnp.eye(ROWS)
        if kind == "siglip":
            return -jnp.sum(jax.nn.log_sigmoid((2 * own - 1) * logits)) / ROWS
        both = jax.nn.log_softmax(logits) + jax.nn.log_softmax(logits, 0)
        return -jnp.sum(own * both) / 2 / ROWS

    total, grads = jax.jit(jax.value_and_grad(loss))(ours.params)
    expected = theirs(**given(ids, images), return_loss=True)
    expected.loss.backward()
    np.testing.assert_allclose(total, expected.loss.item(), rtol=1e-5)
    wanted = from_pretrained(save_gradients(theirs, make(kind), tmp_path / "grads")).params
    assert_gradients_near(grads, wanted)


def test_export_gives_back_every_byte(hf, tmp_path, monkeypatch):
    kind, theirs, folder = hf
    out = tmp_path / "back"
    for argv in (
        ["import", "--hf", folder, "--out", tmp_path / "ckpt"],
        ["export", "--ckpt", tmp_path / "ckpt", "--hf", out, "--dtype", "float32", "--verify"],
    ):
        monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
        assert convert() == 0
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.tobytes() == after[key].tobytes() and tensor.shape == after[key].shape, key
    again = type(theirs).from_pretrained(out, attn_implementation="eager").eval()
    texts_and_images = given(*inputs(kind, theirs.config.vision_config.image_size))
    with torch.no_grad():
        pair = [model(**texts_and_images).logits_per_text for model in (again, theirs)]
    assert torch.equal(*pair)


def test_what_old_files_say_of_generation_is_passed_by(hf):
    config = hf[1].config.to_dict() | {"architectures": [type(hf[1]).__name__]}
    plain = config_from_hf(dict(config))
    said = {"diversity_penalty": 0.0, "num_beams": 1, "top_k": 50, "pruned_heads": {}}
    said |= {"tie_word_embeddings": True, "dropout": 0.0, "is_decoder": False, "id2label": {}}
    for name in ("text_config", "vision_config"):
        config[name] = config[name] | said
    assert config_from_hf(config) == plain


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_config": {"hidden_act": "mish"}}, "hidden_act='mish' of a tower"),
        ({"text_config": {"model_type": "bert"}}, "model_type='bert' is not supported"),
        ({"new_key": 1}, "new_key=1 is not known"),
    ],
)
def test_what_a_config_says_and_mjax_lacks_is_named(hf, change, message):
    config = hf[1].config.to_dict() | {"architectures": [type(hf[1]).__name__]}
    config_from_hf(dict(config))
    with pytest.raises(UserError, match=message):
        config_from_hf(config | change)
