"""Laws of texts with packed images (Qwen-VL): rows, positions, packed texts, meshes, generation."""

import io
import json
import sys
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from mjax.config import load
from mjax.config.schema.vision import VisionConfig
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.packed import PackedTexts
from mjax.data.multimodal.videos import cut_video, sampled_frames
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.models.towers.image_places import Grid, image_places, packed_row, text_places
from mjax.prove import FEATURES, Cell, compare, deviation, holds
from mjax.train import Trainer
from mjax.train.batch import field_maker
from tests.laws.models.frozen_tower import assert_tower_stays
from tests.laws.run.test_image_data import BYTES, config, write
from tests.marks import exhaustive

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
    "image_token_id: 257, video_token_id: 258, max_patches: 96, window_size: 16, min_pixels: 64, "
    "max_pixels: 640, deepstack_visual_indexes: [0]}",
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
        row = packed_row(tokens, [(patches, grid)], vision, length=64)
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
    images = [(np.zeros((grid.patches, VISION.numbers)), grid) for grid in grids]
    with pytest.raises(UserError, match=said):
        packed_row(np.array(tokens), images, VISION)


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


@exhaustive
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


@exhaustive
def test_a_run_is_continued_by_generate_with_pictures_and_a_video(tmp_path, monkeypatch, capsys):
    from mjax.train.__main__ import main as train

    run, path = tmp_path / "run", write(tmp_path, "lines", pictures())
    keys = [f"data.images.path={path}", f"run.dir={run}", "train.steps=2"]
    keys += ["train.global_batch_size=8", "train.micro_batch_size=1", "precision.compute=float32"]
    keys += ["data.images.packed=true"]
    monkeypatch.setattr("sys.argv", ["train", *QWEN_VL, *keys])
    train()
    capsys.readouterr()
    image = tmp_path / "wide.png"
    Image.fromarray(np.zeros((9, 30, 3), np.uint8)).save(image)
    told = ["--ckpt", str(run), "--tokenizer", "byte", "--max-new-tokens", "3"]
    shown = [*told, "--image", str(image)]
    generate([*shown, "--prompt", "see <image>", "--prompt", "none", "--temperature", "0"])
    assert "== prompt 1" in capsys.readouterr().out
    with pytest.raises(UserError, match="more <image> or <video> than are given"):
        generate([*shown, "--prompt", "<image><image>"])
    with pytest.raises(UserError, match="--image .*config.yaml: .*give a picture"):
        generate([*told, "--image", str(run / "config.yaml"), "--prompt", "<image>"])
    av = pytest.importorskip("av")
    generate([*told, "--video", filmed(av, tmp_path / "a.mp4"), "--prompt", "see <video>"])
    with pytest.raises(UserError, match="config.yaml: .*give a video"):
        generate([*told, "--video", str(run / "config.yaml"), "--prompt", "<video>"])


