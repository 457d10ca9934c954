"""Laws of texts with images and sounds: streams of several towers, sound files, generation.

`python -m mjax.prove` has a row of both; those of images alone are in `test_llava.py`.
"""

import json
import logging

import jax
import numpy as np
import pytest
import soundfile
from flax import nnx
from PIL import Image

from mjax.config import load
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.multimodal.audio import log_mel
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.models import build
from mjax.models.flops import flops_by_part
from mjax.models.towers.audio import rows_of_frames
from mjax.objectives.objective import objective_of
from tests.laws.models.frozen_tower import assert_tower_stays
from tests.marks import exhaustive, slow

IMAGE, SOUND = 257, 258
MIMO = [
    "model.vocab_size=259",
    "model.hidden_size=32",
    "model.num_hidden_layers=5",
    "model.layer_pattern='S,V,[Q],[P],G'",  # towers may stand in any order
    "model.intermediate_size=40",
    "model.initializer_range=0.2",
    "model.vision={image_size: 4, patch_size: 4, hidden_size: 16, intermediate_size: 24, "
    f"num_attention_heads: 2, image_token_id: {IMAGE}, max_images: 2}}",
    "model.audio={num_mel_bins: 4, max_source_positions: 3, hidden_size: 24, "
    f"intermediate_size: 40, num_attention_heads: 2, audio_token_id: {SOUND}, max_audios: 2}}",
    "data.tokenizer=byte",
    "data.seq_length=24",
]
MOCK = [*MIMO, "data.mock=true"]


@slow
def test_each_item_moves_what_stands_from_its_first_token_on():
    model = build(load(None, MOCK).model, nnx.Rngs(0))
    run = jax.jit(lambda tokens, images, audio: model(tokens, images=images, audio=audio))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (1, 16)).astype(np.int32)
    tokens[:, 2], tokens[:, 4:7], tokens[:, 8], tokens[:, 10:13] = IMAGE, SOUND, IMAGE, SOUND
    images = rng.normal(size=(1, 2, 4, 4, 3)).astype(np.float32)
    audio = rng.normal(size=(1, 2, 6, 4)).astype(np.float32)
    whole = np.asarray(run(tokens, images, audio))  # before they change
    for given, number, first in ((images, 0, 2), (audio, 0, 4), (images, 1, 8), (audio, 1, 10)):
        before = given.copy()
        given[0, number, -1] += 1
        moved = np.abs(run(tokens, images, audio) - whole).max((0, 2))
        given[...] = before
        np.testing.assert_array_equal(moved[:first], 0)
        assert (moved[first:] > 1e-6).all()  # tokens of a tower see each other


def test_a_token_has_the_five_frames_of_two_convolutions():
    mels = np.arange(1.0, 13).reshape(1, 6, 2)
    rows = rows_of_frames(mels, 4).reshape(4, 5, 2)
    for token in range(3):
        for place, frame in enumerate(range(2 * token - 2, 2 * token + 3)):
            want = mels[0, frame] if 0 <= frame < 6 else 0
            np.testing.assert_array_equal(rows[token, place], np.broadcast_to(want, 2))
    assert not rows[3].any()


@exhaustive
def test_a_frozen_tower_of_sounds_stays_bit_for_bit_and_the_other_moves():
    moving = "audio_projector", "vision_mlp", "patch_embedding"
    assert_tower_stays("mimo", ("audio_mlp", "frame_embedding"), moving)


def test_flops_are_those_of_each_tower_and_of_the_text():
    cfg = load(None, MOCK).model
    parts, share = flops_by_part(cfg, 24), 2 * 16 / 24  # two items of 16 tokens with padding
    vision = 4 * 16 * 16 + 2 * 16 * 24 + 48 * 16
    audio = 4 * 24 * 24 + 2 * 24 * 40 + 2 * 4 * 3 * 24 + 24 * 3 * 24  # two frames a token
    projectors = 16 * 32 + 24 * 32 + 2 * 32 * 32
    text = 4 * 32 * 32 + 3 * 32 * 40
    assert parts["matmul"] == pytest.approx(6 * (share * (vision + audio + projectors) + text))
    scores = 12 * 32 * 24 / 2 + share * 12 * 16 * (16 + 24)
    assert parts["attention"] == pytest.approx(scores)
    frozen = flops_by_part(cfg, 24, ["audio_mlp.*", "frame_embedding.*"])  # forward alone
    less = 4 * share * audio + 2 / 3 * share * 12 * 16 * 24
    assert sum(parts.values()) - sum(frozen.values()) == pytest.approx(less)


