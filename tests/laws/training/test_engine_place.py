"""Laws of an engine on devices of its own, or on other axes than the trainer, and of pipelines."""

import sys
import threading
import time
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.post import TrainingClient
from mjax.post.reinforce_batches import RolloutSetup, reinforce_batches
from mjax.post.rollouts import engine_place
from mjax.post.rollouts.engine_place import EnginePlace, _cuts_by_process, engine_place_of
from mjax.run.dry_run import dry_run, plan_lines
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import trained_only
from mjax.train import Trainer
from tests.laws.run.test_failures import events, losses
from tests.laws.training import test_reinforcement as sister
from tests.laws.training.test_reinforcement import (
    LONG,
    RATED,
    Killed,
    config,
    figures,
    final_params,
    run_until_killed,
)
from tests.marks import exhaustive, slow

ends = sister.ends  # a fixture
TWO = "model.num_hidden_layers=2"
PIPELINE, PARTS = ("mesh.dp=2", "mesh.pp=2"), ("mesh.dp=2", "mesh.tp=2")


def run(cfg, devices=4):
    train(cfg, None, reinforce_batches, devices_of(cfg, devices))


def devices_of(cfg, devices: int) -> list[jax.Device]:
    """So many devices to train, and those of the engine."""
    return jax.devices()[: devices + cfg.reinforce.engine.get("devices", 0)]


def engine(text: str) -> str:
    return f"reinforce.engine={{{text}}}"


PLACES = {
    "pipeline, engine apart": ((*PIPELINE, engine("devices: 4, tp: 2, dp: 2")), ()),
    "pipeline, engine in its stages, rated by roles": (PIPELINE, RATED),
    "pipeline, engine over tp": ((*PIPELINE, engine("tp: 4")), ()),
    "parts, engine apart": ((*PARTS, engine("devices: 3")), ()),
    "parts, engine apart in stages": ((*PARTS, engine("devices: 4, pp: 2")), ()),
    "parts, adapters to an engine apart": (
        (*PARTS, engine("devices: 2, tp: 2")),
        ("lora.rank=4",),
    ),
    "pipeline, adapters to stages apart": (
        (*PIPELINE, engine("devices: 2, pp: 2")),
        ("lora.rank=4",),
    ),
}


@exhaustive
@pytest.mark.parametrize("name", PLACES)
def test_wherever_the_engine_is_a_run_is_that_of_one_device(tmp_path, name):
    axes, keys = PLACES[name]
    keys = LONG, TWO, "train.micro_batch_size=2", *keys
    run(config(tmp_path / "one", *keys, steps=3), devices=1)
    run(config(tmp_path / "four", *keys, *axes, steps=3))
    assert_alike(tmp_path / "four", tmp_path / "one")
    rated = figures(tmp_path / "four")
    # An engine with weights of a step before would rate tokens otherwise.
    assert all(r["sampling/token_mult_prob_error"] < 1 + 1e-5 for r in rated)


