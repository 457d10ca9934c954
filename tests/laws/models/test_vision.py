"""Laws of image encoders: patches, resized positions, padding and bad images.

`python -m mjax.prove` has a row of ViT.
"""

import io
import logging
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from mjax.config import load
from mjax.data.multimodal.images import ImageDataset
from mjax.data.multimodal.sources import samples_of
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_to_hf
from mjax.models import build, split
from mjax.models.base.context import Context, tokens_of
from mjax.models.flops import flops_by_part
from mjax.models.towers.vision import image_fields, patches_of, resize_matrix
from mjax.objectives.objective import objective_of
from mjax.prove import Cell, deviation, make_batch, make_images, make_trainer
from tests.marks import exhaustive, quick
from tests.measures import measured

VIT = [
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.layer_pattern=B",
    "model.position_embedding=learned",
    "model.vision={image_size: 8, patch_size: 4, num_labels: 3}",
    "train.objective=classify_images",
    "data.seq_length=6",
]


def batch_of(trainer, rows: int = 24) -> dict:
    batch = make_batch(rows) | make_images(trainer.cfg, rows, 16)
    return batch | {"row_label": np.arange(rows, dtype=np.int32) % 6 - 1}


def numbers(cell: Cell) -> dict:
    trainer = make_trainer("vit", cell)
    return measured(trainer, batch_of(trainer))


@exhaustive
@pytest.mark.parametrize(
    "cell",
    quick(
        [
            Cell({"cp": 2, "tp": 2, "pp": 2}, 1, 2, cp_type="all_gather"),
            Cell({"dp": 4, "tp": 2}, 3, 1),
        ],
    ),
)
def test_meshes_agree_on_images_with_and_without_a_class(cell):
    found, one = numbers(cell), numbers(Cell())
    assert found["sums"]["accuracy"] == one["sums"]["accuracy"]
    assert found["counts"] == one["counts"] == {"loss": 20, "accuracy": 20}
    assert deviation(found, one) <= 1e-5


def test_patches_are_cut_in_the_order_of_reading_channel_by_channel():
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = patches_of(images, 2)
    assert patches.shape == (2, 6, 12)
    np.testing.assert_array_equal(patches[1, 4], images[1, 2:, 2:4].transpose(2, 0, 1).ravel())


def test_resizing_keeps_what_is_constant_and_what_is_not_resized():
    np.testing.assert_allclose(resize_matrix(7, 11).sum(1), 1)
    np.testing.assert_array_equal(resize_matrix(5, 5), np.eye(5))


def test_gradients_of_positions_are_sums_in_fp32():
    """In bf16, 256 and 1 would be 256."""
    definition, params = split(build(load(None, ["data.mock=true", *VIT]).model, nnx.Rngs(0)))
    patches, info = jnp.zeros((300, 5, 4 * 4 * 3)), tokens_of((300, 5))

    def total(params):
        x = definition.bind(params).patch_embedding(patches, info, Context(), 2)
        return x.astype(jnp.float32).sum()

    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    gradient = jax.grad(total)(low)["patch_embedding"]["positions"]
    np.testing.assert_array_equal(gradient.astype(jnp.float32), 300)


def test_padding_moves_nothing_and_tokens_are_refused():
    model = build(load(None, ["data.mock=true", *VIT]).model, nnx.Rngs(0))
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)

    @jax.jit
    def padded(patches, segments):
        info = tokens_of(segments.shape, fields["positions"], segments)
        x = model.embed_patches(patches, info, Context(), 2)
        return model.row_logits(model.layers(x, info, Context())[0], info, Context())

    fields = image_fields(images, model.cfg.vision, 8)
    for filler in (0, 5):
        fields["patches"][:, 5:] = filler
        found = padded(fields["patches"], fields["segment_ids"])
        np.testing.assert_allclose(found, model.classify_images(jnp.asarray(images)), rtol=1e-5)
    with pytest.raises(UserError, match="reads images .model.vision., not tokens"):
        model(jnp.zeros((2, 8), jnp.int32))


def test_flops_are_those_of_patches_and_no_vocabulary():
    cfg = load(None, ["data.mock=true", *VIT]).model
    parts = flops_by_part(cfg, 6)
    width, heads = 32, 4
    layer = 4 * width * width + 3 * width * 4 * width  # gated MLP
    assert parts["head"] == 0
    assert parts["matmul"] == 6 * (layer + 3 * 16 * width)
    assert parts["attention"] == 12 * heads * 8 * 6


