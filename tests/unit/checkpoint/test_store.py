"""Laws of the checkpoint store: complete or absent, any mesh, the right run, nothing lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.store import Store
from mjax.config import load
from mjax.errors import UserError
from tests.marks import slow

CFG = load(None, ["data.mock=true"])


def store(directory, cfg=CFG, keep=2, keep_every=None, async_save=True, digests=True) -> Store:
    keywords = {"keep_every": keep_every, "async_save": async_save, "digests": digests}
    return Store(directory, cfg, keep=keep, **keywords)


def make_state(value: float = 0.0, dp: int = 4, tp: int = 2) -> dict:
    """Leaves of three dtypes, sharded over both axes, over one, and replicated."""
    mesh = Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("dp", "tp"))

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return {
        "params": {"w": put(jnp.arange(128.0).reshape(8, 16) + value, "dp", "tp")},
        "opt": {"mu": put(jnp.full((16, 8), 1.5 + value, jnp.bfloat16), None, "tp")},
        "step": put(jnp.int32(value)),
    }


def abstract(state: dict) -> dict:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


def assert_same(got: dict, want: dict) -> None:
    def check(g, w):
        assert g.dtype == w.dtype and g.sharding.is_equivalent_to(w.sharding, g.ndim)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))

    jax.tree.map(check, got, want)


@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (2, 4), (1, 8), (1, 1)])
def test_a_checkpoint_restores_bit_for_bit_onto_any_mesh(tmp_path, dp, tp):
    store(tmp_path, async_save=False).save(7, make_state(3))
    wanted = make_state(3, dp, tp)
    assert_same(store(tmp_path).restore(abstract(wanted)), wanted)


def test_a_save_holds_its_step_though_the_next_step_donates_the_arrays(tmp_path):
    state, saves = make_state(), store(tmp_path)
    step = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), donate_argnums=0)
    saves.save(1, state)
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert_same(saves.restore(abstract(state)), make_state(0))


def test_retention_keeps_the_newest_and_every_nth(tmp_path):
    saves = store(tmp_path, keep=2, keep_every=20)
    for step in (10, 20, 30, 40, 50, 60):
        saves.save(step, make_state(step))
    saves.wait()
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [20, 40, 50, 60]
    assert_same(saves.restore(abstract(make_state()), 20), make_state(20))


def test_what_a_killed_save_has_not_removed_goes_where_no_save_comes(tmp_path):
    whole = store(tmp_path, keep=4)
    for step in (20, 30, 40, 50):
        whole.save(step, make_state(step))
    whole.wait()
    (tmp_path / "torn.orbax-checkpoint-tmp").mkdir()
    again = store(tmp_path, keep=2, keep_every=20)
    assert_same(again.restore(abstract(make_state())), make_state(50))
    again.apply_retention()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["20", "40", "50"]
    assert_same(again.restore(abstract(make_state())), make_state(50))


def test_a_failed_background_save_raises_at_the_next_call(tmp_path):
    saves = store(tmp_path)
    saves.save(1, make_state(1))
    saves.wait()
    big = {"w": jax.random.normal(jax.random.key(0), (512, 512))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as a full disk would
    try:
        saves.save(2, big)
        with pytest.raises(UserError, match="writing a checkpoint .* failed"):
            saves.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store(tmp_path).latest_step() == 1
    saves.save(2, make_state(2))
    saves.wait()
    assert store(tmp_path).latest_step() == 2


KILLED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import jax
    from mjax.checkpoint.store import Store
    from mjax.config import load
    folder = Path(sys.argv[1])
    store = Store(
        folder, load(None, ["data.mock=true"]), keep=2, keep_every=None, async_save=True
    )
    w = jax.random.normal(jax.random.key(0), (4096, 4096))
    store.save(1, {"w": w[:64, :64]})
    store.wait()
    def kill():
        while not list(folder.glob("2.*tmp*/state*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill).start()
    store.save(2, {"w": w})
    store.wait()
"""


