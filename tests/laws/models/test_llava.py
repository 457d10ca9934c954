"""Laws of texts with images: what is spliced where, what counts, frozen towers, generation.

`python -m mjax.prove` has a row of LLaVA.
"""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from flax.traverse_util import flatten_dict
from PIL import Image

from mjax.config import load
from mjax.config.schema.audio import AudioConfig
from mjax.config.schema.vision import VisionConfig
from mjax.data.base.tokenizer import encode_with_items, load_tokenizer
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.models import build, definition_of
from mjax.models.base.params import split
from mjax.models.flops import flops_by_part
from mjax.models.towers.modalities import Items, features_of
from mjax.objectives.objective import objective_of
from mjax.prove import Cell, compare, deviation, holds, make_batch, make_trainer, with_items
from tests.generation import made_ids
from tests.laws.models.frozen_tower import assert_tower_stays
from tests.marks import exhaustive, quick, slow

LLAVA = [
    "model.vocab_size=258",
    "model.hidden_size=32",
    "model.num_hidden_layers=3",
    "model.layer_pattern='V,[P],G'",
    "model.intermediate_size=40",
    "model.initializer_range=0.2",
    "model.vision={image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 24, "
    "num_attention_heads: 2, image_token_id: 257, max_images: 2}",
    "data.tokenizer=byte",
    "data.seq_length=24",
]
MOCK = [*LLAVA, "data.mock=true"]
PATCHES = 4


