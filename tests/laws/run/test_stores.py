"""Laws of runs on object stores: any machine goes on from them, with the same losses.

`memory://` is a store of fsspec within the process.
"""

import json
import shutil

import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest

from mjax.checkpoint.__main__ import main as inspector
from mjax.checkpoint.base import mirror as mirror_module
from mjax.checkpoint.base.hub import model_folder
from mjax.checkpoint.base.mirror import Mirror, fetched_weights
from mjax.config import load
from mjax.data.base import object_store
from mjax.data.corpus import stream as stream_module
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.interop.sources import source_of
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.laws.run.test_failures import losses
from tests.marks import exhaustive, slow
from tests.tiny import TINY

RUN = "memory://bucket/run"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A store with text in it, a cache of its own, no pauses, windows of a few documents."""
    monkeypatch.setenv("MJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(stream_module, "WINDOW_BYTES", 400)
    fetched_weights.cache_clear()
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for file in range(3):
        rows = [json.dumps({"text": f"{file} says {i} " * (i % 5 + 1)}) for i in range(40)]
        fs.pipe_file(f"/bucket/text/{file}.jsonl", "\n".join(rows).encode())
    return fs


def config(folder, *more):
    keys = [key for key in TINY if not key.startswith(("data.mock", "model.vocab"))]
    keys += ["data.mock=false", "data.text=memory://bucket/text", "data.stream=true"]
    keys += ["data.tokenizer=byte", "model.vocab_size=300", f"run.dir={folder}"]
    keys += ["checkpoint.interval=2", "schedule.decay_steps=8", "train.steps=8"]
    keys += ["train.eval_interval=4", "train.eval_steps=2", "data.split=[0.8,0.2,0]"]
    return load(None, [*keys, "train.micro_batch_size=1", *more])


def run(cfg, devices):
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))


@slow
def test_a_lost_machine_loses_nothing_that_is_in_the_store(tmp_path, store, capsys):
    whole, parts = config(tmp_path / "whole"), [f"checkpoint.mirror={RUN}"]
    run(whole, 1)
    run(config(tmp_path / "a", *parts, "train.steps=5"), 4)
    mirror = Mirror(tmp_path / "a", RUN)
    assert mirror.steps() == [4, 5]  # checkpoint.keep
    found = losses(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    # What breaks off midway is no step, and what came after the last whole one is lost.
    store.pipe_file("/bucket/run/checkpoints/6/meta/metadata", b"{}")
    run(config(tmp_path / "b", *parts), 2)
    found += losses(tmp_path / "b")
    assert [step for step, _ in found] == list(range(1, 9))
    for (_, ours), (_, theirs) in zip(found, losses(tmp_path / "whole"), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)
    assert mirror.steps() == [6, 8]

    assert inspector(["ls", RUN]) == 0
    listed = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[0] for line in listed] == ["6", "8"] and len(listed[1].split()) == 3
    assert model_folder(f"{RUN}@6").name == "6" and model_folder(RUN).name == "8"
    assert model_folder(f"{RUN}@best").name == "8"
    with pytest.raises(UserError, match="has no such step"):
        model_folder(f"{RUN}@7")
    assert inspector(["diff", "--no-values", RUN, str(tmp_path / "b" / "checkpoints" / "8")]) == 0
    assert inspector(["verify", RUN]) == 0

    other = config(tmp_path / "c", *parts, "checkpoint.resume=never")
    with pytest.raises(UserError, match="holds steps, and checkpoint.resume=never"):
        run(other, 1)
    run(config(tmp_path / "d", "checkpoint.mirror=memory://bucket/d", "train.steps=1"), 1)
    with pytest.raises(UserError, match="has the steps of another run"):
        Mirror(tmp_path / "d", RUN).push()
    assert mirror.steps() == [6, 8]


@exhaustive
def test_weights_in_a_store_start_runs_and_generate(tmp_path, capsys, monkeypatch):
    run(config(tmp_path / "a", f"checkpoint.mirror={RUN}", "train.steps=2"), 1)
    capsys.readouterr()
    said = []
    for place in (RUN, str(tmp_path / "a")):
        arguments = ["--ckpt", place, "--prompt", "0 says", "--max-new-tokens", "4"]
        monkeypatch.setattr("sys.argv", ["mjax", *arguments, "--temperature", "0"])
        generate()
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0]
    run(config(tmp_path / "b", f"checkpoint.init_from={RUN}", "train.steps=1"), 1)
    assert "from the weights in memory://bucket/run" in capsys.readouterr().out


@exhaustive
def test_weights_for_transformers_lie_beside_the_steps_that_are_kept(tmp_path, store, capsys):
    own = [
        "checkpoint.hf=true",
        f"checkpoint.mirror={RUN}",
        "train.steps=5",
        "model.vocab_size=300",
    ]
    run(config(tmp_path / "a", *own, "checkpoint.interval=2", "model.model_type=llama"), 1)
    beside = tmp_path / "a" / "hf"
    assert sorted(path.name for path in beside.iterdir()) == ["4", "5"]
    assert Mirror(tmp_path / "a", RUN).steps("hf") == [4, 5]
    for number in (4, 5):
        ours = source_of(tmp_path / "a" / "checkpoints" / str(number))
        theirs = source_of(beside / str(number))
        assert theirs.cfg.hidden_size == ours.cfg.hidden_size
        whole = (slice(0, 300), slice(0, 32))
        table = np.asarray(ours.read(("embedding",), whole), ml_dtypes.bfloat16)
        assert np.array_equal(theirs.read(("embedding",), whole), table)


def step_folder(tmp_path, number=3):
    folder = tmp_path / "run" / "checkpoints" / str(number)
    for name in ("state/a", "state/deep/b", "meta/metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("last", range(5))
def test_a_copy_that_breaks_off_anywhere_is_no_step_and_goes_on(last, tmp_path, store, monkeypatch):
    folder = step_folder(tmp_path)
    mirror, put, sent = Mirror(tmp_path / "run", RUN), store.put_file, []

    def breaks(path, address, **more):
        sent.append(address)
        if len(sent) > last:
            raise PermissionError("AccessDenied")
        return put(path, address, **more)

    monkeypatch.setattr(mirror_module, "FILES_AT_ONCE", 1)
    with monkeypatch.context() as broken:
        broken.setattr(store, "put_file", breaks)
        with pytest.raises(UserError, match="refuses it"):
            mirror.push()
    assert mirror.steps() == []
    mirror.push()
    assert mirror.steps() == [3]
    for path in folder.rglob("*"):
        if path.is_file():
            there = f"/bucket/run/checkpoints/3/{path.relative_to(folder)}"
            assert store.cat_file(there) == path.read_bytes()


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_a_step_that_lacks_a_file_is_never_taken(fault, tmp_path, store):
    step_folder(tmp_path)
    Mirror(tmp_path / "run", RUN).push()
    if fault == "gone":
        store.rm_file("/bucket/run/checkpoints/3/state/a")
    else:
        store.pipe_file("/bucket/run/checkpoints/3/state/a", b"sta")
    (tmp_path / "new").mkdir()
    with pytest.raises(UserError, match="is damaged: state/a is not as it was sent"):
        Mirror(tmp_path / "new", RUN).pull()
    assert not list((tmp_path / "new").glob("checkpoints/*"))


@exhaustive
def test_a_store_that_fails_is_a_line_and_training_goes_on(tmp_path, store, monkeypatch, capsys):
    put, fails = store.put_file, [True]

    def refuses(path, address, **more):
        if fails[0] and "/checkpoints/" in address:
            raise PermissionError("AccessDenied")
        return put(path, address, **more)

    monkeypatch.setattr(store, "put_file", refuses)
    cfg = config(tmp_path / "a", f"checkpoint.mirror={RUN}", "checkpoint.max_failed_saves=2")
    with pytest.raises(UserError, match="the store refuses it .*AccessDenied"):
        run(cfg, 1)
    said = capsys.readouterr().out
    assert "saving step 2 failed" in said and "training goes on" in said
    fails[0] = False
    run(cfg, 1)
    assert Mirror(tmp_path / "a", RUN).steps()[-1] == 8
    assert [step for step, _ in losses(tmp_path / "a")][-1] == 8