def test_images_for_speed_tests_are_made_of_the_step():
    objective = objective_of(load(None, ["data.mock=true", *VIT]))
    batch = {"positions": np.zeros((4, 6), np.int32)}
    made = objective.make_fields(batch, 1, 5, np.arange(4))
    assert made["patches"].shape == (4, 6, 48) and not made["patches"][:, [0, 5]].any()
    np.testing.assert_array_equal(made["segment_ids"][0], [1, 1, 1, 1, 1, 0])
    part = objective.make_fields({"positions": batch["positions"][2:]}, 1, 5, np.arange(2, 4))
    np.testing.assert_array_equal(part["patches"], made["patches"][2:])
    assert objective.make_fields(made, 1, 5, np.arange(4)) == {}


# ---- data ----------------------------------------------------------------------------------------


def encoded(color: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (12, 9), (color, 0, 0)).save(out, "png")
    return out.getvalue()


def write(folder, kind: str) -> str:
    """Six images of three classes, 40 times their class as red, in a source of this kind."""
    content = {f"{n % 3}/{n}": encoded(40 * (n % 3)) for n in range(6)}
    if kind == "folder":
        for name, data in content.items():
            path = folder / "f" / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return str(folder / "f")
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {"image": [{"bytes": data} for data in content.values()]}
        columns["label"] = [int(name[0]) for name in content]
        parquet.write_table(pyarrow.table(columns), folder / "x.parquet")
        return str(folder / "x.parquet")
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name, data in content.items():
            key = name.replace("/", "_")
            of_class = {"cls": name[0]} if int(name[2:]) % 2 else {"json": f'{{"label":{name[0]}}}'}
            for suffix, part in {"png": data, **of_class}.items():
                part = part if isinstance(part, bytes) else part.encode()
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))
    return str(folder / "*.tar")


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_sources_give_each_image_with_its_class(kind, tmp_path):
    cfg = load(None, [f"data.images.path={write(tmp_path, kind)}", *VIT, "data.images.std=[0.25]"])
    data = ImageDataset(cfg.data.images.path, "train", [1.0, 0, 0], 100, cfg)
    batch = data.batch(np.arange(12))
    assert sorted(batch["row_label"][:6]) == sorted(batch["row_label"][6:]) == [0, 0, 1, 1, 2, 2]
    for patches, label in zip(batch["patches"], batch["row_label"], strict=True):
        red = (40 * label / 255 - 0.5) / 0.25
        np.testing.assert_allclose(patches[1:5, :16], red, rtol=1e-6)
        np.testing.assert_allclose(patches[1:5, 16:], -2)
    again = ImageDataset(cfg.data.images.path, "train", [1.0, 0, 0], 100, cfg).batch([7, 3])
    for name, field in again.items():
        np.testing.assert_array_equal(field, batch[name][[7, 3]])


def test_bad_images_are_left_out_counted_and_named(tmp_path, caplog):
    path = write(tmp_path, "folder")
    (tmp_path / "f" / "1" / "broken.png").write_bytes(encoded(1)[:40])
    cfg = load(None, [f"data.images.path={path}", *VIT])
    data = ImageDataset(path, "train", [1.0, 0, 0], 100, cfg)
    with caplog.at_level(logging.WARNING):
        batches = [data.batch(np.arange(7 * e, 7 * e + 7)) for e in (0, 1)]
    assert all((batch["row_label"] == -1).sum() == 1 for batch in batches)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "1/broken.png cannot be used and is left out" in line and "1 of 7 so far" in line


def test_what_is_no_source_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no sample with a label"):
        samples_of(str(tmp_path / "empty"), ["label"])
    with pytest.raises(UserError, match="neither a folder nor a .tar nor a .parquet"):
        samples_of(str(tmp_path / "x.zip"), ["label"])
    (tmp_path / "x.tar").write_bytes(b"no tar")
    with pytest.raises(UserError, match="x.tar cannot be read"):
        samples_of(str(tmp_path / "x.tar"), ["label"])
    cfg = load(None, [f"data.images.path={write(tmp_path, 'folder')}", *VIT])
    fewer = cfg.model.vision.model_copy(update={"num_labels": 2})
    model = cfg.model.model_copy(update={"vision": fewer})
    with pytest.raises(UserError, match="class 2 is none of model.vision.num_labels=2"):
        path = cfg.data.images.path
        ImageDataset(path, "train", [1.0, 0, 0], 9, cfg.model_copy(update={"model": model}))


def test_a_config_of_vit_is_written_as_it_is_read():
    written = config_to_hf(load("configs/models/vit_l16.yaml").model)
    assert written["architectures"] == ["ViTForImageClassification"]
    assert written["num_labels"] == 1000 and written["image_size"] == 224
