"""ViT: in from Hugging Face, equal logits and gradients, out again byte for byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mjax.convert import verify
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import from_pretrained
from tests.oracle.families import (
    add_to_vectors,
    assert_gradients_near,
    save_gradients,
    there_and_back,
)


def make() -> torch.nn.Module:
    """A ViT whose biases and norms are random too."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        image_size=24,
        patch_size=6,
        initializer_range=0.2,
        num_labels=5,
        attn_implementation="eager",
    )
    return add_to_vectors(transformers.ViTForImageClassification(config).float().eval())


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    model, folder = make(), tmp_path_factory.mktemp("vit") / "hf"
    model.save_pretrained(folder)
    return model, folder


def images_of(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, size, size, 3)).astype(np.float32)


@pytest.mark.parametrize("size", [24, 36, 18])
def test_logits_with_positions_resized(hf, size):
    theirs, folder = hf
    ours, images = from_pretrained(folder), images_of(size)
    with torch.no_grad():
        given = torch.tensor(images).permute(0, 3, 1, 2)
        want = theirs(given, interpolate_pos_encoding=size != 24).logits.numpy()
    got = jax.jit(lambda images: ours.model.classify_images(images))(images)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_loss_and_gradients(hf, tmp_path):
    theirs, folder = hf
    ours, images, labels = from_pretrained(folder), images_of(24), np.array([4, 0, 2])

    def loss(params):
        logits = ours.definition.bind(params).classify_images(jnp.asarray(images))
        return -jax.nn.log_softmax(logits)[jnp.arange(3), labels].mean()

    total, grads = jax.jit(jax.value_and_grad(loss))(ours.params)
    expected = theirs(torch.tensor(images).permute(0, 3, 1, 2), labels=torch.tensor(labels))
    expected.loss.backward()
    np.testing.assert_allclose(total, expected.loss.item(), rtol=1e-5)
    wanted = from_pretrained(save_gradients(theirs, make(), tmp_path / "grads")).params
    assert_gradients_near(grads, wanted)


def test_export_gives_back_every_byte(hf, tmp_path, monkeypatch):
    _, folder = hf
    out = tmp_path / "back"
    before, after = there_and_back(folder, tmp_path / "ckpt", out, monkeypatch)
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.tobytes() == after[key].tobytes() and tensor.shape == after[key].shape, key
    assert verify(tmp_path / "ckpt", out, "float32") == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["ViTModel"]}, "architectures='ViTModel' is not supported .only ViTFor"),
        ({"image_size": [24, 36]}, "image_size=.24, 36. is not supported .only squares"),
        ({"new_key": 1}, "new_key=1 is not known"),
    ],
)
def test_what_a_config_says_and_mjax_lacks_is_named(hf, change, message):
    config = hf[0].config.to_dict() | {"architectures": ["ViTForImageClassification"]}
    config_from_hf(dict(config))
    with pytest.raises(UserError, match=message):
        config_from_hf(config | change)
