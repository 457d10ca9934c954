"""Laws of images in tiles and of pixel shuffle: what stands where, frozen towers, data, generation.

`python -m mjax.prove` has a row of LLaVA-OneVision with a pixel shuffle.
"""

import json
import logging

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from mjax.config import load
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.tiles import features_of_images, tiled_images
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.models import build, definition_of
from mjax.models.base.params import split
from mjax.models.flops import flops_by_part
from mjax.models.towers.modalities import Items, features_of_tiles
from mjax.models.towers.tiles import NEWLINE, Tiled, padded_features
from mjax.models.towers.vision import pixel_shuffle
from mjax.objectives.objective import objective_of
from mjax.prove import Cell, compare, holds
from tests.generation import made_ids
from tests.marks import exhaustive, slow

SIZES = "model.vision={image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 24, "
SIZES += "num_attention_heads: 2, image_token_id: 257, max_images: 2, class_token: false"
TEXT = [
    "model.vocab_size=258",
    "model.hidden_size=32",
    "model.num_hidden_layers=3",
    "model.layer_pattern='V,[P],G'",
    "model.intermediate_size=40",
    "model.initializer_range=0.2",
    "data.tokenizer=byte",
    "data.seq_length=24",
]
TILED = [*TEXT, SIZES + ", image_grid_pinpoints: [[8, 8], [8, 16], [16, 8]]}"]
MOCK = [*TILED, "data.mock=true"]
# Of 8 merged patches with padding 4 are real, and lie on two devices of cp2 tp2.
LLAVA = ["model.vision.image_size=16", "model.vision.pixel_shuffle=true"]
LLAVA += ["model.vision.length_multiple=8"]
VISION = load(None, MOCK).model.vision


