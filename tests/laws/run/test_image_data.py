"""Laws of samples with images: one stream for any number of processes, any source and any dp."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjax.config import load
from mjax.data.base.tokenizer import load_tokenizer, train_tokenizer
from mjax.data.loader import build_datasets, make_loader
from mjax.data.multimodal.decoders import Decoders, decoders
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.pixels import decode_image, norm_image
from mjax.errors import UserError
from mjax.post.sft import main as sft
from tests.batches import stream_hash
from tests.decoding import end_itself, exit_with_4, length
from tests.laws.models.test_clip import CLIP
from tests.laws.models.test_llava import LLAVA
from tests.laws.models.test_vision import VIT
from tests.marks import exhaustive, quick, slow
from tests.processes import start_process

KINDS = ("lines", "tar", "parquet", "folder")
BROKEN = 5  # of the samples


def encoded(number: int) -> bytes:
    """A JPEG of a size of its own; one is cut."""
    rng, out = np.random.default_rng(number), io.BytesIO()
    pixels = rng.integers(0, 256, (9 + number, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "jpeg")
    return out.getvalue()[: 100 if number == BROKEN else None]


def texts(count: int = 12) -> list[dict]:
    """Samples with no, one and two images."""
    found = []
    for number in range(count):
        images = [encoded(number + 100 * place) for place in range(number % 3)]
        prompt = "<image>" * len(images) + "?"
        found.append({"images": images, "prompt": prompt, "text": f"answer {number}"})
    return found


def write(folder: Path, kind: str, samples: list[dict]) -> str:
    """A source of this kind with these samples; returns its path."""
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(samples), folder / "x.parquet")
        return str(folder / "x.parquet")
    files, lines = {}, []
    for number, sample in enumerate(samples):
        key = f"{number:03}"
        names = [f"{key}.{place}.jpg" for place in range(len(sample["images"]))]
        files |= dict(zip(names, sample["images"], strict=True))
        facts = {name: said for name, said in sample.items() if name != "images"}
        lines.append(json.dumps(facts | {"images": names}) + "\n")
        files[f"{key}.json"] = json.dumps(facts).encode()
    if kind == "tar":
        with tarfile.open(folder / "x.tar", "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(f"in/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return str(folder / "x.tar")
    target = folder / kind
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)
    if kind == "folder":
        return str(target)
    (target / "x.jsonl").write_text("".join(lines))
    return str(target / "x.jsonl")


def config(keys: list[str], path, *more: str):
    return load(None, [*keys, f"data.images.path={path}", "data.split=[1,0,0]", *more])


def by_text(path: str, keys: list[str]) -> dict[bytes, list[np.ndarray]]:
    """The rows of an epoch by their tokens."""
    data = ImageTextDataset(path, "train", [1.0, 0, 0], None, config(keys, path), BYTES)
    batch = data.batch(np.arange(len(data)))
    names = sorted(set(batch) - {"tokens"})
    return {
        row.tobytes(): [batch[name][n] for name in names] for n, row in enumerate(batch["tokens"])
    }


BYTES = load_tokenizer("byte")


@pytest.mark.parametrize("keys", [LLAVA, CLIP])
def test_every_source_gives_the_same_rows(keys, tmp_path):
    samples = texts()
    if keys is CLIP:
        pairs = [sample for sample in samples if len(sample["images"]) == 1]
        samples = [{"images": pair["images"], "text": pair["text"]} for pair in pairs]
    rows = {kind: by_text(write(tmp_path, kind, samples), keys) for kind in KINDS}
    assert len(rows["lines"]) == len(samples)
    for kind in KINDS[1:]:
        assert set(rows[kind]) == set(rows["lines"])
        for tokens, fields in rows["lines"].items():
            for mine, other in zip(rows[kind][tokens], fields, strict=True):
                np.testing.assert_array_equal(mine, other, err_msg=kind)


@slow
@pytest.mark.parametrize("keys", quick([LLAVA, VIT], 0, 1))
def test_the_stream_is_the_same_for_any_processes_parts_and_restart(keys, tmp_path):
    samples = texts(21)
    if keys is VIT:
        samples = [{"images": [encoded(n)], "label": n % 3} for n in range(21)]
    path = write(tmp_path, "tar", samples)

    def stream(processes: int, first: int, count: int, rows=None) -> list[dict]:
        cfg = config(keys, path, f"data.images.workers={processes}")
        data, _ = build_datasets(cfg, 100, 0)
        return list(make_loader(data, lambda step: (8 * step, 8), first, count, rows=rows))

    whole = stream(0, 0, 7)  # 56 samples: epochs of 21 end within a batch
    hashes = [stream_hash(batch) for batch in whole]
    assert len(set(hashes)) == 7
    labels = np.concatenate([batch["row_label"] for batch in whole])[:42]
    assert (labels == -1).sum() == 2  # the broken one, once an epoch
    for batch in whole:
        left_out = batch["row_label"] == -1
        assert keys is VIT or not batch["loss_mask"][left_out].any()
        assert not batch["patches"][left_out].any()  # not of its other image, either
    assert [stream_hash(batch) for batch in stream(1, 0, 7)] == hashes
    assert [stream_hash(batch) for batch in stream(3, 4, 3)] == hashes[4:]
    parts = [stream(3, 4, 3, lambda n, p=p: slice(p * n // 4, (p + 1) * n // 4)) for p in range(4)]
    for full, *shards in zip(whole[4:], *parts, strict=True):
        joined = {name: np.concatenate([shard[name] for shard in shards]) for name in full}
        assert stream_hash(joined) == stream_hash(full)


def test_sources_are_blended_by_weight(tmp_path):
    sources = []
    for number, kind in enumerate(("tar", "lines")):
        samples = [sample | {"text": f"{number}"} for sample in texts()]
        sources.append(write(tmp_path, kind, samples))
    cfg = config(LLAVA, f"[{','.join(sources)}]", "data.weights=[3,1]")
    data, _ = build_datasets(cfg, 80, 0)
    ends = [list(batch["tokens"].ravel()) for batch in map(data.batch, np.arange(80)[:, None])]
    counts = [sum(row.count(ord(name)) for row in ends) for name in "01"]
    broken = 80 - sum(counts)
    assert abs(counts[0] - 3 * counts[1]) <= 3 * broken and broken < 12
    epoch, _ = build_datasets(config(LLAVA, f"[{','.join(sources)}]"), 24, 0)
    assert np.bincount(epoch.dataset_index).tolist() == [12, 12]
    with pytest.raises(UserError, match="one entry for each of data.images.path"):
        config(LLAVA, f"[{','.join(sources)}]", "data.weights=[1]")


def test_bad_images_of_a_tar_are_named_once_and_those_without_a_text_counted(tmp_path, caplog):
    path = write(tmp_path, "tar", [*texts(), {"images": [encoded(7)]}])
    cfg = config(LLAVA, path, "data.images.workers=2")
    with caplog.at_level(logging.WARNING):
        data = ImageTextDataset(path, "train", [1.0, 0, 0], None, cfg, BYTES)
        batches = [data.batch(np.arange(12 * epoch, 12 * epoch + 12)) for epoch in (0, 1)]
    assert all((batch["row_label"] == -1).sum() == 1 for batch in batches)
    lacking, bad = (record.getMessage() for record in caplog.records)
    assert "1 of 13 samples have no text and are left out: x.tar/in/012" in lacking
    assert "x.tar/in/005.0.jpg cannot be used" in bad and "1 of 12 so far" in bad


TEMPLATE = """{% for m in messages %}{{ m["role"][0] + ":" + m["content"] }}{{
"\\n" if m["role"] == "user" else eos_token }}{% endfor %}{{ "a:" if add_generation_prompt }}"""


def chat_tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    """Bytes and an end, with a chat template beside it; its path."""
    train_tokenizer([], 257, folder / "tokenizer.json")
    said = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return str(folder / "tokenizer.json")


def test_conversations_have_their_loss_on_answers(tmp_path):
    name = chat_tokenizer(tmp_path)
    said = ("<image>+", "one", "<image>", "two")
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)
    ]
    llava = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(said)]
    images = {"images": [encoded(1), encoded(2)]}
    samples = [images | {"messages": messages}, images | {"conversations": llava}]
    rows = []
    for number, sample in enumerate(samples):
        (folder := tmp_path / f"{number}").mkdir()
        path = write(folder, KINDS[number], [sample])
        cfg = config(LLAVA, path, f"data.tokenizer={name}", "data.seq_length=40")
        tokenizer = load_tokenizer(name)
        rows.append(ImageTextDataset(path, "train", [1, 0, 0], None, cfg, tokenizer).batch([0]))
    for field, array in rows[0].items():
        np.testing.assert_array_equal(array, rows[1][field])
    tokens, labels = rows[0]["tokens"][0], rows[0]["labels"][0]
    end = tokenizer.eod_id
    learned = [tokenizer.decode([i]) for i in labels[rows[0]["loss_mask"][0] > 0] if i != end]
    assert "".join(learned) == "onetwo"
    assert rows[0]["loss_mask"].sum() == 8 and list(tokens).count(257) == 8


def test_an_answer_of_weight_0_is_read_and_not_trained_on(tmp_path):
    name, said = chat_tokenizer(tmp_path), [("user", "<image>"), ("assistant", "one")] * 2
    messages = [{"role": role, "content": text} for role, text in said]
    messages[1]["weight"], messages[3]["content"] = 0, "two"
    path = write(tmp_path, "lines", [{"images": [encoded(1), encoded(2)], "messages": messages}])
    cfg = config(LLAVA, path, f"data.tokenizer={name}", "data.seq_length=40")
    tokenizer = load_tokenizer(name)
    batch = ImageTextDataset(path, "train", [1, 0, 0], None, cfg, tokenizer).batch([0])
    learned = batch["labels"][0][batch["loss_mask"][0] > 0]
    assert tokenizer.decode(learned) == "two" and learned[-1] == tokenizer.eod_id
    assert "one" in tokenizer.decode([i for i in batch["tokens"][0] if i < 257])


@exhaustive
def test_a_model_with_images_is_fine_tuned_on_conversations(tmp_path, monkeypatch):
    name = chat_tokenizer(tmp_path)
    samples = [
        {
            "images": [encoded(n)],
            "messages": [
                {"role": "user", "content": "<image>?"},
                {"role": "assistant", "content": "ab"},
            ],
        }
        for n in range(4)
    ]
    path = write(tmp_path, "lines", samples)
    keys = [f"data.images.path={path}", f"data.tokenizer={name}", f"run.dir={tmp_path / 'run'}"]
    keys += ["train.steps=8", "train.global_batch_size=8", "schedule.lr=0.03"]
    keys += ["data.split=[1,0,0]", "checkpoint.interval=null", "precision.compute=float32"]
    keys += ["data.seq_length=24", "log.interval=1", "train.micro_batch_size=1"]
    monkeypatch.setattr(sys, "argv", ["sft", *LLAVA, *keys])
    assert sft() == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    "template, sample, said",
    [
        (TEMPLATE, {"messages": [{"role": "user"}]}, r"x.jsonl:1: not .*\('content'\)"),
        (TEMPLATE, {"messages": [{"role": "user", "content": "a"}]}, "the assistant says nothing"),
        (
            TEMPLATE,
            {"messages": [{"role": "assistant", "content": "a", "weight": 2}]},
            "weight 2, not 0 or 1",
        ),
        ("{{ messages | length }}", {"conversations": [{"from": "gpt", "value": "b"}]}, "rewrites"),
    ],
)
def test_what_is_no_conversation_is_named(template, sample, said, tmp_path):
    name = chat_tokenizer(tmp_path, template)
    path = write(tmp_path, "lines", [sample | {"images": []}])
    cfg = config(LLAVA, path, f"data.tokenizer={name}")
    with pytest.raises(UserError, match=said):
        ImageTextDataset(path, "train", [1, 0, 0], None, cfg, load_tokenizer(name))


def test_pixels_are_normed_as_the_formula_says():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    wanted = (pixels / 255 - mean) / std
    np.testing.assert_allclose(norm_image(pixels, mean, std), wanted, atol=1e-6)
    one = norm_image(pixels, mean[:1], std[:1])
    np.testing.assert_array_equal(one, norm_image(pixels, mean[:1] * 3, std[:1] * 3))


def test_a_large_jpeg_is_decoded_small_and_stays_the_picture():
    ramp = np.linspace(0, 255, 2000)
    picture = np.stack(
        [np.broadcast_to(ramp, (2000, 2000)), np.broadcast_to(ramp[:, None], (2000, 2000))], -1
    )
    picture = np.concatenate([picture, picture[..., :1]], -1).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "jpeg", quality=95)
    small = decode_image(out.getvalue(), 40, 3).astype(float)
    places = (np.arange(40) + 0.5) / 40 * 255
    assert np.abs(small[..., 0] - places)[:, 1:-1].max() < 4
    assert np.abs(small[..., 1] - places[:, None])[1:-1].max() < 4


# ---- processes -----------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    "dies, how", quick([(end_itself, r"signal 9 \(SIGKILL\)"), (exit_with_4, "exit code 4")], 1)
)
def test_a_process_that_ends_is_one_line_and_the_next_batch_has_a_new_one(dies, how):
    pool, found = Decoders(2), {}
    reads = [lambda n=n: b"x" * n for n in range(9)]

    def keep(place, array):
        found[place] = int(array)

    pool.decode(length, reads, keep)
    assert found == {n: n for n in range(9)}
    with pytest.raises(UserError, match=f"data.images.workers: .* ended by {how}; free memory"):
        pool.decode(dies, reads, keep)
    found.clear()
    pool.decode(length, reads, keep)
    assert len(found) == 9


@slow
def test_what_decodes_imports_no_jax_and_ends_with_its_run():
    code = """
