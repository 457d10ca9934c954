"""Laws of rows that hold several texts with images: each text once, and the loss of texts apart."""

import jax
import numpy as np
import pytest

from mjax.data.loader import build_datasets
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.packed import PackedTexts, packed
from mjax.errors import UserError
from mjax.prove import deviation
from mjax.train import Trainer
from mjax.train.batch import field_maker
from tests.batches import stream_hash
from tests.laws.models.test_clip import CLIP
from tests.laws.models.test_llava import LLAVA
from tests.laws.models.test_tiles import TILED
from tests.laws.run.test_image_data import BROKEN, BYTES, config, texts, write
from tests.marks import exhaustive


def best_fit(costs: list[int], room: int) -> list[list[int]]:
    """Best fit decreasing, looking at every row each time."""
    rows: list[list[int]] = []
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        left = [room - sum(costs[n] for n in row) for row in rows]
        fitting = [free for free in left if free >= costs[number]]
        if not fitting:
            rows.append([number])
        else:
            last = max(n for n, free in enumerate(left) if free == min(fitting))
            rows[last].append(number)
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_best_fit_decreasing_and_fills_its_rows(seed):
    costs = np.random.default_rng(seed).integers(1, 60, 300).tolist()
    rows = packed([(cost,) for cost in costs], (100,))
    filled = [sum(costs[n] for n in row) for row in rows]
    assert sorted(n for row in rows for n in row) == list(range(300)) and max(filled) <= 100
    assert len(rows) == len(best_fit(costs, 100)) < 1.05 * sum(costs) / 100 + 1


def test_no_row_has_more_items_than_its_towers_read():
    rng = np.random.default_rng(0)
    costs = list(zip(rng.integers(1, 30, 200), rng.integers(0, 3, 200), strict=True))
    rows = packed(costs, (100, 2))
    assert sorted(n for row in rows for n in row) == list(range(200))
    assert all(sum(costs[n][1] for n in row) <= 2 for row in rows)
    assert packed([(101, 0), (3, 0), (0, 3)], (100, 2)) == [[0], [1], [2]]  # alone, if at all


def of(kind, path, *keys):
    cfg = config(LLAVA, path, "data.seq_length=64", "model.vision.max_images=4", *keys)
    texts = ImageTextDataset(path, "train", [1.0, 0, 0], None, cfg, BYTES)
    return texts if kind is ImageTextDataset else kind(texts, None), cfg


@exhaustive
def test_packed_texts_have_the_loss_and_gradients_of_texts_apart(tmp_path, caplog):
    """One of them has a broken image, and is in neither."""
    path = write(tmp_path, "tar", texts())
    found, rows = [], []
    for kind in (ImageTextDataset, PackedTexts):
        data, _ = of(kind, path)
        batch = data.batch(np.arange(len(data)))
        rows.append(len(data))
        size = f"train.global_batch_size={len(data)}"
        keys = size, "train.micro_batch_size=1", "precision.compute=float32", "mesh.dp=1"
        _, cfg = of(kind, path, *keys)
        trainer = Trainer(cfg, devices=jax.devices()[:1])
        trainer.init()
        batch |= field_maker(cfg, trainer.objective)(batch, 0, np.arange(len(data)))
        loss, norm, grads = trainer.grads(batch)
        found.append({"loss": loss, "norm": norm, "grads": grads})
        used = batch["segment_ids"][batch["row_label"] >= 0]
        assert sum(len(set(row[row > 0])) for row in used) == 12 - 1
    assert rows[1] < rows[0] == 12
    assert deviation(*found) < 1e-6
    assert f"{BROKEN:03}" in caplog.text


def test_rows_do_not_depend_on_processes_and_epochs_hold_each_text_once(tmp_path):
    path = write(tmp_path, "lines", texts(9))
    streams = []
    for workers in (0, 2):
        data, cfg = of(
            PackedTexts, path, f"data.images.workers={workers}", "data.images.packed=true"
        )
        assert data.max_documents == 1 + max(map(len, data.rows)) and not data.padded
        epochs = [data.batch(np.arange(n * len(data), (n + 1) * len(data))) for n in (0, 1)]
        streams.append([stream_hash(epoch) for epoch in epochs])
        rows = [sorted(row.tobytes() for row in epoch["tokens"]) for epoch in epochs]
        assert rows[0] == rows[1], "the same rows, in another order"
    assert streams[0] == streams[1] and len(set(streams[0])) == 2
    assert isinstance(build_datasets(cfg, 4, 0)[0], PackedTexts)


@pytest.mark.parametrize(
    ("keys", "said"), [(TILED, "does not go with tiles"), (CLIP, "no meaning without texts")]
)
def test_what_cannot_be_packed_is_one_line(keys, said):
    with pytest.raises(UserError, match=said):
        config(keys, "x.jsonl", "data.images.packed=true")
