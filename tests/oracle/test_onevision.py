"""LLaVA-OneVision: tiles, in from Hugging Face, equal logits, gradients and tokens, out again."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from mjax.data.multimodal.tiles import expanded, tiled_images
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import from_pretrained
from mjax.models.towers.tiles import Tiled
from tests.generation import made_ids
from tests.oracle.families import (
    add_to_vectors,
    assert_gradients_near,
    save_gradients,
    there_and_back,
)

IMAGE, SIDE = 90, 12
PINPOINTS = [[12, 12], [12, 24], [24, 12], [12, 36], [24, 24]]
# The pictures of each row, [height, width]: two rows a case.
CASES = {
    "none": [[], []],
    "one": [[(30, 17)], [(15, 40)]],  # unpadded columns, and rows of more tiles than two
    "two": [[(13, 21), (20, 9)], [(9, 9), (40, 13)]],
    "some": [[(18, 18)], []],  # a square of four tiles, interpolated
}


def make(tied: bool = False) -> torch.nn.Module:
    """A model whose tower has a layer more than is read, with random biases and norms."""
    torch.manual_seed(0)
    vision = transformers.SiglipVisionConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=SIDE,
        patch_size=4,
        vision_use_head=False,
    )
    text = transformers.Qwen2Config(
        vocab_size=91,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        initializer_range=0.2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
        vision_feature_layer=-2,
        attn_implementation="eager",
    )
    return add_to_vectors(
        transformers.LlavaOnevisionForConditionalGeneration(config).float().eval()
    )


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    model, folder = make(), tmp_path_factory.mktemp("onevision") / "hf"
    model.save_pretrained(folder)
    return model, folder


def pictures_of(case: str) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(0, 256, (*s, 3), np.uint8) for s in row] for row in CASES[case]]


def processed(pictures: list[list[np.ndarray]]) -> dict:
    """The pixels and sizes that transformers makes of pictures."""
    if not any(pictures):
        return {}
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=PINPOINTS,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return dict(processor(pictures, return_tensors="pt"))


def inputs_of(vision, case: str) -> tuple[np.ndarray, Tiled | None, dict]:
    """Ids of two texts, left of whose shorter one is padding; our images; transformers' inputs."""
    pictures = pictures_of(case)
    rng = np.random.default_rng(7)
    tiled, counts = tiled_images(pictures, vision)
    texts = []
    for of_row in counts:
        ids = rng.integers(3, 80, 14)
        ids[[2 + 4 * n for n in range(len(of_row))]] = IMAGE
        texts.append(expanded(ids.tolist(), IMAGE, [[IMAGE] * n for n in of_row])[0])
    longest = max(map(len, texts))
    ids = np.array([[*rng.integers(3, 80, longest - len(t)), *t] for t in texts], np.int32)
    theirs = {"input_ids": torch.tensor(ids.astype(int))} | processed(pictures)
    return ids, tiled if any(pictures) else None, theirs