def test_features_are_those_of_the_images_of_a_row_in_order():
    tokens = np.array([[5, 9, 9, 3, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
    three = AudioConfig(max_source_positions=3, audio_token_id=9)  # of an item, in rows of 16
    found = features_of(tokens, three, Items(2, None, 16))
    np.testing.assert_array_equal(found[0], [-1, 0, 1, -1, 2, 16, 17, 18])
    assert (found[1] == -1).all()
    patches = VisionConfig(image_size=4, patch_size=4, image_token_id=9)  # behind a class token
    found = features_of(tokens[:, :4], patches, Items(2, None, 16))
    np.testing.assert_array_equal(found[0], [-1, 1, 17, -1])


@slow
def test_each_picture_moves_what_stands_from_its_first_patch_on():
    cfg = load(None, MOCK).model
    model = build(cfg, nnx.Rngs(0))
    run = jax.jit(lambda tokens, images: model(tokens, images=images))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (1, 16)).astype(np.int32)
    tokens[:, 2:6] = tokens[:, 9:13] = 257
    images = rng.normal(size=(1, 2, 8, 8, 3)).astype(np.float32)
    whole = run(tokens, images)
    for image, first in ((0, 2), (1, 9)):
        changed = images.copy()
        changed[0, image, 0, 0] += 1
        moved = np.abs(run(tokens, changed) - whole).max((0, 2))
        np.testing.assert_array_equal(moved[:first], 0)
        assert (moved[first:] > 1e-6).all()  # a tower's patches see each other
    alone = run(tokens[:, :9], images[:, :1])
    np.testing.assert_allclose(alone, whole[:, :9], atol=1e-5 * np.abs(whole).max())


def test_patches_and_what_is_predicted_from_them_count_in_no_loss():
    objective = objective_of(load(None, MOCK))
    batch = {
        "tokens": jnp.array([[1, 257, 257, 2, 3]]),
        "labels": jnp.array([[257, 257, 2, 3, 4]]),
        "loss_mask": jnp.ones((1, 5)),
    }
    np.testing.assert_array_equal(objective.mask(batch), [[0, 0, 0, 1, 1]])
    assert objective.counts(batch)["loss"] == 2


@exhaustive
@pytest.mark.parametrize(
    "feature", quick(["llava", "llava-onevision"], 1)
)  # whose newline moves, too
def test_a_frozen_tower_stays_bit_for_bit_and_has_no_moments(feature):
    fewer = "model.num_hidden_layers=3", "model.layer_pattern='V,[P],G'"
    assert_tower_stays(feature, ("vision_mlp", "patch_embedding"), ("projector",), *fewer)


@exhaustive
def test_a_norm_before_the_projector_is_the_same_on_a_mesh():
    keys = ["model.layer_pattern='vision+mlp,normed_projector,full+mlp*2'"]
    keys += ["model.num_hidden_layers=4", "model.vision.class_token=false"]
    keys += ["model.vision.pixel_shuffle=true"]
    assert holds(compare("llava", Cell({"cp": 2, "tp": 2}), *keys, steps=1))


SLOW_PROJECTOR = "optimizer.lr_multipliers={'projector.*': 0.125, matrix: 0.5}"
ADAM, MUON, LION = "optimizer.name=adamw", "optimizer.name=muon", "optimizer.name=optax.lion"


def parameters_after(steps: int, cell: Cell, *keys: str) -> dict:
    """Parameters by name before and after some steps of a constant rate."""
    trainer = make_trainer(
        "llava", cell, "schedule.decay=constant", "schedule.warmup_steps=0", *keys
    )
    batch = make_batch(24)
    batch |= with_items(trainer.cfg, batch)
    before = flatten_dict(jax.device_get(trainer.params()), sep=".")
    for _ in range(steps):
        trainer.step(batch)
    return before, flatten_dict(jax.device_get(trainer.params()), sep=".")


@exhaustive
@slow
@pytest.mark.parametrize("optimizer", [ADAM, *quick([MUON, LION])])
def test_a_part_of_its_own_rate_moves_as_a_run_of_that_rate(optimizer):
    cell, roles = Cell({"dp": 2}, 1), flatten_dict(make_trainer("llava", Cell()).specs, sep=".")
    before, found = parameters_after(1, cell, optimizer, "schedule.lr=0.008", SLOW_PROJECTOR)
    rates = {0.001: 0, 0.004: 0, 0.008: 0}
    for rate in rates:
        _, whole = parameters_after(1, cell, optimizer, f"schedule.lr={rate}")
        for name, array in whole.items():
            own = 0.004 if roles[name].role == "matrix" else 0.008
            own = 0.001 if name.startswith("projector.") else own
            if rate == own:
                rates[rate] += (array != before[name]).any()
                bound = 1e-7 if optimizer == MUON else 0  # XLA may sum in another order
                np.testing.assert_allclose(found[name], array, rtol=0, atol=bound, err_msg=name)
    assert min(rates.values()) > 2


@exhaustive
@pytest.mark.parametrize("cell", [Cell({"dp": 4, "tp": 2}, 3), Cell({"pp": 2, "cp": 2})])
def test_rates_of_parts_are_the_same_on_every_mesh(cell):
    keys = "schedule.lr=0.008", SLOW_PROJECTOR
    before, one = parameters_after(2, Cell(), *keys)
    _, found = parameters_after(2, cell, *keys)
    moved = {name: found[name] - before[name] for name in one}
    assert deviation(moved, {name: one[name] - before[name] for name in one}) <= 1e-3


def test_a_rate_for_no_parameter_is_one_line():
    with pytest.raises(UserError, match="optimizer.lr_multipliers: 'projektor.*' is no role"):
        make_trainer("llava", Cell(), "optimizer.lr_multipliers={'projektor.*': 0.1}")


def test_flops_are_those_of_patches_and_of_texts():
    cfg = load(None, MOCK).model
    parts = flops_by_part(cfg, 24)
    share = 2 * 16 / 24  # two images of 16 tokens with padding
    tower = 4 * 16 * 16 + 2 * 16 * 24
    text = 4 * 32 * 32 + 3 * 32 * 40
    patches, projector = 48 * 16, 16 * 32 + 32 * 32
    assert parts["head"] == 6 * 32 * 258
    assert parts["matmul"] == pytest.approx(6 * (share * (tower + projector + patches) + text))
    scores = 12 * 32 * 24 / 2 + share * 12 * 16 * 16
    assert parts["attention"] == pytest.approx(scores)
    frozen = flops_by_part(cfg, 24, ["vision_mlp.*", "patch_embedding.*"])  # forward alone
    less = 4 * share * (tower + patches) + 2 / 3 * share * 12 * 16 * 16
    assert sum(parts.values()) - sum(frozen.values()) == pytest.approx(less)


def test_images_for_speed_tests_stand_first_in_a_row():
    objective = objective_of(load(None, MOCK))
    tokens = np.ones((3, 24), np.int32)
    made = objective.make_fields({"tokens": tokens}, 1, 5, np.arange(3))
    assert (made["tokens"][:, :PATCHES] == 257).all() and made["patches"].shape == (3, 2, 16, 48)
    assert not made["patches"][:, 1].any() and made["patches"][:, 0, 1:5].all()
    np.testing.assert_array_equal(made["vision_features"][:, :5], [[1, 2, 3, 4, -1]] * 3)
    assert set(objective.make_fields(made, 1, 5, np.arange(3))) == {"vision_features"}


# ---- data and generation -------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """A file of texts with two, no and one image, one whose image is broken, one too long."""
    for name in "ab":
        Image.new("RGB", (8, 8), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:50])
    lines = [
        {"images": ["a.png", "b.png"], "prompt": "<image>+<image>", "text": "ab"},
        {"text": "no image"},
        {"images": ["b.png"], "prompt": "is<image>", "text": "b"},
        {"images": ["broken.png"], "prompt": "<image>", "text": "c"},
        {"text": "x" * 30},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "x.jsonl"


def test_texts_with_items_become_rows(data, caplog):
    cfg = load(None, [*LLAVA, f"data.images.path={data}"])
    dataset = ImageTextDataset(data, "train", [1.0, 0, 0], 10, cfg, load_tokenizer("byte"))
    with caplog.at_level(logging.WARNING):
        batch = dataset.batch(np.arange(10))
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2 and "broken.png cannot be used" in said[0]
    assert "x.jsonl:5 cannot be used" in said[1] and "31 tokens: data.seq_length is 24" in said[1]
    rows = {row.tobytes(): n for n, row in enumerate(batch["tokens"][:5])}
    assert len(rows) == 4  # the two that are left out are alike
    first = [257] * 4 + [ord("+")] + [257] * 4 + list(b"ab") + [256]
    two = next(n for n, row in enumerate(batch["tokens"]) if list(row[:12]) == first)
    np.testing.assert_array_equal(batch["loss_mask"][two], [0] * 8 + [1] * 3 + [0] * 13)
    np.testing.assert_array_equal(batch["labels"][two, 8:11], [*b"ab", 256])
    red = (np.array([ord("a"), ord("b")]) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(batch["patches"][two, :, 1, 0], red, rtol=1e-5)
    texts = [row[:8].tolist() for row in batch["tokens"]]
    plain = texts.index(list(b"no image"))
    assert not batch["patches"][plain].any() and batch["loss_mask"][plain].sum() == 8
    again = dataset.batch([7, 3])
    for name, field in again.items():
        np.testing.assert_array_equal(field, batch[name][[7, 3]])


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "x.jsonl:1: not a JSON line"),
        ('{"prompt": "a"}', 'x.jsonl:1: not {"images"'),
        ('{"images": ["a.png"], "text": "b"}', "1 images, and not as many <image> in its prompt"),
    ],
)
def test_a_line_that_is_no_sample_is_named(line, said, tmp_path):
    (tmp_path / "x.jsonl").write_text(line)
    cfg = load(None, MOCK)
    with pytest.raises(UserError, match=said):
        ImageTextDataset(tmp_path / "x.jsonl", "train", [1.0, 0, 0], 1, cfg, load_tokenizer("byte"))


