"""LLaVA: in from Hugging Face, equal logits, gradients and greedy tokens, out again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import from_pretrained
from tests.generation import made_ids
from tests.marks import quick
from tests.oracle.families import (
    add_to_vectors,
    assert_gradients_near,
    save_gradients,
    there_and_back,
)

IMAGE, SIDE, PATCHES = 90, 12, 9


def make() -> torch.nn.Module:
    """A LLaVA whose tower has a layer more than is read, with random biases and norms."""
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=SIDE,
        patch_size=4,
        initializer_factor=5.0,
    )
    text = transformers.LlamaConfig(
        vocab_size=91,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        initializer_range=0.2,
        max_position_embeddings=128,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        attn_implementation="eager",
    )
    return add_to_vectors(transformers.LlavaForConditionalGeneration(config).float().eval())


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    model, folder = make(), tmp_path_factory.mktemp("llava") / "hf"
    model.save_pretrained(folder)
    return model, folder


def texts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two texts with `count` images each, and the images."""
    rng = np.random.default_rng(count)
    ids = rng.integers(3, 80, (2, 26)).astype(np.int32)
    for image in range(count):
        first = 2 + image * (PATCHES + 2)
        ids[:, first : first + PATCHES] = IMAGE
    return ids, rng.normal(size=(2, count, SIDE, SIDE, 3)).astype(np.float32)


def given(ids: np.ndarray, images: np.ndarray) -> dict:
    """The inputs of transformers' model."""
    pixels = torch.tensor(images.reshape(-1, SIDE, SIDE, 3)).permute(0, 3, 1, 2)
    inputs = {"input_ids": torch.tensor(ids.astype(int))}
    return inputs | ({"pixel_values": pixels} if len(pixels) else {})


@pytest.mark.parametrize("count", quick([0, 1, 2], 0, 2))
def test_logits_and_greedy_tokens(hf, count):
    theirs, folder = hf
    ours, (ids, images) = from_pretrained(folder), texts(count)
    with torch.no_grad():
        want = theirs(**given(ids, images)).logits.numpy()
        made = theirs.generate(
            **given(ids, images), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    pictures = images if count else None
    got = jax.jit(lambda ids: ours.model(ids, images=pictures))(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    model = ours.definition, ours.params, ours.cfg
    for row, tokens in enumerate(ids.tolist()):
        items = {"vision": images[row]} if count else None
        assert made_ids(model, [tokens], 12, items) == made[row : row + 1, ids.shape[1] :].tolist()


def test_loss_and_gradients(hf, tmp_path):
    theirs, folder = hf
    ours, (ids, images) = from_pretrained(folder), texts(2)
    labels = np.where(ids == IMAGE, -100, ids)

    def loss(params):
        logits = ours.definition.bind(params)(jnp.asarray(ids), images=jnp.asarray(images))
        counts = labels[:, 1:] != -100
        chances = jax.nn.log_softmax(logits[:, :-1])
        of_label = jnp.take_along_axis(chances, jnp.asarray(ids)[:, 1:, None], 2)[..., 0]
        return -jnp.sum(of_label * counts) / counts.sum()

    total, grads = jax.jit(jax.value_and_grad(loss))(ours.params)
    expected = theirs(**given(ids, images), labels=torch.tensor(labels.astype(int)))
    expected.loss.backward()
    np.testing.assert_allclose(total, expected.loss.item(), rtol=1e-5)
    folder = save_gradients(theirs, make(), tmp_path / "grads", may_lack=True)
    wanted = from_pretrained(folder).params
    # keys' biases move nothing: softmax takes what is equal for all keys away
    assert_gradients_near(grads, wanted, least=1e-3)


def test_export_gives_back_every_byte(hf, tmp_path, monkeypatch):
    theirs, folder = hf
    out = tmp_path / "back"
    before, after = there_and_back(folder, tmp_path / "ckpt", out, monkeypatch)
    after = {
        name.replace("vision_tower.vision_model.", "vision_tower."): t for name, t in after.items()
    }
    assert set(after) == set(before)  # those that mjax does not read, too
    for key, tensor in after.items():
        assert tensor.tobytes() == before[key].tobytes() and tensor.shape == before[key].shape, key
    again = transformers.LlavaForConditionalGeneration.from_pretrained(
        out, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        pair = [model(**given(*texts(2))).logits for model in (again, theirs)]
    assert torch.equal(*pair)
    assert from_pretrained(out).cfg == from_pretrained(folder).cfg


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_feature_select_strategy": "full"}, "strategy='full' is not supported"),
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer=.-2, -5. of a tower of 3"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ({"text_config": {"model_type": "opt"}}, "model_type='opt' is not supported"),
    ],
)
def test_what_a_config_says_and_mjax_lacks_is_named(hf, change, message):
    config = hf[0].config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}
    config_from_hf(dict(config))
    with pytest.raises(UserError, match=message):
        config_from_hf(config | change)
