"""Laws of training on conversations: packing changes no gradient, and dp changes no batch."""

import json

import jax
import numpy as np
import pytest

from mjax.data.global_batches import balanced
from mjax.data.loader import build_datasets
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.batches import stream_hash
from tests.chats import chat_config, turns, write_lines
from tests.marks import exhaustive, quick, slow


def records(count: int, longest: int, seed: int = 0) -> list[dict]:
    """Conversations of one or two answers, of many lengths."""
    rng = np.random.default_rng(seed)
    texts = [
        "".join(rng.choice(list("abc "), n)) + "." for n in rng.integers(1, longest, 4 * count)
    ]
    return [turns(*texts[4 * n : 4 * n + rng.choice([2, 4])]) for n in range(count)]


def epoch_gradients(folder, path: str, rows: str, *more: str, devices: int = 1):
    """(the shape of a batch with all conversations, its loss and its gradients)."""
    keys = "data.seq_length=256", f"data.conversations.rows={rows}", *more
    cfg = chat_config(folder, path, *keys, "data.split=[1,0,0]")
    count = len(build_datasets(cfg, 1, 0)[0].rows.ranks)
    cfg = chat_config(
        folder,
        path,
        *keys,
        "data.split=[1,0,0]",
        f"train.global_batch_size={count}",
        "train.micro_batch_size=1",
    )
    data, _ = build_datasets(cfg, count, 0)
    batch = data.global_batch(np.arange(count), slice(None))
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    trainer.init()
    loss, _, gradients = trainer.grads(batch)
    return batch["tokens"].shape, jax.device_get({"loss": loss, "gradients": gradients})


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(a folder with conversations, their gradients in packed rows)."""
    folder = tmp_path_factory.mktemp("packed")
    path = write_lines(folder / "chats.jsonl", records(12, 9))
    shape, found = epoch_gradients(folder, path, "packed")
    assert shape[0] < 6 and shape[1] == 256
    return folder, path, found


@slow
@pytest.mark.parametrize("rows, width", quick([("padded", 256), ("longest", 128)], 0))
def test_packed_rows_have_the_gradients_of_single_conversations(rows, width, packed):
    folder, path, theirs = packed
    shape, mine = epoch_gradients(folder, path, rows)
    assert shape == (12, width)
    for a, b in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-7)


MESHES = [
    ("mesh.dp=2", "mesh.tp=2", "mesh.cp=2", "mesh.zero=3"),
    ("mesh.pp=2", "mesh.dp=2", "mesh.cp=2", "mesh.zero=1"),
    ("mesh.dp=4", "mesh.ep=2", "model.layer_pattern=full+experts", "model.moe.num_experts=4"),
]


@exhaustive
@pytest.mark.parametrize("keys", quick([(keys,) for keys in MESHES]), ids=lambda k: k[0][5:])
def test_packed_conversations_have_the_same_gradients_on_every_mesh(keys, tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", records(38, 9))
    model = "model.num_hidden_layers=2", *(key for key in keys if key.startswith("model."))
    model = *model, "train.neftune_alpha=5.0", "train.loss_divisor=sequences"
    model = *model, "train.global_batch_size=8", "train.micro_batch_size=1"
    shape, one = epoch_gradients(tmp_path, path, "packed", *model)
    assert shape[0] == 8
    _, several = epoch_gradients(tmp_path, path, "packed", *model, *keys, devices=8)
    for a, b in zip(*map(jax.tree.leaves, (several, one)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())


def run(monkeypatch, folder, paths: list[str], dp: int, *keys: str) -> list[str]:
    """Train; returns the digest of each batch."""
    hashes, step = [], Trainer.step

    def watched_step(self, batch, *gate):
        hashes.append(stream_hash(batch))
        return step(self, batch, *gate)

    cfg = chat_config(
        folder,
        f"[{','.join(paths)}]",
        "data.weights=[3,1]",
        "data.split=[0.8,0.2,0.0]",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        "schedule.decay_steps=6",
        "train.eval_interval=6",
        "train.eval_steps=1",
        "checkpoint.interval=3",
        f"mesh.dp={dp}",
        *keys,
    )
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", watched_step)
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:dp]))
    return hashes


def losses(folder) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@exhaustive
def test_a_run_goes_on_at_another_dp_with_the_same_batches(tmp_path, monkeypatch):
    paths = [write_lines(tmp_path / f"{n}.jsonl", records(30, 12, n)) for n in range(2)]
    whole = run(monkeypatch, tmp_path / "a", paths, 1, "train.steps=6", "train.eval_interval=null")
    first = run(monkeypatch, tmp_path / "b", paths, 4, "train.steps=3")
    rest = run(monkeypatch, tmp_path / "b", paths, 2, "train.steps=6")
    assert first + rest == whole and len(set(whole)) == 6
    np.testing.assert_allclose(losses(tmp_path / "a")[-3:], losses(tmp_path / "b")[-3:], rtol=1e-5)
    assert losses(tmp_path / "a")[5] < losses(tmp_path / "a")[0]


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_devices_share_the_cost_of_attention(dp):
    rng = np.random.default_rng(0)
    costs = np.array(
        [(rng.multinomial(4096, [1 / n] * n) ** 2).sum() for n in rng.integers(1, 40, 64)]
    )
    shares = costs[balanced(costs)].reshape(dp, -1).sum(1)
    unordered = costs.reshape(dp, -1).sum(1)
    assert shares.max() / shares.mean() < 1.05 < unordered.max() / unordered.mean()
    assert sorted(balanced(costs)) == list(range(64))


def test_every_process_reads_its_part_of_one_batch(tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", records(40, 6))
    for rows in "packed", "longest":
        cfg = chat_config(tmp_path, path, f"data.conversations.rows={rows}", "data.seq_length=128")
        data, _ = build_datasets(cfg, 16, 0)
        whole = data.global_batch(np.arange(4, 12), slice(None))
        parts = [data.global_batch(np.arange(4, 12), slice(n, n + 4)) for n in (0, 4)]
        for name, array in whole.items():
            np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
        sizes = data.rows.sizes(np.arange(4, 12))
        assert sorted((whole["segment_ids"] > 0).sum(1)) == sorted(sizes[:, 0])
        assert whole["tokens"].shape[1] == {"packed": 128, "longest": 64}[rows]
