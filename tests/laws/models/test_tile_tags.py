"""Laws of images in tiles behind tags (NVLM, arXiv 2409.11402): rows, loss, meshes, generation."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from mjax.config import load
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.tiles import expanded, nearest_size, tag_ids, tagged_images
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.interop.pretrained import Pretrained
from mjax.models import build, definition_of
from mjax.models.base.params import split
from mjax.prove import Cell, deviation, make_trainer
from mjax.train.batch import field_maker
from tests.generation import made_ids
from tests.marks import exhaustive, quick, slow

IMAGE = 257
BYTES = load_tokenizer("byte")
TAGS = ["<1>", "<2>", "<3>", "<4>", "<all>"]
# A class token stands before the patches, and is in no text.
VISION = "model.vision={image_size: 8, patch_size: 4, num_channels: 3, hidden_size: 16, "
VISION += "intermediate_size: 24, num_attention_heads: 4, image_token_id: 257, max_images: 2, "
VISION += "image_grid_pinpoints: [[8, 8], [8, 16], [16, 8], [16, 16]], "
VISION += "tile_tags: ['<1>', '<2>', '<3>', '<4>', '<all>']}"
KEYS = [
    "model.vocab_size=258",
    "model.layer_pattern='V,[P],G*2'",
    VISION,
    "model.hidden_dropout=0",
    "data.tokenizer=byte",
    "data.seq_length=96",
]
TEXT = [
    *KEYS,
    "model.hidden_size=32",
    "model.num_hidden_layers=4",
    "model.intermediate_size=40",
    "model.initializer_range=0.2",
]
SHUFFLE = "model.vision.pixel_shuffle=true"


def shades(*rows: tuple[int, ...]) -> np.ndarray:
    """A picture of squares, 8 pixels a side, each of one gray."""
    return np.kron(np.array(rows), np.ones((8, 8)))[..., None].repeat(3, 2).astype(np.uint8)


PICTURES = {
    "one": shades((40,)),
    "wide": shades((50, 60)),
    "tall": shades((70,), (80,)),
    "four": shades((90, 100), (110, 120)),
    "odd": np.full((8, 21, 3), 130, np.uint8),  # 2.6 by 1: nearest to 2 by 1
    "thin": np.full((40, 1, 3), 140, np.uint8),
}
LINES = [
    {"images": ["wide.png"], "prompt": "is<image>?", "text": "w"},
    {"images": ["one.png", "tall.png"], "prompt": "<image>+<image>", "text": "two"},
    {"text": "no image"},
    {"images": ["four.png"], "prompt": "<image>", "text": "4"},
    {"images": ["odd.png"], "prompt": "see <image>", "text": "odd"},
    {"images": ["thin.png"], "prompt": "<image>", "text": "thin"},
    {"images": ["one.png"], "prompt": "<image>", "text": "1"},
    {"text": "nor here"},
]
# The tags of the tiles of each image, and the grays of each row, in order.
SEEN = {
    "is?w": (["<1>", "<2>", "<all>"], [50, 60, 50]),
    "+two": (["<all>", "<1>", "<2>", "<all>"], [40, 70, 80, 70]),
    "no image": ([], []),
    "4": (["<1>", "<2>", "<3>", "<4>", "<all>"], [90, 100, 110, 120, 90]),
    "see odd": (["<1>", "<2>", "<all>"], [130] * 3),
    "thin": (["<1>", "<2>", "<all>"], [140] * 3),
    "1": (["<all>"], [40]),
    "nor here": ([], []),
}


@pytest.fixture
def data(tmp_path):
    """Texts with images of several sizes, two images, and none."""
    for name, pixels in PICTURES.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "x.jsonl"


def batch_of(data, keys, tokenizer=BYTES):
    cfg = load(None, [*keys, f"data.images.path={data}"])
    dataset = ImageTextDataset(data, "train", [1.0, 0, 0], None, cfg, tokenizer)
    return dataset.batch(np.arange(len(LINES)))


def written_out(tags: list[str], each: int) -> list[int]:
    """The ids of an image by hand: those of bytes, and `each` of a tile behind its tag."""
    return [id for tag in tags for id in [*tag.encode(), *[IMAGE] * each]]


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys, each", [([], 4), ([SHUFFLE], 1)])
def test_rows_are_tags_and_tiles_and_the_whole_view_written_out(data, keys, each):
    batch = batch_of(data, [*TEXT, *keys])
    images = {name: written_out(tags, each) for name, (tags, _) in SEEN.items()}
    first = written_out(["<all>"], each)
    wanted = {
        "is?w": [*b"is", *images["is?w"], *b"?", *b"w", 256],
        "+two": [*first, *b"+", *images["+two"][len(first) :], *b"two", 256],
        "4": [*images["4"], *b"4", 256],
        "see odd": [*b"see ", *images["see odd"], *b"odd", 256],
        "thin": [*images["thin"], *b"thin", 256],
        "1": [*images["1"], *b"1", 256],
        "no image": [*b"no image", 256],
        "nor here": [*b"nor here", 256],
    }
    answers = {"is?w": "w", "+two": "two", "see odd": "odd"}
    rows = {tuple(ids): name for name, ids in wanted.items()}
    for row, length in enumerate(batch["segment_ids"].sum(1)):
        ids = [*batch["tokens"][row, :1], *batch["labels"][row, :length]]
        name = rows.pop(tuple(ids))
        first = max(length - len(answers.get(name, name)) - 1, 0)
        np.testing.assert_array_equal(batch["loss_mask"][row, :first], 0)
        np.testing.assert_array_equal(batch["loss_mask"][row, first:length], 1)
        grays = (np.array(SEEN[name][1]) / 255 - 0.5) / 0.5
        found = batch["patches"][row, :, 1, 0]  # behind the class token
        np.testing.assert_allclose(found[: len(grays)], grays, rtol=1e-5)
        assert not batch["patches"][row, len(grays) :].any()
    assert not rows and batch["patches"].shape[1] == 2 * 5


def test_tags_and_image_are_tokens_of_their_own_where_a_tokenizer_has_them(data, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<|endoftext|>", "<image>", *TAGS])  # 256, 257, 258 ...
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    batch = batch_of(data, [*TEXT, "model.vocab_size=263", SHUFFLE], tokenizer)
    tag = {name: 258 + n for n, name in enumerate(TAGS)}
    ids = {tuple(row[row >= 257]) for row in batch["tokens"]}
    assert ids == {
        tuple(id for name in tags for id in (tag[name], IMAGE)) for tags, _ in SEEN.values()
    }


def test_the_grid_is_of_the_nearest_proportions_as_megatron_chooses_it():
    """Equally near ones: the larger where it has less than twice the pixels."""
    vision = load(None, [*TEXT, "data.mock=true"]).model.vision
    sizes = {
        (8, 8): (8, 8),
        (11, 11): (8, 8),  # 2 * 121 < 256
        (12, 12): (16, 16),
        (8, 11): (8, 8),
        (10, 16): (8, 16),  # 1.6 is nearer to 2 than to 1
        (16, 10): (16, 8),  # 0.625 is nearer to 0.5 than to 1
        (16, 13): (16, 16),  # 0.81 is nearer to 1
        (1, 400): (8, 16),
        (400, 1): (16, 8),
    }
    assert {size: nearest_size(*size, vision) for size in sizes} == sizes


# ---- loss and gradients --------------------------------------------------------------------------


def numbers(data, cell: Cell, *keys: str) -> dict:
    """Loss, norm and gradients of the rows of `data` on a mesh."""
    own = *KEYS, "data.mock=false", f"data.images.path={data}", *keys
    trainer = make_trainer("llava", cell, *own)
    batch = batch_of(data, [*TEXT, *keys])
    batch |= field_maker(trainer.cfg, trainer.objective)(batch, 0, np.arange(len(LINES)))
    loss, norm, grads = trainer.grads(batch)
    return jax.device_get({"loss": loss, "norm": norm, "grads": grads})


ALL = Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, rows=8, cp_type="a2a")
CASES = [
    (Cell({"tp": 2}, 0, 4, rows=8), (SHUFFLE,)),
    (Cell({"dp": 2}, 3, 2, rows=8), ()),
    (ALL, ()),
    (ALL, (SHUFFLE,)),
]


@pytest.fixture(scope="module")
def one_device():
    return {}


@exhaustive
@slow
@pytest.mark.parametrize("cell, keys", CASES, ids=str)
def test_loss_and_gradients_with_tags_are_the_same_on_meshes(data, cell, keys, one_device):
    if keys not in one_device:
        one_device[keys] = numbers(data, Cell(rows=8), *keys)
    one = one_device[keys]
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(one["grads"]))
    assert deviation(numbers(data, cell, *keys), one) <= 1e-5


@exhaustive
def test_the_loss_is_that_of_answers_alone_from_a_forward_pass(data):
    """No tag, no tile and nothing before an answer counts; tags are read."""
    batch = batch_of(data, TEXT)
    trainer = make_trainer(
        "llava", Cell(rows=8), *KEYS, "data.mock=false", f"data.images.path={data}"
    )
    batch |= field_maker(trainer.cfg, trainer.objective)(batch, 0, np.arange(len(LINES)))
    loss, _, grads = trainer.grads(batch)
    model = definition_of(trainer.cfg.model).bind(trainer.params())
    patches = batch["patches"][:, :, 1:5].reshape(8, 10, 2, 2, 4, 4, 3)
    images = patches.transpose(0, 1, 2, 4, 3, 5, 6).reshape(8, 10, 8, 8, 3)
    logprobs = jax.nn.log_softmax(model(batch["tokens"], images=images))
    total = count = 0
    for row in range(8):
        length = int(batch["segment_ids"][row].sum())
        labels = batch["labels"][row]
        last_image = max(np.flatnonzero(labels[:length] == IMAGE), default=-1)
        for place in range(last_image + 1, length):
            if batch["loss_mask"][row, place] and batch["tokens"][row, place] != IMAGE:
                total, count = total - logprobs[row, place, labels[place]], count + 1
    np.testing.assert_allclose(loss, total / count, rtol=1e-5)
    assert np.abs(np.asarray(grads["embedding"])[[*b"<>1234al"]]).max(1).all()
    assert not np.asarray(grads["embedding"])[IMAGE].any()


# ---- generation ----------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("keys, each", quick([([], 4), ([SHUFFLE], 1)], 1))
def test_generation_with_tags_is_the_forward_pass_by_hand(
    data, tmp_path, monkeypatch, capsys, keys, each
):
    cfg = load(None, [*TEXT, *keys, "data.mock=true"]).model
    definition, params = split(build(cfg, nnx.Rngs(0)))
    model = definition_of(cfg).bind(params)
    tiles = []
    for name in ("four", "one"):
        picture = PICTURES[name]
        for top in range(0, len(picture), 8):
            tiles += [picture[top : top + 8, left : left + 8] for left in range(0, len(picture), 8)]
    whole = Image.fromarray(PICTURES["four"]).resize((8, 8), Image.Resampling.BICUBIC)
    tiles.insert(4, np.asarray(whole))
    images = (np.array(tiles, np.float32)[None] / 255 - 0.5) / 0.25
    ids = [*b"a", *written_out(TAGS, each), *b"b", *written_out(["<all>"], each), *b"="]
    wanted = []
    for _ in range(4):
        logprobs = jax.nn.log_softmax(model(np.array([ids]), images=images)[0, -1])
        ids.append(int(logprobs.argmax()))
        wanted.append((ids[-1], float(logprobs.max())))
    given = Pretrained(cfg, definition, params, None, None)
    monkeypatch.setattr("mjax.generate.__main__.load_model", lambda args: (given, "float32", BYTES))
    told = ["--ckpt", "x", "--prompt", "a<image>b<image>=", "--temperature", "0", "--logprobs"]
    told += ["--max-new-tokens", "4", "--image-mean", "0.5", "--image-std", "0.25"]
    generate([*told, *(f"--image={data.parent / name}.png" for name in ("four", "one"))])
    lines = [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()]
    assert [int(id) for id, _ in lines] == [id for id, _ in wanted]
    np.testing.assert_allclose(
        [float(p) for _, p in lines], [p for _, p in wanted], rtol=1e-4, atol=2e-5
    )


@slow
def test_texts_without_images_and_too_few_tiles():
    cfg = load(None, [*TEXT, "data.mock=true"]).model
    definition, params = split(build(cfg, nnx.Rngs(0)))
    model = definition, params, cfg
    images, ((ids,), ()) = tagged_images([[PICTURES["wide"]], []], cfg.vision, BYTES)
    assert images.shape == (2, 3, 8, 8, 3) and not images[1].any()
    prompts = [expanded([*b"a", IMAGE, *b"b"], IMAGE, [ids])[0], [*b"none"]]
    both = made_ids(model, prompts, 2, {"vision": images[0]})
    assert both[1:] == made_ids(model, prompts[1:], 2)
    with pytest.raises(UserError, match="a prompt has 12 tokens 257, and 2 <image> of 4 tokens"):
        made_ids(model, prompts, 2, {"vision": images[0, :2]})
    with pytest.raises(UserError, match="a text has 2 <image>, and 1 pictures are given"):
        expanded([IMAGE, IMAGE], IMAGE, [ids])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tags, said",
    [
        ("['<1>', '<all>']", "model.vision.tile_tags: 2 for 4 tiles and a whole view; give one"),
        ("[a, b, c, a, e]", r"model.vision.tile_tags=.* has a tag twice; give one for each"),
        ("[a, b, c, '', e]", "tile_tags"),
        ("[a, b, c, d, e], image_grid_pinpoints: []", "tile_tags: 5 for 0 tiles"),
        ("[a, b, c, d, e], vision_aspect_ratio: anyres_max_4", "has no effect with tile_tags"),
    ],
)
def test_tags_that_fit_no_tiles_are_one_line(tags, said):
    given = VISION[: VISION.index("tile_tags")] + f"tile_tags: {tags}}}"
    if "pinpoints: []" in tags:
        given = given.replace("image_grid_pinpoints: [[8, 8], [8, 16], [16, 8], [16, 16]], ", "")
    with pytest.raises(UserError, match=said) as refused:
        load(None, [*TEXT, given, "data.mock=true"])
    assert "\n" not in str(refused.value)


def test_tagged_texts_are_not_packed(data):
    with pytest.raises(UserError, match="data.images.packed=True does not go with tiles"):
        load(None, [*TEXT, f"data.images.path={data}", "data.images.packed=true"])


@pytest.mark.parametrize(
    "encode, said",
    [
        (lambda tag: [1], "has the same ids, or none, for several; give tags"),
        (lambda tag: [], "has the same ids, or none, for several"),
        (lambda tag: [*tag.encode(), IMAGE], "'<1>' holds token 257, which stands for an image"),
    ],
)
def test_a_tokenizer_that_tells_no_tags_apart_is_one_line(data, encode, said):
    tokenizer = replace(BYTES, encode_batch=lambda texts: [encode(text) for text in texts])
    with pytest.raises(UserError, match=said):
        batch_of(data, TEXT, tokenizer)
    with pytest.raises(UserError, match=said):
        tag_ids(load(None, [*TEXT, "data.mock=true"]).model.vision, tokenizer)
