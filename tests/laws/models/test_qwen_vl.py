"""Laws of texts with packed images (Qwen-VL): rows, positions, packed texts, meshes, generation."""

import io

import jax
import numpy as np
import pytest
from PIL import Image

from mjax.config import load
from mjax.config.schema.vision import VisionConfig
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.packed import PackedTexts
from mjax.errors import UserError
from mjax.models.towers.image_places import Grid, image_places, packed_row, text_places
from mjax.prove import deviation
from mjax.train import Trainer
from mjax.train.batch import field_maker
from tests.laws.run.test_image_data import BYTES, config, write

QWEN_VL = [
    "model.vocab_size=260",
    "model.hidden_size=32",
    "model.attention.num_attention_heads=4",
    "model.num_hidden_layers=6",
    "model.layer_pattern='vision_2d+mlp,vision_window+mlp,patch_merger,full+mlp,deep_merger,"
    "full+mlp'",
    "model.intermediate_size=40",
    "model.initializer_range=0.2",
    "model.vision={patch_size: 4, hidden_size: 16, intermediate_size: 24, num_attention_heads: 2, "
    "image_token_id: 257, max_patches: 96, window_size: 16, min_pixels: 64, max_pixels: 640, "
    "deepstack_visual_indexes: [0]}",
    "model.rope.mrope_section=[2, 1, 1]",
    "data.tokenizer=byte",
    "data.seq_length=48",
]
VISION = VisionConfig(patch_size=4, image_token_id=9, video_token_id=8, max_patches=64)
WINDOWED = VISION.model_copy(update={"window_size": 16, "max_patches": 128})


def test_patches_of_a_window_and_of_a_token_lie_together():
    grid = Grid(2, 6, 8)  # in merged tokens 3 x 4, of which windows are 2 x 2
    places, sources = image_places([Grid(1, 2, 4), grid], WINDOWED, 128)
    row, column, rows, columns, frame, window = places[8:104].T
    assert (rows == 6).all() and (columns == 8).all() and (places[104:] == 0).all()
    assert sorted(sources) == list(range(104))
    np.testing.assert_array_equal(np.unique(frame, return_counts=True), [[2, 3], [48, 48]])
    assert (np.diff(window) >= 0).all() and window[0] == 2
    for number in np.unique(window):
        own = window == number
        assert len({*zip(frame[own], row[own] // 4, column[own] // 4, strict=True)}) == 1
    quads = np.stack([row // 2, column // 2], 1).reshape(-1, 4, 2)
    assert (quads == quads[:, :1]).all()


def test_positions_go_on_from_the_largest_and_begin_anew_in_each_document():
    tokens = np.array([5, 9, 9, 9, 9, 9, 9, 5, 5, 8, 8, 8, 8, 5])
    grids = [Grid(1, 4, 6), Grid(2, 2, 4, 3.5)]
    features, axes = text_places(tokens, grids, VISION, np.array([1] * 8 + [2] * 6))
    np.testing.assert_array_equal(features, [-1, *range(6), -1, -1, *range(6, 10), -1])
    time, row, column = axes.T
    np.testing.assert_array_equal(time, [0, 1, 1, 1, 1, 1, 1, 4, 0, 1, 1, 4, 4, 3])
    np.testing.assert_array_equal(row, [0, 1, 1, 1, 2, 2, 2, 4, 0, 1, 1, 1, 1, 3])
    np.testing.assert_array_equal(column, [0, 1, 2, 3, 1, 2, 3, 4, 0, 1, 2, 1, 2, 3])


def test_a_feature_stands_for_its_own_patches_whatever_the_windows():
    grid, tokens = Grid(1, 6, 8), np.array([9] * 12)
    patches = np.arange(48.0)[:, None] * np.ones(VISION.numbers)
    for vision in (VISION, WINDOWED):
        row = packed_row(tokens, [patches], [grid], vision, length=64)
        first = row.patches[::4, 0][row.features]
        np.testing.assert_array_equal(first, 4 * np.arange(12))


@pytest.mark.parametrize(
    ("tokens", "grids", "said"),
    [
        ([9] * 5, [Grid(1, 4, 6)], "has 5 that stand for images, and images of 6 tokens"),
        ([9] * 7, [Grid(1, 4, 6)], "has 7 that stand"),
        ([5] * 5, [Grid(1, 4, 6)], "has 0 that stand"),
        ([9] * 20, [Grid(1, 8, 10)], "80 patches: model.vision.max_patches is 64"),
    ],
)
def test_images_and_tokens_that_do_not_agree_are_one_line(tokens, grids, said):
    patches = [np.zeros((grid.patches, VISION.numbers)) for grid in grids]
    with pytest.raises(UserError, match=said):
        packed_row(np.array(tokens), patches, grids, VISION)


def pictures(count: int = 9) -> list[dict]:
    """Samples with no, one and two pictures of several sizes; the fourth has one that is broken."""
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        images = []
        for place in range(number % 3):
            file = io.BytesIO()
            size = rng.integers(8, 30, 2)
            Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(file, "PNG")
            images.append(file.getvalue()[: 40 if (number, place) == (4, 0) else None])
        prompt = "<image>" * len(images) + "?"
        found.append({"images": images, "prompt": prompt, "text": f"answer {number}"})
    return found


def test_packed_texts_have_the_loss_and_gradients_of_texts_apart(tmp_path, caplog):
    path = write(tmp_path, "tar", pictures())
    found, rows = [], []
    for kind in (ImageTextDataset, PackedTexts):
        more = ["precision.compute=float32", "mesh.dp=1", "train.micro_batch_size=1"]
        cfg = config(QWEN_VL, path, *more)
        data = ImageTextDataset(path, "train", [1.0, 0, 0], None, cfg, BYTES)
        data = data if kind is ImageTextDataset else kind(data, None)
        cfg = config(QWEN_VL, path, *more, f"train.global_batch_size={len(data)}")
        rows.append(len(data))
        batch = data.batch(np.arange(len(data)))
        trainer = Trainer(cfg, devices=jax.devices()[:1])
        trainer.init()
        batch |= field_maker(cfg, trainer.objective)(batch, 0, np.arange(len(data)))
        loss, norm, grads = trainer.grads(batch)
        found.append({"loss": loss, "norm": norm, "grads": grads})
        used = batch["segment_ids"][batch["row_label"] >= 0]
        assert sum(len(set(row[row > 0])) for row in used) == 9 - 1
    assert rows[1] < rows[0] == 9
    assert deviation(*found) < 1e-6
    assert "004" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.layer_pattern='vision_2d+mlp,full+mlp'", "one patch_merger after them"),
        ("model.vision.deepstack_visual_indexes=[]", "a deep_merger each"),
        ("model.rope.mrope_section=[2, 2, 2]", "4 channel pairs in all"),
        ("model.rope.mrope_section=[]", "is needed for packed images"),
        ("model.vision.window_size=12", "no multiple of two patches"),
        ("model.vision.min_pixels=641", "is above"),
        ("model.vision.max_patches=0", "image_size=0 is no multiple"),
        ("model.vision.length_multiple=14", "98 patches a row over 4"),
        ("mesh.towers={vision: {tp: 1}}", "not built for packed images"),
    ],
)
def test_what_does_not_fit_together_is_one_line(change, said):
    load(None, [*QWEN_VL, "data.mock=true"])
    with pytest.raises(UserError, match=said):
        load(None, [*QWEN_VL, "data.mock=true", change])