def test_pixel_shuffle_is_written_out_longhand():
    """Each square of four patches, upper left, upper right, lower left, lower right."""
    n, side, channels = 2, 6, 5
    x = np.random.default_rng(0).normal(size=(n, side * side, channels)).astype(np.float32)
    want = np.zeros((n, side * side // 4, 4 * channels), np.float32)
    for row in range(side // 2):
        for column in range(side // 2):
            for down in range(2):
                for right in range(2):
                    patch = (2 * row + down) * side + 2 * column + right
                    first = (2 * down + right) * channels
                    place = row * side // 2 + column
                    want[:, place, first : first + channels] = x[:, patch]
    np.testing.assert_array_equal(pixel_shuffle(x), want)


SHUFFLED = [
    Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="a2a"),
    Cell({"dp": 2, "cp": 2}, 3, 1, cp_type="all_gather"),
    Cell({"tp": 2}, 0, 3),
]


@exhaustive
@pytest.mark.parametrize("cell", SHUFFLED, ids=str)
def test_pixel_shuffle_behind_a_class_token_on_meshes(cell):
    record = compare("llava", cell, *LLAVA, steps=3)
    assert holds(record), record


def test_a_pixel_shuffle_s_projector_works_on_a_quarter():
    keys = ["model.vision.image_size=32", "model.vision.pixel_shuffle=true", "data.mock=true"]
    cfg = load(None, [*TEXT, SIZES + "}", *keys]).model
    share = 2 * 64 / 24  # two images of 64 patches, for each token of a text of 24
    tower = 48 * 16 + 4 * 16 * 16 + 2 * 16 * 24
    projector = 4 * 16 * 32 + 32 * 32
    text = 4 * 32 * 32 + 3 * 32 * 40
    found = flops_by_part(cfg, 24)["matmul"]
    assert found == pytest.approx(6 * (share * (tower + projector / 4) + text))


def test_features_of_tiles_are_those_of_the_whole_view_and_of_the_grid_by_rows():
    (found,) = features_of_images([(8, 20)], VISION)  # two tiles, 2 x 4 features
    whole, first, second = np.arange(12).reshape(3, 2, 2)
    wanted = [*whole.ravel()]
    for row in range(2):
        wanted += [*first[row], *second[row], NEWLINE]
    np.testing.assert_array_equal(found.corners[:, 0], wanted)
    np.testing.assert_array_equal(found.weights, [[1, 0, 0, 0]] * len(wanted))
    one, other = features_of_images([(8, 20), (30, 3)], VISION)
    np.testing.assert_array_equal(one.corners[:, 0], [0, 1, 2, 3, NEWLINE])
    np.testing.assert_array_equal(other.corners[:, 0], [4, 5, 6, 7, NEWLINE])
    tokens = np.array([[257] * 5 + [1] + [257] * 5, [1] * 11])
    corners, weights = padded_features([[one, other], []])
    items = Items(3, None, 16)
    places, _ = features_of_tiles(tokens, VISION, items, corners, weights)
    assert (places[1] == -1).all()
    first = [0, 1, 2, 3, 48, -1, 16, 17, 18, 19, 48]
    np.testing.assert_array_equal(places[0, :, 0], first)


def test_rows_of_padding_are_left_out():
    vision = VISION.model_copy(update={"patch_size": 2})  # 4 x 4 features a tile
    (found,) = features_of_images([(8, 40)], vision)  # fills 1.6 of 4 rows
    assert len(found.corners) == 16 + 2 * (8 + 1)
    np.testing.assert_array_equal(found.corners[[16, 20, 25], 0], [16 + 4, 32 + 4, 16 + 8])


def test_what_is_interpolated_is_the_mean_of_its_neighbors():
    keys = {"vision_aspect_ratio": "anyres_max_1", "image_grid_pinpoints": [[16, 16]]}
    vision = VISION.model_copy(update=keys | {"patch_size": 2})
    (found,) = features_of_images([(16, 16)], vision)  # 8 x 8 features become 4 x 4
    assert len(found.corners) == 16 + 4 * 5
    np.testing.assert_array_equal(found.weights[16], [0.25] * 4)
    np.testing.assert_array_equal(found.corners[16], [16, 17, 20, 21])
    np.testing.assert_array_equal(found.corners[16 + 2], [32, 33, 36, 37])  # of the second tile
    np.testing.assert_allclose(found.weights.sum(1), 1)


@slow
def test_images_that_are_a_tile_each_are_llava_s_with_a_learned_token_behind_each():
    cfg = load(None, MOCK).model
    whole = load(None, [*TEXT, SIZES + "}", "data.mock=true"]).model
    model = build(cfg, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (1, 2, 8, 8, 3), np.uint8)
    tokens = rng.integers(6, 250, (1, 14)).astype(np.int32)
    tokens[:, 1:6] = tokens[:, 7:12] = 257
    tiled, counts = tiled_images(images, VISION)
    assert counts == [[5, 5]]
    got = model(tokens, images=tiled)
    params = split(model)[1]
    newline = params["projector"]["projector"].pop("newline")
    params["embedding"] = params["embedding"].at[5].set(newline[0])
    tokens[:, [5, 11]] = 5
    normed = ((images / 255 - 0.5) / 0.5).astype(np.float32)
    want = definition_of(whole).bind(params)(tokens, images=normed)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@slow
def test_each_tile_moves_what_stands_from_its_first_feature_on():
    cfg = load(None, MOCK).model
    model = build(cfg, nnx.Rngs(0))
    run = jax.jit(lambda tokens, tiled: model(tokens, images=tiled))
    picture = np.random.default_rng(0).integers(0, 256, (8, 16, 3), np.uint8)
    tiled, ((count,),) = tiled_images([[picture]], VISION)
    tokens = np.full((1, count + 4), 5, np.int32)
    tokens[:, 2 : 2 + count] = 257
    before = run(tokens, tiled)
    for tile, first in ((0, 2), (1, 2 + 4), (2, 2 + 4 + 2)):
        pixels = tiled.pixels.copy()
        pixels[0, tile] += 1
        moved = np.abs(run(tokens, tiled._replace(pixels=pixels)) - before).max((0, 2))
        np.testing.assert_array_equal(moved[:first], 0)
        assert (moved[first:] > 1e-6).all()


def test_images_for_speed_tests_are_a_tile_and_a_newline():
    objective = objective_of(load(None, MOCK))
    made = objective.make_fields({"tokens": np.ones((2, 24), np.int32)}, 1, 5, np.arange(2))
    assert (made["tokens"][:, :5] == 257).all() and made["patches"].shape == (2, 3, 16, 48)
    newline = 3 * 16
    places = made["vision_features"][:, :6, 0]
    np.testing.assert_array_equal(places, [[0, 1, 2, 3, newline, -1]] * 2)
    assert made["vision_weights"].shape == (2, 24, 4)
    again = objective.make_fields({"tokens": made["tokens"]} | made, 1, 5, np.arange(2))
    assert not again  # what a data set gives is left alone


# ---- data and generation -------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """Texts with one wide image, two, and none, one too long with its tiles, one too narrow."""
    for name, size in (("wide", (16, 8)), ("b", (8, 8)), ("narrow", (400, 1))):
        Image.new("RGB", size, (ord(name[0]), 0, 0)).save(tmp_path / f"{name}.png")
    lines = [
        {"images": ["wide.png"], "prompt": "is<image>?", "text": "w"},
        {"images": ["b.png", "wide.png"], "prompt": "<image>+<image>", "text": "b"},
        {"text": "no image"},
        {"images": ["wide.png"], "prompt": "<image>", "text": "x" * 20},
        {"images": ["narrow.png"], "prompt": "<image>", "text": "n"},
        {"images": ["b.png"] * 3, "prompt": "<image>" * 3, "text": "n"},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "x.jsonl"


def test_texts_with_pictures_become_rows(data, caplog):
    cfg = load(None, [*TILED, f"data.images.path={data}"])
    dataset = ImageTextDataset(data, "train", [1.0, 0, 0], 12, cfg, load_tokenizer("byte"))
    with caplog.at_level(logging.WARNING):
        batch = dataset.batch(np.arange(6))
    said = " ".join(sorted(record.getMessage() for record in caplog.records))
    assert "narrow.png cannot be used and is left out (1 x 400 pixels are too narrow" in said
    assert "x.jsonl:4 cannot be used and is left out (35 tokens: data.seq_length is 24)" in said
    assert "x.jsonl:6 cannot be used" in said and "3 images: model.vision.max_images is 2" in said
    texts = [bytes(t for t in row if 0 < t < 256) for row in batch["tokens"]]
    wide = texts.index(b"is?w")
    np.testing.assert_array_equal(batch["tokens"][wide, 2:16], [257] * 14)
    assert list(batch["labels"][wide, 15:18]) == [ord("?"), ord("w"), 256]
    assert list(batch["loss_mask"][wide]) == [0] * 16 + [1, 1] + [0] * 6
    places = batch["vision_features"][wide, 2:16, 0]
    np.testing.assert_array_equal(places, [0, 1, 2, 3, 16, 17, 32, 33, 48, 18, 19, 34, 35, 48])
    both = texts.index(b"+b")
    np.testing.assert_array_equal(batch["vision_features"][both, :5, 0], [0, 1, 2, 3, 48])
    np.testing.assert_array_equal(batch["vision_features"][both, 6:11, 0], [16, 17, 18, 19, 48])
    red = (np.array([ord("w")] * 3) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(batch["patches"][wide, :, 0, 0], red, rtol=1e-5)
    assert not batch["patches"][both, 2].any()
    np.testing.assert_allclose(batch["patches"][both, 1, 0, 0], (127 / 255 - 0.5) / 0.5, rtol=1e-5)
    plain = texts.index(b"no image")
    assert (batch["vision_features"][plain] == -1).all() and not batch["patches"][plain].any()
    assert sorted(batch["row_label"]) == [-1] * 3 + [0] * 3


def test_videos_are_not_built_and_said_so(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "<video>", "text": "b"}')
    with pytest.raises(UserError, match="videos are not built; give frames as images"):
        ImageTextDataset(
            tmp_path / "x.jsonl", "train", [1.0, 0, 0], 1, load(None, MOCK), load_tokenizer("byte")
        )


@exhaustive
def test_a_run_is_continued_by_generate_with_pictures(data, tmp_path, monkeypatch, capsys):
    from mjax.train.__main__ import main as train

    keys = [f"data.images.path={data}", f"run.dir={tmp_path / 'run'}", "train.steps=2"]
    keys += ["train.global_batch_size=8", "train.micro_batch_size=1", "precision.compute=float32"]
    monkeypatch.setattr("sys.argv", ["train", *TILED, *keys])
    train()
    capsys.readouterr()
    wide, other = (str(data.parent / f"{name}.png") for name in ("wide", "b"))
    told = ["--ckpt", str(tmp_path / "run"), "--tokenizer", "byte", "--max-new-tokens", "3"]
    told += ["--temperature", "0"]
    generate([*told, "--image", wide, "--prompt", "see <image>", "--prompt", "none"])
    generate([*told, "--image", wide, "--image", other, "--prompt", "<image><image>"])
    with pytest.raises(
        UserError, match="a text has 2 <image>, and 1 pictures are given; give one for each"
    ):
        generate([*told, "--image", wide, "--prompt", "<image><image>"])
    with pytest.raises(UserError, match="--image .*x.jsonl: .*give a picture"):
        generate([*told, "--image", str(data), "--prompt", "<image>"])
    with pytest.raises(UserError, match="narrow.png: 1 x 400 pixels are too narrow"):
        generate([*told, "--image", str(data.parent / "narrow.png"), "--prompt", "<image>"])


def test_tokens_and_images_that_do_not_fit_are_refused():
    cfg = load(None, MOCK).model
    given = definition_of(cfg), split(build(cfg, nnx.Rngs(0)))[1], cfg
    tiled, _ = tiled_images([[np.zeros((8, 16, 3), np.uint8)]], VISION)
    with pytest.raises(UserError, match="a prompt has 3 tokens 257, and 1 <image> of 14 tokens"):
        made_ids(given, [[1, 257, 257, 257]], 2, {"vision": Tiled(*(x[0] for x in tiled))})
    model = build(cfg, nnx.Rngs(0))
    with pytest.raises(UserError, match="this model reads images in tiles; give .*tiled_images"):
        model(np.full((1, 4), 257, np.int32), images=np.zeros((1, 1, 8, 8, 3), np.float32))
    small = Tiled(np.zeros((1, 1, 4, 4, 3), np.float32), tiled.corners, tiled.weights)
    with pytest.raises(UserError, match="<image>: 4 pixels a side; give model.vision.image_size"):
        model(np.full((1, 4), 257, np.int32), images=small)