WORDS = [  # an id, the texts of a sample with one image, and what uses the id
    (ord("a"), "see <image>", "a", "x.jsonl:1 uses token 97, which stands for an image; set model"),
    (ord("s"), "see <image>", "a", "x.jsonl:1 uses token 115"),
    (256, "<image>", "a", "x.jsonl:1 uses token 256"),  # the end
]


@pytest.mark.parametrize("token, prompt, text, said", WORDS)
def test_an_id_that_texts_use_stands_for_no_image(token, prompt, text, said, data):
    row = {"image": "a.png", "prompt": prompt, "text": text}
    data.write_text(json.dumps(row))
    cfg = load(None, [*LLAVA, f"data.images.path={data}", f"model.vision.image_token_id={token}"])
    with pytest.raises(UserError, match=said):
        ImageTextDataset(data, "train", [1.0, 0, 0], 1, cfg, load_tokenizer("byte"))


def test_a_mark_that_is_an_unknown_word_stands_for_no_image(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    cfg = load(None, [*LLAVA, "data.mock=true", "model.vision.image_token_id=0"]).model
    assert encode_with_items("a <image> a", tokenizer, cfg) == [1, 0, 0, 0, 0, 1]
    with pytest.raises(UserError, match="a text uses token 0"):
        encode_with_items("a <image> other", tokenizer, cfg)


@exhaustive
def test_a_run_is_continued_by_generate_with_items(data, tmp_path, monkeypatch, capsys):
    from mjax.train.__main__ import main as train

    keys = [f"data.images.path={data}", f"run.dir={tmp_path / 'run'}", "train.steps=2"]
    keys += ["train.global_batch_size=8", "train.micro_batch_size=1", "precision.compute=float32"]
    monkeypatch.setattr("sys.argv", ["train", *LLAVA, *keys])
    train()
    capsys.readouterr()
    image = str(data.parent / "a.png")
    told = ["--ckpt", str(tmp_path / "run"), "--tokenizer", "byte", "--max-new-tokens", "3"]
    generate([*told, "--image", image, "--prompt", "see <image>", "--temperature", "0"])
    with pytest.raises(UserError, match="has 8 tokens 257, and 1 <image> of 4"):
        generate([*told, "--image", image, "--prompt", "<image><image>"])
    with pytest.raises(UserError, match="--image .*x.jsonl: .*give a picture"):
        generate([*told, "--image", str(data), "--prompt", "<image>"])


def test_images_for_a_model_that_reads_none_are_refused():
    cfg = load(None, ["data.mock=true", "model.num_hidden_layers=1"]).model
    model = definition_of(cfg), split(build(cfg, nnx.Rngs(0)))[1], cfg
    with pytest.raises(UserError, match="<image> is given, but the model has no tower"):
        made_ids(model, [[1, 2]], 2, {"vision": np.zeros((1, 8, 8, 3), np.float32)})


@slow
def test_a_ring_is_refused_by_name():
    trainer = make_trainer("llava", Cell({"cp": 2}, cp_type="ring"))
    batch = make_batch(24)
    with pytest.raises(UserError, match="cp_type=ring lacks full masks"):
        trainer.step(batch | with_items(trainer.cfg, batch))