import os, sys
from functools import partial
import numpy as np
from mjax.data.multimodal.decoders import Decoders
from mjax.data.multimodal.pixels import decode_image
from mjax.data.multimodal.audio import decode_frames
assert "jax" not in sys.modules

def parent(task):
    try:
        return int(open(f"/proc/{task}/stat").read().rpartition(")")[2].split()[1])
    except OSError:  # one of another program, which has ended meanwhile
        return None

pool = Decoders(2)
pool.decode(partial(np.frombuffer, dtype="uint8"), [lambda: b"x"] * 9, lambda *_: None)
tasks = filter(str.isdigit, os.listdir("/proc"))
print(*[task for task in tasks if parent(task) == os.getpid()], flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    started, until = done.stdout.split(), time.monotonic() + 20
    assert 1 <= len(started) <= 2
    while any(is_decoder(task) for task in started):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_decoder(task: str, group: int | None = None) -> bool:
    """Whether a process decodes; of a `group`, where one is given."""
    try:
        decodes = b"mjax.data.multimodal.decoders" in Path(f"/proc/{task}/cmdline").read_bytes()
        return decodes and group in (None, os.getpgid(int(task)))
    except OSError:  # it has ended
        return False


@slow
def test_a_run_whose_process_is_killed_saves_and_exits_with_2(tmp_path):
    path = write(tmp_path, "tar", [{"images": [encoded(n)], "label": n % 3} for n in range(4)])
    keys = [*VIT, f"data.images.path={path}", "data.split=[1,0,0]", f"run.dir={tmp_path / 'run'}"]
    keys += ["train.steps=1000000", "train.eval_interval=null", "data.images.workers=1"]
    keys += ["train.global_batch_size=8", "train.micro_batch_size=1", "log.interval=10"]
    command = [sys.executable, "-m", "mjax.train", *keys]
    run = start_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    found = [task.name for task in Path("/proc").iterdir() if task.name.isdigit()]
    mine = [task for task in found if is_decoder(task, run.pid)]
    assert len(mine) == 1
    os.kill(int(mine[0]), signal.SIGKILL)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 2, err
    assert "data.images.workers: a process that decodes images and sounds ended by signal 9" in err
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_as_many_processes_as_asked_serve_all_data_of_a_run():
    assert decoders(3) is decoders(3) and decoders(3).count == 3
    assert 1 <= decoders(None).count <= 16