@slow
def test_kill_9_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("2.*tmp*")), "the process died during the save, not after it"
    saves = store(tmp_path)
    assert saves.latest_step() == 1
    target = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=_one_device())}
    state = saves.restore(target)
    np.testing.assert_array_equal(
        state["w"], jax.random.normal(jax.random.key(0), (4096, 4096))[:64, :64]
    )
    saves.remove_remains()
    saves.save(2, state)
    saves.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def _one_device():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def damage(folder) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            os.truncate(path, path.stat().st_size // 2)


def test_a_damaged_newest_checkpoint_is_passed_over_and_kept_aside(tmp_path):
    saves = store(tmp_path, keep=2, async_save=False)
    for step in (1, 2, 3):
        saves.save(step, make_state(step))
    damage(tmp_path / "3")
    again = store(tmp_path, keep=2, async_save=False)
    assert_same(again.restore(abstract(make_state())), make_state(2))
    assert again.latest_step() == 2 and (tmp_path / "damaged-3").is_dir()
    again.save(3, make_state(33))  # the redone step takes its place
    assert_same(store(tmp_path).restore(abstract(make_state())), make_state(33))


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    store(tmp_path, async_save=False).save(1, make_state(1))
    damage(tmp_path / "1")
    with pytest.raises(UserError, match=r"no readable checkpoint .*tried steps \[1\]"):
        store(tmp_path).restore(abstract(make_state()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.hidden_size=512", "model.num_hidden_layers=8"],
            "model.hidden_size=256 but this run has model.hidden_size=512",
        ),
        (["model.tie_word_embeddings=true"], "model.tie_word_embeddings=False but"),
        (["model.rope.rope_theta=5e5"], "model.rope.rope_theta=10000.0 but"),
        (["optimizer.name=muon"], "optimizer.name='adamw' but this run has optimizer.name='muon'"),
        (["optimizer.nu_dtype=bfloat16"], "optimizer.nu_dtype='float32' but"),
        (["train.global_batch_size=16"], "consumed 40 samples, but .* step 5 is sample 80"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_its_first_differing_field(
    tmp_path, overrides, message
):
    store(tmp_path, async_save=False).save(5, make_state(5))
    other = load(None, ["data.mock=true", *overrides])
    with pytest.raises(UserError, match=message):
        store(tmp_path, other).restore(abstract(make_state()))
    assert (tmp_path / "5").is_dir()


def test_what_does_not_shape_the_state_may_change(tmp_path):
    store(tmp_path, async_save=False).save(5, make_state(5))
    may = ["model.hidden_dropout=0.1", "schedule.lr=1e-5", "precision.fp8=current"]
    other = load(None, ["data.mock=true", *may])
    assert_same(store(tmp_path, other).restore(abstract(make_state())), make_state(5))


def test_the_record_beside_the_arrays_says_what_made_them(tmp_path):
    store(tmp_path, async_save=False).save(5, make_state(5))
    meta = store(tmp_path).read_meta(5)
    assert type(CFG).model_validate(meta["config"]) == CFG
    assert (meta["step"], meta["consumed_samples"]) == (5, 40)
    assert set(meta["versions"]) == {"mjax", "jax"}


def test_older_checkpoints_are_never_mixed_with_a_new_start(tmp_path):
    folder = tmp_path / "checkpoints"
    store(folder, async_save=False).save(100, make_state(100))
    new = store(folder, async_save=False)
    with pytest.raises(UserError, match="already holds a checkpoint of step 100"):
        new.save(3, make_state(3))
    assert new.set_aside() == tmp_path / "checkpoints.old-1"
    new.save(3, make_state(3))
    assert store(folder).latest_step() == 3
    assert store(tmp_path / "checkpoints.old-1").latest_step() == 100


def test_reading_creates_nothing_and_an_unwritable_folder_is_one_line(tmp_path):
    absent = store(tmp_path / "none")
    assert absent.latest_step() is None
    with pytest.raises(UserError, match="no checkpoint in"):
        absent.restore(abstract(make_state()))
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write in folder"):
        store(tmp_path / "file" / "checkpoints").save(1, make_state())


def test_a_large_stack_is_stored_in_chunks_of_a_layer(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.checkpoint.orbax_handlers.CHUNK", 4 * 64 * 32)
    params = {
        "dense": {"w": jnp.ones((4, 64, 32)), "small": jnp.ones((4, 32))},
        "e": jnp.ones((256, 16)),
    }
    store(tmp_path, async_save=False).save(0, {"params": params})
    record = json.loads((tmp_path / "0" / "state" / "array_metadatas" / "process_0").read_text())
    chunks = {
        entry["array_metadata"]["param_name"]: entry["array_metadata"]["chunk_shape"]
        for entry in record["array_metadatas"]
    }
    assert chunks == {
        "params.dense.w": [1, 64, 32],
        "params.dense.small": [4, 32],
        "params.e": [128, 16],
    }


def test_the_steps_of_lowest_held_out_loss_are_kept_also_by_a_run_that_resumes(tmp_path):
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: None, 60: 5.0}

    def open_store() -> Store:
        return Store(tmp_path, CFG, keep=1, keep_every=None, keep_best=2, async_save=False)

    saves = open_store()
    for step in (10, 20, 30):
        saves.save(step, make_state(step), losses[step])
    resumed = open_store()
    for step in (40, 50, 60):
        resumed.save(step, make_state(step), losses[step])
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [20, 30, 60]
    assert resumed.read_meta(20)["held_out_loss"] == 1.0


def test_side_files_and_data_of_the_run_travel_in_every_step(tmp_path):
    weights, data = tmp_path / "weights", tmp_path / "data"
    weights.mkdir()
    data.mkdir()
    side = {"tokenizer.json": b"T1", "config.json": b"{}", "chat_template.jinja": b"C"}
    for name, content in side.items():
        (weights / name).write_bytes(content)
    (data / "a.idx").write_bytes(b"index")
    (data / "a.bin").write_bytes(b"tokens")
    run = ["data.mock=false", f"data.paths=[{data}/a]", f"checkpoint.init_from={weights}"]
    store(tmp_path / "c", load(None, run), async_save=False).save(1, make_state(1))

    def files(step: int) -> dict[str, bytes]:
        found = (tmp_path / "c" / str(step) / "hf").iterdir()
        return {p.name: p.read_bytes() for p in found if p.name in side}

    assert files(1) == side
    (identity,) = store(tmp_path / "c").read_meta(1)["data"]
    assert identity["path"] == f"{data}/a" and identity["idx_crc32"] == [zlib.crc32(b"index")]
    assert (identity["bin_bytes"], identity["idx_bytes"]) == (6, 5)

    shutil.rmtree(weights)  # a resumed run needs it no more
    store(tmp_path / "c", load(None, run), async_save=False).save(2, make_state(2))
    assert files(2) == side

    other = data / "tokenizer.json"  # another tokenizer takes the place of all the first had
    other.write_bytes(b"T2")
    run.append(f"data.tokenizer={other}")
    store(tmp_path / "c", load(None, run), async_save=False).save(3, make_state(3))
    assert files(3) == {"tokenizer.json": b"T2"}