def assert_alike(folder, other):
    """Two runs have equal rewards and transcripts, and figures but for sums in another order."""
    shown = [[t for t in events(f) if t.startswith("rollout: ")] for f in (folder, other)]
    assert shown[0] == shown[1] and len(shown[0]) == len(figures(other)) > 2
    for ours, theirs in zip(figures(folder), figures(other), strict=True):
        assert ours["reward"] == theirs["reward"]
        for name in ("loss", "grad_norm", "entropy", "completions/mean_length"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(ours.get("kl", 0), theirs.get("kl", 0), rtol=1e-3, atol=1e-5)


AHEAD = LONG, "reinforce.max_staleness=1", "train.micro_batch_size=2"
APART = *PARTS, engine("devices: 4, tp: 2")


@exhaustive
def test_a_phase_is_drawn_beside_the_update_before_it(tmp_path, monkeypatch):
    """So it is the one that shared devices draw between updates, with weights one step older."""
    is_updating, has_drawn = threading.Event(), threading.Event()
    draw, update = Engine.step, Trainer.step
    awaited = []

    def drawing(self):
        if is_updating.is_set():
            has_drawn.set()
        return draw(self)

    def updating(self, *given):
        if self.step_number < 3:
            is_updating.set()
            awaited.append(has_drawn.wait(60))
        metrics = update(self, *given)
        is_updating.clear()
        has_drawn.clear()
        return metrics

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", drawing)
        patched.setattr(Trainer, "step", updating)
        run(config(tmp_path / "apart", *AHEAD, *APART))
    assert awaited == [True] * 3
    with monkeypatch.context() as patched:
        patched.setattr(EnginePlace, "is_apart", True)
        run(config(tmp_path / "shared", *AHEAD), devices=1)
    assert_alike(tmp_path / "apart", tmp_path / "shared")
    found = figures(tmp_path / "apart")
    assert [r["staleness_max"] for r in found] == [0, 1, 1, 1]
    assert [r["staleness"] for r in found] == [0, 1, 1, 1]
    assert all(r["seconds/waiting"] >= 0 and r["seconds/hand_over"] >= 0 for r in found)


@exhaustive
@pytest.mark.parametrize(
    ("keys", "kills"),
    [
        pytest.param((), [30]),
        pytest.param(("reinforce.drops_equal_groups=true",), [*range(6, 46, 4)], marks=exhaustive),
    ],
)
def test_a_run_that_is_killed_as_it_draws_ahead_ends_with_the_bits_of_another(
    tmp_path, monkeypatch, keys, kills
):
    """A checkpoint has the phase that is drawn ahead, whose weights are gone by then."""
    keys = *AHEAD, *keys, "checkpoint.interval=1", engine("devices: 1")
    keys = *keys, "reinforce.correction=truncate"  # reads what the sampler's weights were
    whole, parts = config(tmp_path / "whole", *keys), config(tmp_path / "parts", *keys)
    run(whole, devices=1)
    draw = Engine.step

    def slowly(self):
        time.sleep(0.05)  # so that checkpoints come before a phase is drawn
        return draw(self)

    monkeypatch.setattr(Engine, "step", slowly)
    for number in kills:  # how far each gets before it dies depends on time
        if not run_until_killed(lambda cfg: run(cfg, devices=1), parts, number, monkeypatch):
            assert number > kills[0]
            break
    run(parts, devices=1)
    jax.tree.map(np.testing.assert_array_equal, final_params(parts), final_params(whole))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    names = "reward", "completions/mean_length", "staleness", "groups_dropped"
    pairs = zip(figures(tmp_path / "parts"), figures(tmp_path / "whole"), strict=True)
    assert all(a[name] == b[name] for a, b in pairs for name in names)


@exhaustive
def test_an_error_in_what_is_drawn_ahead_is_told_once_the_state_is_saved(tmp_path, monkeypatch):
    """Held-out prompts and a checkpoint come before it, and no prompt is left out afterwards."""
    keys = *AHEAD, engine("devices: 1"), "checkpoint.interval=1", "train.eval_interval=1"
    cfg, reset, asked = config(tmp_path, *keys), sister.Evens.reset, []

    def broken(self, seed, index):
        if threading.current_thread().name.startswith("rollouts"):
            asked.append(index)
            raise ValueError("no more prompts")
        return reset(self, seed, index)

    with monkeypatch.context() as patched, pytest.raises(UserError, match="no more prompts"):
        patched.setattr(sister.Evens, "reset", broken)
        run(cfg, devices=1)
    assert [r["step"] for r in figures(tmp_path)] == [1]
    assert (tmp_path / "checkpoints/1").is_dir()
    again = []
    monkeypatch.setattr(
        sister.Evens, "reset", lambda *given: again.append(given[2]) or reset(*given)
    )
    run(cfg, devices=1)
    assert [r["step"] for r in figures(tmp_path)] == [1, 2, 3, 4]
    assert asked[0] == 2 and {2, 3, 4, 5, 6, 7} <= set(again)


@exhaustive
def test_a_run_that_ends_as_it_draws_ahead_goes_on_with_what_it_has(tmp_path, monkeypatch):
    cfg = config(tmp_path, *AHEAD, engine("devices: 1"), "checkpoint.interval=1")
    update, count = Trainer.step, 0

    def ended(self, *given):
        nonlocal count
        count += 1
        if count == 3:
            raise Killed
        return update(self, *given)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Trainer, "step", ended)
        run(cfg, devices=1)
    assert not [t for t in threading.enumerate() if t.name.startswith("rollouts") and is_busy(t)]
    run(cfg, devices=1)
    assert [r["step"] for r in figures(tmp_path)] == [1, 2, 3, 4]


