"""Laws of images that are compared with texts: the loss of all pairs, on any mesh, and its data.

`python -m mjax.prove` has rows of CLIP and SigLIP.
"""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from mjax.config import load
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.errors import UserError
from mjax.infer.checks import require_decoder
from mjax.models import build
from mjax.models.base.params import split
from mjax.models.flops import flops_by_part
from mjax.objectives import contrastive
from mjax.objectives.contrastive import Contrastive, EmbeddedRows
from mjax.objectives.objective import objective_of
from mjax.prove import Cell, deviation, make_batch, make_trainer, with_items
from tests.marks import exhaustive, slow

DUAL = [
    "model.vocab_size=257",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.position_embedding=learned",
    "model.initializer_range=0.2",
    "train.objective=contrastive",
    "data.tokenizer=byte",
    "data.seq_length=16",
]
SIZES = "image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 24"
CLIP = [*DUAL, "model.layer_pattern='V,G'", f"model.vision={{{SIZES}}}"]
CLIP += ["model.contrastive={projection_dim: 12, eos_token_id: 256}"]
SIGLIP = [*DUAL, "model.layer_pattern='V,U'", f"model.vision={{{SIZES}, class_token: false}}"]
SIGLIP += ["model.contrastive={projection_dim: 16, loss: sigmoid}", "data.masked.pad_token_id=3"]
MOCK = ["data.mock=true"]


def batch_of(trainer) -> dict:
    """Rows of one text each, a third of which has no pair."""
    batch = make_batch(24)
    batch["segment_ids"] = np.ones_like(batch["segment_ids"])
    batch["positions"] = np.broadcast_to(np.arange(16, dtype=np.int32), (24, 16))
    return batch | with_items(trainer.cfg, batch)


def longhand(trainer, batch: dict, params: dict) -> jax.Array:
    """The loss of the whole batch on one device, from the logits of all its pairs."""
    model = trainer.definition.bind(params)
    vision, cut = trainer.cfg.model.vision, batch["patches"][:, 0]
    side, patch = vision.grid(trainer.cfg.image_size), vision.patch_size
    first = int(vision.class_token)
    patches = cut[:, first : first + side**2].reshape(24, side, side, -1, patch, patch)
    images = patches.transpose(0, 1, 4, 2, 5, 3).reshape(24, side * patch, side * patch, -1)
    pairs = np.flatnonzero(batch["row_label"] >= 0)
    embedded = model.image_embeddings(jnp.asarray(images))[pairs]
    logits = model.pair_logits(embedded, model.text_embeddings(batch["tokens"])[pairs])
    own = jnp.eye(len(pairs))
    if trainer.cfg.model.contrastive.loss == "sigmoid":
        return -jnp.sum(jax.nn.log_sigmoid((2 * own - 1) * logits)) / len(pairs)
    both = jax.nn.log_softmax(logits, 1) + jax.nn.log_softmax(logits, 0)
    return -jnp.sum(own * both) / 2 / len(pairs)


@exhaustive
@pytest.mark.parametrize(
    "feature, cell",
    [
        ("clip", Cell({"dp": 2, "ep": 2}, 1)),
        ("siglip", Cell({"dp": 4}, 3)),
        ("clip", Cell({"pp": 2, "cp": 2, "tp": 2}, cp_type="all_gather")),
        ("siglip", Cell({"cp": 2, "tp": 2, "dp": 2}, 1, cp_type="a2a")),
    ],
)
def test_loss_and_gradients_are_those_of_all_pairs_on_one_device(feature, cell, monkeypatch):
    monkeypatch.setattr(contrastive, "LOGIT_ROWS", 4)  # parts and a rest of a device's rows
    few = [] if "pp" in cell.mesh else ["model.num_hidden_layers=2", "model.layer_pattern='V,G'"]
    few = [key.replace("G", "GU"[feature == "siglip"]) for key in few]
    trainer = make_trainer(feature, cell, "model.hidden_dropout=0.0", *few)
    batch = batch_of(trainer)
    loss, _, gradients = trainer.grads(batch)
    params = jax.device_get(trainer.params())
    wanted = jax.jit(jax.value_and_grad(lambda p: longhand(trainer, batch, p)))(params)
    found = jax.device_get((loss, gradients))
    # What pulls and what pushes the scale nearly cancel: terms of the loss's size, 10.
    scales = [of[1]["joint_embedding"].pop("logit_scale") for of in (found, wanted)]
    np.testing.assert_allclose(*scales, rtol=1e-5, atol=1e-5)
    assert deviation(found, wanted) <= 1e-5


@slow
def test_logits_are_never_those_of_all_pairs(monkeypatch):
    monkeypatch.setattr(contrastive, "LOGIT_ROWS", 8)
    cfg = load(None, [*CLIP, *MOCK])
    model, rows = build(cfg.model, nnx.Rngs(0)), 48

    def loss(vectors):
        side = EmbeddedRows(vectors, jnp.arange(rows), jnp.ones(rows, bool))
        return Contrastive(cfg)._of_rows(model, side, side)[0].sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((rows, 12))))
    assert "[8,48]" in program and "[48,48]" not in program