def filmed(av, path) -> str:
    """A video of two seconds, 32 x 24 pixels, that grows brighter."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for number in range(16):
            frame = np.full((24, 32, 3), 16 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return str(path)


def test_frames_of_a_video_are_taken_evenly(tmp_path):
    av = pytest.importorskip("av")
    frames, seconds = sampled_frames(filmed(av, tmp_path / "a.mp4"))
    assert len(frames) == 4 and frames[0].shape == (24, 32, 3)
    np.testing.assert_allclose(seconds, np.array([0, 5, 10, 15]) / 8)
    levels = [frame.mean() for frame in frames]
    np.testing.assert_allclose(levels, [0, 80, 160, 240], atol=12)


def test_a_video_is_one_run_of_tokens_or_one_a_pair_of_frames_after_its_time():
    frames = [np.zeros((40, 24, 3), np.uint8)] * 4
    seconds = np.array([0, 0.5, 1.0, 1.5])
    vision = VISION.model_copy(update={"min_pixels": 64, "max_pixels": 640})
    one = cut_video(frames, seconds, vision.model_copy(update={"tokens_per_second": 4}), BYTES)
    (_, grid), *rest = one.cut
    assert not rest and grid == Grid(2, 6, 4, 4.0) and one.ids == [8] * grid.tokens
    several = cut_video(frames, seconds, vision, BYTES)
    assert [grid for _, grid in several.cut] == [Grid(1, 6, 4)] * 2
    text = BYTES.decode([id for id in several.ids if id != 8])
    assert text == "".join(f"<{t} seconds><|vision_start|><|vision_end|>" for t in (0.2, 1.2))


def films(folder, av, text: str = "<video>and <image>?") -> list[dict]:
    """Samples with a video and a picture, with two videos, and with one that is broken."""
    whole = Path(filmed(av, folder / "film.mp4")).read_bytes()
    (picture,) = pictures(2)[1]["images"]
    samples = [{"images": [picture], "videos": [whole], "prompt": text}]
    samples += [{"images": [], "videos": [whole] * 2, "prompt": "<video><video>"}]
    samples += [{"images": [], "videos": [whole[:200]], "prompt": "<video>"}]
    return [sample | {"text": "yes"} for sample in samples]


def write_films(folder, samples: list[dict], is_tar: bool) -> str:
    """JSON lines or a tar file with these samples."""
    files, lines = {}, []
    for number, sample in enumerate(samples):
        named = {"images": [], "videos": []}
        for key, suffix in (("images", "png"), ("videos", "mp4")):
            for content in sample[key]:
                named[key].append(f"{number}.{len(files)}.{suffix}")
                files[named[key][-1]] = content
        facts = {key: sample[key] for key in ("prompt", "text")}
        lines.append(json.dumps(facts | named))
        if is_tar:
            files[f"{number}.json"] = json.dumps(facts).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if not is_tar:
        (folder / "x.jsonl").write_text("\n".join(lines))
        return str(folder / "x.jsonl")
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name in files:
            tar.add(folder / name, name)
    return str(folder / "x.tar")


FILMED = ["data.seq_length=256", "model.vision.max_patches=192"]


@pytest.mark.parametrize("is_tar", [False, True])
def test_videos_to_train_on_are_those_of_prompts(is_tar, tmp_path, caplog):
    av = pytest.importorskip("av")
    path = write_films(tmp_path, films(tmp_path, av), is_tar)
    cfg = config(QWEN_VL, path, *FILMED)
    data, vision = ImageTextDataset(path, "train", [1.0, 0, 0], None, cfg, BYTES), cfg.model.vision
    batch = data.batch(np.arange(3))
    assert sorted(batch["row_label"]) == [-1, 0, 0] and "give a video" in caplog.text
    read = sampled_frames(str(tmp_path / "film.mp4"))
    film = cut_video(*read, vision, BYTES, [0.5], [0.5])
    for row in np.flatnonzero(batch["row_label"] >= 0):
        ids = batch["tokens"][row]
        count = (ids == 258).sum() // film.ids.count(258)
        start = ids.tolist().index(film.ids[0])
        assert count in (1, 2) and ids[start:][: len(film.ids)].tolist() == film.ids
        answer = [chr(id) for id in batch["labels"][row][batch["loss_mask"][row] > 0] if id < 256]
        assert "".join(answer) == "yes"
        assert (batch["vision_features"][row][ids >= 257] >= 0).all()
        assert (ids == 257).any() == (count == 1)
        used = batch["patches"][row, 0][batch["patch_places"][row, :, 4] > 0]
        pooled = {patch.tobytes() for patch in used}
        assert all(patch.tobytes() in pooled for patches, _ in film.cut for patch in patches)


def test_videos_that_do_not_fit_a_text_or_a_model_are_one_line(tmp_path):
    av = pytest.importorskip("av")
    path = write_films(tmp_path, films(tmp_path, av, "<image>"), is_tar=False)
    for more, said in (
        ([], "1 videos, and not as many <video> in its prompt"),
        (["model.vision.video_token_id=null"], "videos, but the model reads none"),
    ):
        cfg = config(QWEN_VL, path, *FILMED, *more)
        with pytest.raises(UserError, match=said):
            ImageTextDataset(path, "train", [1.0, 0, 0], None, cfg, BYTES)
    path = write_films(tmp_path, films(tmp_path, av), is_tar=False)
    data = ImageTextDataset(path, "train", [1.0, 0, 0], None, config(QWEN_VL, path, *FILMED), BYTES)
    with pytest.raises(UserError, match="data.images.packed: .* once it is decoded"):
        PackedTexts(data, None)


def test_without_pyav_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"a.mp4: videos need .*; install mjax\[vision\]"):
        sampled_frames("a.mp4")


@exhaustive
def test_a_mesh_of_tp_pp_and_cp_equals_one_device():
    """The whole row is `python -m mjax.prove --features qwen-vl`."""
    record = compare("qwen-vl", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 2), steps=2)
    assert holds(record), record


@exhaustive
def test_a_tower_before_deltanet_is_equal_on_a_mesh():
    """Qwen3.5: no DeepStack, part of a head turns, and documents reset the state."""
    keys = [*FEATURES["gated deltanet"], "model.vision.deepstack_visual_indexes=[]"]
    keys += ["model.vision.window_size=0"]
    keys += ["model.attention.head_dim=16"]  # of which 4 pairs turn, as `mrope_section` says
    text = "deltanet+mlp, full+mlp, deltanet+mlp"
    keys += [f"model.layer_pattern='vision_2d+mlp*2, patch_merger, {text}'"]
    record = compare("qwen-vl", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 2), *keys, steps=2)
    assert holds(record), record


@exhaustive
def test_a_frozen_tower_stays_bit_for_bit_and_its_mergers_move():
    moving = "patch_merger", "deep_merger"
    assert_tower_stays("qwen-vl", ("vision_mlp", "patch_embedding"), moving)