def test_items_for_speed_tests_stand_first_in_a_row_and_count_in_no_loss():
    objective = objective_of(load(None, MOCK))
    made = objective.make_fields({"tokens": np.ones((2, 24), np.int32)}, 1, 5, np.arange(2))
    np.testing.assert_array_equal(made["tokens"][:, :5], [[SOUND] * 3 + [IMAGE, 1]] * 2)
    np.testing.assert_array_equal(made["audio_features"][:, :5], [[0, 1, 2, -1, -1]] * 2)
    np.testing.assert_array_equal(made["vision_features"][:, :5], [[-1, -1, -1, 1, -1]] * 2)
    assert made["frames"].shape == (2, 2, 16, 20) and made["frames"][:, 0, :3].all()
    assert not made["frames"][:, 1].any() and not made["frames"][:, 0, 3:].any()
    labels = np.roll(made["tokens"], -1, 1)
    mask = objective.mask(made | {"labels": labels, "loss_mask": np.ones((2, 24))})
    np.testing.assert_array_equal(mask[0], [0] * 4 + [1] * 19 + [0])


# ---- data and generation -------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """Texts with items: one, two of either, none, one broken, one of another rate, too many."""
    Image.new("RGB", (4, 4), (90, 0, 0)).save(tmp_path / "a.png")
    rng = np.random.default_rng(0)
    for name, rate in (("a", 16000), ("b", 16000), ("slow", 8000)):
        soundfile.write(tmp_path / f"{name}.wav", 0.1 * rng.normal(size=(700, 2)), rate)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:20])
    lines = [
        {"audio": ["a.wav"], "prompt": "<audio>=", "text": "a"},
        {"images": ["a.png"] * 2, "audio": ["b.wav", "a.wav"], "prompt": "<audio><image>" * 2}
        | {"text": "four"},
        {"text": "no item"},
        {"audio": ["cut.wav"], "prompt": "<audio>", "text": "c"},
        {"audio": ["slow.wav"], "prompt": "<audio>", "text": "d"},
        {"audio": ["a.wav"] * 3, "prompt": "<audio>" * 3, "text": "e"},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "x.jsonl"


def test_texts_with_items_become_rows(data, caplog):
    cfg = load(None, [*MIMO, f"data.images.path={data}"])
    dataset = ImageTextDataset(data, "train", [1.0, 0, 0], 12, cfg, load_tokenizer("byte"))
    with caplog.at_level(logging.WARNING):
        batch = dataset.batch(np.arange(12))
    said = "\n".join(sorted(record.getMessage() for record in caplog.records))
    assert said.count("cannot be used") == 3 and "3 of 6 so far" in said
    assert "cut.wav cannot" in said and "8000 samples a second; resample it to 16000" in said
    assert "3 audio: model.audio.max_audios is 2" in said
    texts = [row.tolist() for row in batch["tokens"][:6]]
    ids = [SOUND] * 3 + [IMAGE] + [SOUND] * 3 + [IMAGE] + list(b"four") + [256]
    four = next(n for n, row in enumerate(texts) if row[: len(ids)] == ids)
    np.testing.assert_array_equal(batch["loss_mask"][four], [0] * 7 + [1] * 5 + [0] * 12)
    for number, name in enumerate("ba"):
        samples, _ = soundfile.read(data.parent / f"{name}.wav", dtype="float32")
        rows = rows_of_frames(log_mel(samples.mean(1), 4, 6)[None], 16)
        np.testing.assert_array_equal(batch["frames"][four, number], rows[0])
    assert batch["patches"][four, :, 1].any()
    plain = next(n for n, row in enumerate(texts) if row[:7] == list(b"no item"))
    assert not batch["frames"][plain].any() and not batch["patches"][plain].any()


def test_sounds_for_a_model_that_hears_none_are_named(data):
    keys = [key for key in MIMO if "audio" not in key and "pattern" not in key]
    keys += ["model.layer_pattern='V,[P],G*3'", f"data.images.path={data}"]
    cfg = load(None, keys)
    with pytest.raises(UserError, match="x.jsonl:1: audio, but model.layer_pattern reads none"):
        ImageTextDataset(data, "train", [1.0, 0, 0], 1, cfg, load_tokenizer("byte"))


@exhaustive
def test_a_run_is_continued_by_generate_with_both(data, tmp_path, monkeypatch, capsys):
    from mjax.train.__main__ import main as train

    keys = [f"data.images.path={data}", f"run.dir={tmp_path / 'run'}", "train.steps=2"]
    keys += ["train.global_batch_size=8", "train.micro_batch_size=1", "precision.compute=float32"]
    monkeypatch.setattr("sys.argv", ["train", *MIMO, *keys])
    train()
    capsys.readouterr()
    folder = data.parent
    common = ["--ckpt", str(tmp_path / "run"), "--tokenizer", "byte", "--max-new-tokens", "3"]
    common += ["--no-bos", "--temperature", "0", "--image", str(folder / "a.png")]
    lines = []
    for name in "ab":
        generate([*common, "--audio", str(folder / f"{name}.wav"), "--logprobs"] + PROMPT)
        lines.append(capsys.readouterr().out)
    assert len(lines[0].splitlines()) == 3 and lines[0] != lines[1]
    with pytest.raises(UserError, match=r"has 3 tokens 258, and 0 <audio> of 3 tokens are given"):
        generate([*common, *PROMPT])
    with pytest.raises(UserError, match="slow.wav: 8000 samples a second"):
        generate([*common, "--audio", str(folder / "slow.wav"), *PROMPT])


PROMPT = ["--prompt", "<image><audio>="]