@pytest.mark.parametrize("case", ["one", "two", "some"])
def test_tiles_are_those_of_transformers(hf, case):
    vision = from_pretrained(hf[1]).cfg.vision
    tiled, counts = tiled_images(pictures_of(case), vision)
    want = processed(pictures_of(case))["pixel_values"]
    got = [tiles for row, tiles in zip(counts, tiled.pixels, strict=True) if row]
    if case == "two":  # transformers has an entry a picture
        got = [tile[None] for tiles in got for tile in tiles[:2]]
    for ours, theirs in zip(got, want, strict=True):
        theirs = np.moveaxis(theirs.numpy(), 1, -1)
        np.testing.assert_allclose(ours[: len(theirs)], theirs[: len(ours)], atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(hf, case):
    theirs, folder = hf
    ours = from_pretrained(folder)
    ids, tiled, given = inputs_of(ours.cfg.vision, case)
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
        made = theirs.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=None)
    got = jax.jit(lambda ids: ours.model(ids, images=tiled))(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    model = ours.definition, ours.params, ours.cfg
    for row, tokens in enumerate(ids.tolist()):
        items = {"vision": Tiled(*(array[row] for array in tiled))} if tiled else None
        assert made_ids(model, [tokens], 12, items) == made[row : row + 1, ids.shape[1] :].tolist()


def test_pictures_beside_each_other_in_tiles(hf):
    """transformers without batch_num_images cuts each picture of a text; features can say so."""
    theirs, folder = hf
    ours, pictures = from_pretrained(folder), pictures_of("one")
    pair = [[of_row[0]] for of_row in pictures]
    tiled, counts = tiled_images(pair, ours.cfg.vision)
    given = processed(pair)
    del given["batch_num_images"]
    numbers = [3, *[IMAGE] * counts[0][0], 5, *[IMAGE] * counts[1][0], 8, 9]
    used = [len(tiles[tiles.any((1, 2, 3))]) for tiles in tiled.pixels]
    later = tiled.corners[1][: counts[1][0]]
    corners = np.where(later >= 0, later + used[0] * ours.cfg.vision.text_tokens(), later)
    both = Tiled(
        np.concatenate([tiled.pixels[0][: used[0]], tiled.pixels[1][: used[1]]])[None],
        np.concatenate([tiled.corners[0][: counts[0][0]], corners])[None],
        np.concatenate([tiled.weights[0][: counts[0][0]], tiled.weights[1][: counts[1][0]]])[None],
    )
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor([numbers]), **given).logits.numpy()
    got = ours.model(jnp.asarray([numbers]), images=both)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_a_file_may_repeat_a_tied_head(tmp_path):
    """Qwen2 0.5B's is tied: its text's config says so, and LLaVA-OneVision's denies it."""
    theirs = make(tied=True)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    ours = from_pretrained(tmp_path)
    ids, tiled, given = inputs_of(ours.cfg.vision, "some")
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
    got = ours.model(ids, images=tiled)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("case", ["one", "two"])
def test_loss_and_gradients(hf, case, tmp_path):
    theirs, folder = hf
    theirs.zero_grad()
    ours = from_pretrained(folder)
    ids, tiled, given = inputs_of(ours.cfg.vision, case)
    labels = np.where(ids == IMAGE, -100, ids)

    def loss(params):
        logits = ours.definition.bind(params)(jnp.asarray(ids), images=tiled)
        counts = labels[:, 1:] != -100
        chances = jax.nn.log_softmax(logits[:, :-1])
        of_label = jnp.take_along_axis(chances, jnp.asarray(ids)[:, 1:, None], 2)[..., 0]
        return -jnp.sum(of_label * counts) / counts.sum()

    total, grads = jax.jit(jax.value_and_grad(loss))(ours.params)
    expected = theirs(**given, labels=torch.tensor(labels.astype(int)))
    expected.loss.backward()
    np.testing.assert_allclose(total, expected.loss.item(), rtol=1e-5)
    assert np.abs(grads["projector"]["projector"]["newline"]).max() > 1e-4
    saved = save_gradients(theirs, make(), tmp_path / "grads", may_lack=True)
    # keys' biases move nothing: softmax takes what is equal for all keys away
    assert_gradients_near(grads, from_pretrained(saved).params, least=1e-3)


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
    again = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(
        out, attn_implementation="eager"
    ).eval()
    cfg = from_pretrained(out).cfg
    given = inputs_of(cfg.vision, "some")[2]
    with torch.no_grad():
        pair = [model(**given).logits for model in (again, theirs)]
    assert torch.equal(*pair)
    assert cfg == from_pretrained(folder).cfg


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_feature_select_strategy": "default"}, "strategy='default' is not supported"),
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer=.-2, -5. of a tower of 3"),
        ({"text_config": {"model_type": "llama"}}, "model_type='llama' is not supported"),
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio: .*anyres_max_"),
        ({"image_grid_pinpoints": [[12]]}, "image_grid_pinpoints.*at least 2"),
    ],
)
def test_what_a_config_says_and_mjax_lacks_is_named(hf, change, message):
    config = hf[0].config.to_dict() | {"architectures": ["LlavaOnevisionForConditionalGeneration"]}
    config_from_hf(dict(config))
    with pytest.raises(UserError, match=message):
        config_from_hf(config | change)