def test_what_has_the_own_text_for_the_likeliest_is_counted_among_pairs():
    objective = objective_of(load(None, [*CLIP, *MOCK])).for_evaluation()
    model = build(objective.cfg.model, nnx.Rngs(0))
    texts = jnp.eye(12)[:4]
    images = texts.at[2].set(texts[1]).at[1].set(texts[3])  # 2 is taken for 1, and 1 for 3
    numbers, counts = jnp.arange(4), jnp.array([True, True, True, False])
    sides = [EmbeddedRows(vectors, numbers, counts) for vectors in (images, texts)]
    _, right = objective._of_rows(model, *sides)
    np.testing.assert_array_equal(right[:3], [1, 1, 0])  # 3 is no pair: nothing is taken for it


def test_flops_are_those_of_both_towers_and_of_the_pool():
    parts = flops_by_part(load(None, [*SIGLIP, *MOCK]).model, 16)
    share = 16 / 16  # 4 patches padded to 16, for 16 tokens
    tower, text = 4 * 16 * 16 + 2 * 16 * 24, 4 * 32 * 32 + 3 * 32 * 128
    pool, patches = 2 * 16 * 16, 48 * 16
    assert parts["head"] == 0
    assert parts["matmul"] == pytest.approx(6 * (share * (tower + pool + patches) + text))


def test_images_for_speed_tests_are_made_of_the_step():
    objective = objective_of(load(None, [*CLIP, *MOCK]))
    batch = {"tokens": np.ones((4, 16), np.int32)}
    made = objective.make_fields(batch, 1, 5, np.arange(4))
    assert made["patches"].shape == (4, 1, 16, 48) and (made["row_label"] == 0).all()
    part = objective.make_fields({"tokens": batch["tokens"][2:]}, 1, 5, np.arange(2, 4))
    np.testing.assert_array_equal(part["patches"], made["patches"][2:])
    assert objective.make_fields(made, 1, 5, np.arange(4)) == {}


def test_tokens_alone_are_refused():
    cfg = load(None, [*CLIP, *MOCK]).model
    with pytest.raises(UserError, match="compares images with texts and predicts no token"):
        build(cfg, nnx.Rngs(0))(jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(UserError, match="continues no text"):
        require_decoder(cfg)


@slow
def test_a_batch_of_several_micro_batches_is_refused():
    trainer = make_trainer("clip", Cell())
    batch = make_batch(48)
    with pytest.raises(UserError, match="48 rows are 2 micro-batches; raise train.micro_batch_si"):
        trainer.grads(batch | with_items(trainer.cfg, batch))


# ---- data ----------------------------------------------------------------------------------------


def dataset(folder, keys: list[str], lines: list[dict]) -> ImageTextDataset:
    Image.new("RGB", (8, 8), (255, 0, 0)).save(folder / "a.png")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:50])
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = load(None, [*keys, f"data.images.path={path}"])
    tokenizer = load_tokenizer("byte")
    return ImageTextDataset(path, "train", [1.0, 0, 0], 10, cfg, tokenizer)


PAIRS = [
    {"images": ["a.png"], "text": "red"},
    {"images": ["broken.png"], "text": "blue"},
    {"images": ["a.png"], "text": "x" * 30},
]


@pytest.mark.parametrize("keys, padding, sees", [(CLIP, 0, 0), (SIGLIP, 3, 1)])
def test_pairs_become_rows(keys, padding, sees, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        batch = dataset(tmp_path, keys, PAIRS).batch(np.arange(3))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "broken.png cannot be used" in said
    assert sorted(batch["row_label"]) == [-1, 0, 0]
    rows = {tuple(row): n for n, row in enumerate(batch["tokens"])}
    red = rows[(*b"red", 256, *[padding] * 12)]
    np.testing.assert_array_equal(batch["segment_ids"][red], [1] * 4 + [sees] * 12)
    assert (*b"x" * 15, 256) in rows  # cut, with its end
    first = int(keys is CLIP)
    np.testing.assert_allclose(batch["patches"][red, 0, first : first + 4, :16], 1)
    assert batch["patches"].shape == (3, 1, 16, 48)


@pytest.mark.parametrize(
    "line, keys, said",
    [
        ({"text": "a"}, [], "x.jsonl:1: to compare an image with a text, give one image"),
        (PAIRS[0] | {"prompt": "a"}, [], "x.jsonl:1: to compare an image with a text"),
        (PAIRS[0], ["model.contrastive.eos_token_id=9"], "eos_token_id=9 is not the end that"),
    ],
)
def test_what_is_no_pair_is_named(line, keys, said, tmp_path):
    with pytest.raises(UserError, match=said):
        dataset(tmp_path, [*CLIP, *keys], [line])


def test_padding_and_what_follows_the_end_move_no_text():
    model = build(load(None, [*CLIP, *MOCK]).model, nnx.Rngs(0))
    embed = jax.jit(lambda tokens: model.text_embeddings(tokens))
    ids = np.array([[5, 6, 256, 0], [5, 6, 256, 256], [5, 6, 256, 9], [5, 7, 256, 0]], np.int32)
    found = embed(ids)
    np.testing.assert_allclose(found[1:3], found[:1].repeat(2, 0), rtol=1e-6)
    assert np.abs(found[3] - found[0]).max() > 1e-3
    assert split(model)[0].specs["joint_embedding"]["logit_scale"].precise