def is_busy(thread: threading.Thread) -> bool:
    """Whether a thread draws, and does not wait for work."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and any(f.name == "_draw" for f in traceback.extract_stack(frame))


@exhaustive
def test_adapters_alone_are_moved(tmp_path):
    cfg = config(tmp_path, "lora.rank=4", "mesh.tp=2", engine("devices: 2, tp: 2"))
    trainer = Trainer(cfg, devices=devices_of(cfg, 2))
    trainer.init()
    policy = RolloutSetup(trainer).policy
    before = policy.take_weights().runner.params
    own = set(jax.devices()[2:4])
    assert all(leaf.devices() == own for leaf in jax.tree.leaves(before))
    trainer.step_number = 1
    after = policy.take_weights().runner.params
    same = jax.tree.leaves(jax.tree.map(lambda a, b: a is b, before, after))
    trained = len(jax.tree.leaves(trained_only(trainer.specs, trainer.specs)))
    assert len(same) > same.count(False) >= trained > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: 8", "8 of 8 devices do not leave one to train"),
        ("devices: 0", "devices is 0; give whole numbers"),
        ("devices: 2.5", "devices is 2.5; give whole numbers"),
        ("devices: '4'", "devices is '4'; give whole numbers"),
        ("tp: true", "tp is True; give whole numbers"),
        ("devices: 4, tp: 3", "num_attention_heads=4 is not divisible by tp=3"),
        ("devices: 3, tp: 2", "make 2, which does not divide the 3 devices"),
        ("devices: 4, tp: 2, dp: 1", "need 2 devices but there are 4"),
        ("devices: 4, pp: 4", "num_hidden_layers=1 leaves some of pp=4"),
        ("tp: 2, dp: 4", "need 8 devices but there are 4"),
        ("cp: 2", "there is no option cp"),
        ("rows: 48", "reinforce.engine: rows=48: give a power of two, such as 64"),
    ],
)
def test_places_that_do_not_fit_are_refused_in_a_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as error:
        cfg = config(tmp_path, "mesh.dp=4", "train.micro_batch_size=1", engine(text))
        reinforce_batches(Trainer(cfg, devices=devices_of(cfg, 4)), {})
    line = str(error.value)
    assert "reinforce.engine" in line and "mesh." not in line and "\n" not in line


@pytest.mark.parametrize("tp", [2, 4])
def test_on_cpus_an_engine_apart_is_cut_within_processes(monkeypatch, tp):
    """Two devices of each process; the trainer has as many."""
    devices = [SimpleNamespace(process_index=n // 2, platform="cpu") for n in range(4)]
    grid = np.array(devices).reshape(1, -1, 1, 1, tp)
    mesh = SimpleNamespace(devices=grid, size=4, shape={"dp": 4 // tp})
    monkeypatch.setattr(engine_place, "_engine_mesh", lambda *_: mesh)
    trainer = SimpleNamespace(cfg=None, mesh=mesh, role_devices=devices)
    refused = pytest.raises(UserError, match="^reinforce.engine: on CPUs .* within a process")
    with refused if tp == 4 else nullcontext():
        engine_place_of(trainer, {"devices": 4, "tp": tp})


def test_a_trainer_on_a_mesh_has_no_devices_for_an_engine(tmp_path):
    cfg = config(tmp_path, engine("devices: 4"))
    with pytest.raises(UserError, match="^reinforce.engine: devices: .*; give Trainer no mesh"):
        reinforce_batches(Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1])), {})


@exhaustive
@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("devices: 4, tp: 2", PARTS),
        ("tp: 2, weight_dtype: fp8, cache_dtype: fp8", (*PARTS, "precision.compute=bfloat16")),
        ("devices: 2, pp: 2, rows: 4", PIPELINE),
        ("rows: 2, pages: 9", ("mesh.dp=4", "lora.rank=4", "train.micro_batch_size=1")),
    ],
)
def test_the_plan_of_an_engine_is_what_it_holds(tmp_path, capsys, monkeypatch, text, keys):
    """Weights and caches to the byte, by the arrays on one of its devices."""
    monkeypatch.setattr("mjax.run.dry_run.compiled_lines", lambda trainer: [])
    cfg = config(tmp_path, TWO, "train.micro_batch_size=2", *keys, engine(text))
    trainer = Trainer(cfg, devices=devices_of(cfg, 4))
    trainer.init()
    policy = RolloutSetup(trainer).policy
    planned = policy.bytes_per_device()
    runner = policy.take_weights().runner
    runner._take_state()
    held = runner.params, runner._state.caches
    first = policy.place.mesh.devices.flat[0]
    assert planned == tuple(sum(bytes_on(first, leaf) for leaf in jax.tree.leaves(h)) for h in held)
    own, (weights, caches) = devices_of(cfg, 4), (size / 1e9 for size in planned)
    monkeypatch.setattr(jax, "devices", lambda *args: own)
    dry_run(cfg)
    (line,) = (t for t in capsys.readouterr().out.splitlines() if t.startswith("engine "))
    found = f"weights {weights:.3f}, caches {caches:.3f} GB on each of {policy.place.mesh.size} dev"
    assert found in line


def bytes_on(device: jax.Device, array: jax.Array) -> int:
    return sum(s.data.nbytes for s in array.addressable_shards if s.device == device)


def test_a_plan_says_which_engine_does_not_fit(tmp_path):
    cfg = config(tmp_path, engine("devices: 4, tp: 3"))
    with pytest.raises(UserError, match="reinforce.engine: .*num_attention_heads=4 is not divis"):
        plan_lines(Trainer(cfg, devices=devices_of(cfg, 1)))


@slow
def test_memory_that_runs_out_on_the_devices_of_an_engine_is_theirs(tmp_path, monkeypatch):
    def exhausted(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Engine, "step", exhausted)
    with pytest.raises(UserError, match="on a device of the engine: .*lower rows, chunk or pages"):
        run(config(tmp_path, engine("devices: 1")), devices=1)


def test_weights_are_cut_where_they_come_from(tmp_path):
    keys = "mesh.dp=3", "train.global_batch_size=6", "train.micro_batch_size=2"
    cfg = config(tmp_path, *keys, engine("devices: 4, tp: 2"))
    with pytest.raises(UserError, match="do not divide the trainer's 3"):
        reinforce_batches(Trainer(cfg, devices=devices_of(cfg, 3)), {})


@pytest.mark.parametrize(
    ("processes", "own", "of_trainer", "tp", "fits"),
    [(2, 1, 3, 2, True), (4, 2, 2, 8, True), (4, 1, 2, 2, True), (4, 1, 2, 4, False)],
)
def test_each_process_has_the_weights_of_its_part_of_an_engine(
    processes, own, of_trainer, tp, fits
):
    """Or is known to have not: so many devices of each process, an engine over tp."""

    def cuts(each: int) -> set[tuple[int, ...]]:
        devices = [SimpleNamespace(process_index=n // each) for n in range(processes * each)]
        return _cuts_by_process(SimpleNamespace(devices=np.reshape(devices, (1, -1, 1, 1, tp))))

    assert (cuts(own) <= cuts(of_trainer)) == fits


def test_a_run_leaves_the_last_devices_to_its_engine(tmp_path):
    cfg = config(tmp_path, engine("devices: 6"), "train.micro_batch_size=2")
    client = TrainingClient(cfg)
    assert client.trainer.mesh.devices.flatten().tolist() == jax.devices()[:2]
    assert client.trainer.role_devices == jax.devices()[2:]
    assert Trainer(config(tmp_path), devices=jax.devices()[:1]).role_devices == []
