"""Laws of data without use: a run says what is wrong, where, and trains on nothing else."""

import io
import json

import jax
import numpy as np
import pytest
from PIL import Image

from mjax.checkpoint.base.retention import LowestLoss
from mjax.config import load
from mjax.data import IndexedDatasetWriter
from mjax.data.blend import BlendedDataset
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.loader import build_datasets
from mjax.data.multimodal.decoders import attempt
from mjax.data.multimodal.pixels import decode_image
from mjax.data.multimodal.readers import FIRST, Skipped
from mjax.errors import NonFiniteLoss, UserError
from mjax.objectives.objective import objective_of
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.models.test_clip import CLIP
from tests.laws.models.test_llava import LLAVA
from tests.laws.models.test_mimo import MIMO
from tests.laws.models.test_vision import VIT
from tests.laws.run.test_failures import events, losses, records, run, steps
from tests.marks import exhaustive, slow

WHOLE = "data.split=[1,0,0]"


def png(folder, count: int) -> list[str]:
    """Names of images in a folder."""
    rng, names = np.random.default_rng(0), [f"{n}.png" for n in range(count)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / name)
    return names


def lines(folder, rows: list[dict], name="x.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def missing(folder) -> tuple[list[str], str]:
    return VIT, lines(folder, [{"image": f"no{n}.png", "label": n % 3} for n in range(8)])


def no_pairs(folder) -> tuple[list[str], str]:
    return CLIP, lines(folder, [{"image": f"no{n}.png", "text": "a"} for n in range(8)])


def no_bytes(folder) -> tuple[list[str], str]:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    image = {"bytes": None, "path": "no.png"}
    rows = [{"image": image, "label": n % 3} for n in range(8)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
    return VIT, str(folder / "x.parquet")


def too_long(folder) -> tuple[list[str], str]:
    return LLAVA, lines(folder, [{"text": "word " * 20} for _ in range(8)])


def too_long_packed(folder) -> tuple[list[str], str]:
    keys, path = too_long(folder)
    return [*keys, "data.images.packed=true"], path


def no_words(folder) -> tuple[list[str], str]:
    return CLIP, lines(folder, [{"image": name, "text": ""} for name in png(folder, 8)])


def not_finite(folder) -> tuple[list[str], str]:
    soundfile = pytest.importorskip("soundfile")
    wave = np.zeros(700, np.float32)
    wave[300] = np.nan
    soundfile.write(folder / "a.wav", wave, 16000, "FLOAT")
    rows = [{"audio": ["a.wav"], "prompt": "<audio>", "text": f"{n}"} for n in range(8)]
    return MIMO, lines(folder, rows)


@pytest.mark.parametrize(
    "source, said",
    [
        (missing, r"no\d.png \(No such file or directory\)"),
        (no_pairs, r"no\d.png \(No such file or directory\)"),
        (no_bytes, r"x.parquet:\d \(No such file or directory\)"),
        (too_long, r"x.jsonl:\d \(101 tokens: data.seq_length is 24\)"),
        (too_long_packed, r"x.jsonl:\d \(101 tokens: data.seq_length is 24\)"),
        (no_words, r"x.jsonl:\d \(its text is empty\)"),
        (not_finite, r"a.wav \(sample 300 of the waveform is not a finite number\)"),
    ],
)
def test_a_source_whose_samples_are_of_no_use_is_one_line(source, said, tmp_path):
    keys, path = source(tmp_path)
    cfg = load(None, [*keys, f"data.images.path={path}", WHOLE, "data.images.workers=0"])
    data, _ = build_datasets(cfg, 8, 0)
    with pytest.raises(UserError, match=rf"{path}: 5 of the first 5 .* such as .*{said}; mend"):
        data.batch(range(8))


def test_what_a_path_in_parquet_names_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (name,) = png(tmp_path, 1)
    row = {"image": {"bytes": None, "path": name}, "label": 2}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "x.parquet")
    keys = [*VIT, f"data.images.path={tmp_path / 'x.parquet'}", "data.images.workers=0"]
    cfg = load(None, [*keys, WHOLE])
    batch = build_datasets(cfg, 1, 0)[0].batch([0])
    assert batch["row_label"] == 2 and batch["patches"].any()


def test_half_of_the_first_samples_may_be_bad_and_held_out_ones_all():
    samples = [(f"{n}",) for n in range(100)]
    good = np.arange(100) % 2 == 0

    def judge(is_good: np.ndarray, split: str) -> None:
        skipped = Skipped("x", split, 100, 100)
        for first in range(0, 100, 4):
            part = slice(first, first + 4)
            for (name,) in samples[part]:
                skipped.note(name, "cut")
            skipped.judge(samples[part], is_good[part])

    judge(good, "train")
    judge(np.zeros(100, bool), "valid")
    later = np.arange(100) < FIRST
    judge(later, "train")  # most of all, but not of the first
    with pytest.raises(UserError, match="17 of the first 32 samples cannot be used, such as 31"):
        judge(good & (np.arange(100) != 2), "train")


def test_bad_samples_are_named_and_then_counted(caplog):
    skipped = Skipped("x", "valid", 50, 50)
    for n in [*range(40), *range(40)]:
        skipped.note(f"{n}.png", "cut")
        skipped.judge([(f"x:{n}", f"{n}.png")], [False])
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith("0.png cannot be used and is left out (cut); 1 of 50 so far")
    assert [int(line.split()[-5]) for line in said] == [1, 2, 3, 4, 5, 8, 16, 32]


def test_files_that_are_not_read_are_counted(tmp_path, caplog):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (made,) = png(tmp_path / name, 1)
        (tmp_path / name / "1.avif").write_bytes((tmp_path / name / made).read_bytes())
    cfg = load(None, [*VIT, f"data.images.path={tmp_path}", WHOLE])
    build_datasets(cfg, 3, 0)
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"{tmp_path}: 3 of 6 files are not read, as {tmp_path}/a/1.avif: they end in" in said


def test_pixels_that_do_not_fit_8_bits_are_refused():
    def decoded(array: np.ndarray, form: str) -> np.ndarray | str:
        out = io.BytesIO()
        Image.fromarray(array).save(out, form)
        return attempt(decode_image, out.getvalue(), 4, 1)

    whole = np.arange(16, dtype=np.uint16).reshape(4, 4) * 17
    np.testing.assert_array_equal(decoded(whole, "png")[..., 0], whole)
    np.testing.assert_array_equal(decoded(whole.astype(np.float32), "tiff")[..., 0], whole)
    assert "pixels from 0 to 4080; give whole numbers of 8 bits" in decoded(whole * 16, "png")
    assert "pixels from 0 to 1;" in decoded((whole / 255).astype(np.float32), "tiff")
    for value in (np.nan, np.inf):
        wrong = whole.astype(np.float32)
        wrong[1, 1] = value
        assert f"to {value}; give" in decoded(wrong, "tiff")


# ---- runs ----------------------------------------------------------------------------------------

SHORT = ["train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=4"]
SHORT += ["precision.compute=float32", "log.interval=1", "data.images.workers=0"]


@slow
def test_a_held_out_loss_that_counts_nothing_is_null_and_never_the_best(tmp_path, caplog):
    names = png(tmp_path, 6)
    good = lines(tmp_path, [{"image": name, "label": n % 3} for n, name in enumerate(names)])
    bad = lines(tmp_path, [{"image": "no.png", "label": n} for n in range(3)], "bad.jsonl")
    keys = [*VIT, *SHORT, f"run.dir={tmp_path / 'run'}", f"data.images.path={good}"]
    keys += [f"data.images.valid_path={bad}", "train.eval_interval=1", "train.eval_steps=1"]
    cfg = load(None, [*keys, "checkpoint.interval=1", "checkpoint.keep_best=1"])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    evaluations = [r for r in records(tmp_path / "run") if "eval_loss" in r]
    assert [r["eval_loss"] for r in evaluations] == [None, None]
    assert [r["eval_accuracy"] for r in evaluations] == [None, None]
    assert "nothing of its samples counts" in events(tmp_path / "run")[0]
    for step in "12":
        record = tmp_path / "run" / "checkpoints" / step / "meta" / "metadata"
        assert json.loads(record.read_text())["held_out_loss"] is None


def test_a_loss_that_is_no_number_is_never_the_lowest():
    class Saved:
        def __init__(self, step: int):
            self.step = step

    losses = [None, float("nan"), 2.0, 1.0, float("inf")]
    policy = LowestLoss(3, losses.__getitem__)
    kept = policy.should_preserve(list(map(Saved, range(5))), context=None)
    assert kept == [False, False, True, True, False]


def empty(monkeypatch, number: int) -> None:
    """Let no token of a step count."""
    step = Trainer.step

    def emptied(self, batch, *gate):
        if self.step_number + 1 == number:
            batch = batch | {"loss_mask": 0 * batch["loss_mask"]}
        return step(self, batch, *gate)

    monkeypatch.setattr(Trainer, "step", emptied)


@slow
def test_a_step_without_a_token_that_counts_ends_the_run_and_keeps_what_was_trained(
    tmp_path, monkeypatch
):
    empty(monkeypatch, 4)
    said = r"step 4 has nothing to learn from: .* samples 12 to 15 .*: data.mock \(12\), .* and 1"
    with pytest.raises(UserError, match=said):
        run(tmp_path, "train.steps=6")
    assert steps(tmp_path) == ["3"] and len(losses(tmp_path)) == 3


@slow
def test_a_suspect_step_that_ends_a_run_keeps_the_state_and_names_its_samples(
    tmp_path,
):
    said = r"samples 12 to 15 .*: data.mock \(12\), .*\(15\); last good checkpoint: "
    said += f"{tmp_path}/checkpoints/3;"
    with pytest.raises(NonFiniteLoss, match=said):
        run(tmp_path, "train.steps=6", "run.rehearse=[nan@4]")
    assert steps(tmp_path) == ["3"]


@exhaustive
def test_a_run_that_changed_no_weight_says_so(tmp_path):
    run(tmp_path, "train.steps=2", "precision.compute=float16")
    assert "WARNING: none of 2 steps changed a weight" in events(tmp_path)[-1]
    assert "precision.initial_loss_scale=4.29497e+09" in events(tmp_path)[-1]
    scale = "precision.initial_loss_scale=1024"
    run(tmp_path / "low", "train.steps=2", "precision.compute=float16", scale)
    assert events(tmp_path / "low") == []


# ---- streams and corpora -------------------------------------------------------------------------


def test_every_row_of_a_stream_hides_a_token():
    keys = ["train.objective=masked_lm", "data.mock=true"]
    keys += ["data.masked.mask_token_id=3", "data.masked.probability=1e-9"]
    objective = objective_of(load(None, [*keys, "model.layer_pattern=B"]))
    made = objective.make_fields({"tokens": np.ones((9, 6), np.int32)}, 1, 5, np.arange(9))
    assert made["loss_mask"].sum(1).tolist() == [1] * 9


def test_samples_of_corpora_are_named_by_what_they_are_made_of(tmp_path):
    for name in "ab":
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(5):
                writer.add_document(np.ones(4, np.uint16))
    given = "train", [1.0, 0, 0], 4, 4, 0
    parts = [GPTDataset(tmp_path / name, *given) for name in "ab"]
    blend = BlendedDataset(parts, [0.5, 0.5], 4)
    for number, name in enumerate(blend.names(range(4))):
        part, sample = blend.dataset_index[number], blend.dataset_sample_index[number]
        found = parts[part].documents_of(sample).tolist()
        assert name == f"{tmp_path}/{'ab'[part]} ({', '.join(map(str, found))})"
        assert len(found) == 2  # 4 tokens, and the label behind them
