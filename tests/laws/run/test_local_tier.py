"""Laws of the local tier: what it saved between is resumed bit for bit, or costs nothing."""

import shutil
import signal

import jax
import pytest

from mjax.checkpoint.local import folder as tier
from mjax.checkpoint.local.folder import local_folder
from mjax.config import load
from mjax.errors import UserError
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.run import test_processes as processes
from tests.laws.run.test_failures import events, losses, run, start, steps
from tests.laws.run.test_processes import finish
from tests.marks import exhaustive, quick, slow
from tests.processes import wait_until
from tests.tiny import TINY

KEYS = ["train.steps=8", "checkpoint.interval=4", "checkpoint.local_interval=1"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder, *KEYS[:2])
    return folder


def config(folder, *overrides):
    return load(None, [*TINY, f"run.dir={folder}", *overrides])


def new_trainer(cfg) -> Trainer:
    return Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))


class Killed(Exception):
    pass


def run_killed(folder, local, monkeypatch, step, *more) -> None:
    """Run until `step` is saved, then end as a kill would, at any rate with nothing in order."""
    compute = Trainer.step

    def step_or_die(self, batch, *gate):
        if self.step_number == step:
            self.store.wait()
            if self.checkpoints.local is not None:
                self.checkpoints.local.wait()
            raise Killed
        return compute(self, batch, *gate)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step_or_die)
        with pytest.raises(Killed):
            run(folder, *KEYS, f"checkpoint.local_dir={local}", *more)


def local_steps(folder, local) -> list[str]:
    where = local_folder(config(folder, *KEYS, f"checkpoint.local_dir={local}"))
    return sorted(p.name for p in where.glob("process-0/*"))


def same_end(folder, unbroken) -> None:
    found = dict(losses(folder))
    assert found == dict(losses(unbroken)) and steps(folder)[-1] == "8"


@exhaustive
def test_a_run_that_was_killed_goes_on_from_its_newest_local_step(
    tmp_path, unbroken, monkeypatch, capfd
):
    folder, local = tmp_path / "run", tmp_path / "local"
    run_killed(folder, local, monkeypatch, 7)
    assert local_steps(folder, local) == ["6", "7"], "the one before goes when the next begins"
    assert steps(folder) == ["4"]
    capfd.readouterr()
    run(folder, *KEYS, f"checkpoint.local_dir={local}")
    out = capfd.readouterr().out
    assert f"resumed from {local}" in out and "/7\n" in out
    same_end(folder, unbroken)
    assert not list(local.iterdir()), "nothing is left once run.dir holds the end"


@slow
def test_the_newest_of_both_tiers_is_taken(tmp_path, monkeypatch, capfd):
    """Local newer, older, equal: local, run.dir, local, as Megatron-LM chooses."""
    folder, local = tmp_path / "run", tmp_path / "local"
    keys = [*KEYS, f"checkpoint.local_dir={local}"]
    run_killed(folder, local, monkeypatch, 5, "checkpoint.local_interval=3")
    trainer = new_trainer(config(folder, *keys))
    assert local_steps(folder, local) == ["3"] and trainer.restore() == 4
    assert trainer.checkpoints.source is trainer.store
    assert local_steps(folder, local) == [], "what is older than run.dir's is removed"
    for step in (4, 6):
        trainer.set_step(step)
        trainer.save_local()
        assert trainer.checkpoints.local.wait() == ""
        fresh = new_trainer(config(folder, *keys))
        assert fresh.restore() == step
        assert fresh.checkpoints.source is fresh.checkpoints.local
    assert fresh.restore(4) == 4 and fresh.checkpoints.source is fresh.store


@slow
@pytest.mark.parametrize("damaged,source", quick([([7, 6], "checkpoints/4\n"), ([7], "/6\n")]))
def test_damage_in_the_local_tier_costs_the_steps_it_held(
    tmp_path, unbroken, monkeypatch, capfd, caplog, damaged, source
):
    folder, local = tmp_path / "run", tmp_path / "local"
    run_killed(folder, local, monkeypatch, 7)
    for step in damaged:
        (file,) = local.glob(f"*/process-0/{step}/own.bin")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    capfd.readouterr()
    run(folder, *KEYS, f"checkpoint.local_dir={local}")
    assert source in capfd.readouterr().out
    assert "is damaged" in caplog.text and "taking the newest before it" in caplog.text
    same_end(folder, unbroken)


@slow
def test_a_local_tier_that_cannot_be_written_is_one_line(tmp_path, unbroken):
    folder = tmp_path / "run"
    (tmp_path / "file").write_text("no folder")
    run(folder, *KEYS, f"checkpoint.local_dir={tmp_path / 'file' / 'below'}")
    (line,) = events(folder)
    assert "failed: Not a directory" in line
    assert "training goes on with the saves in run.dir" in line
    same_end(folder, unbroken)


@slow
def test_local_steps_of_another_run_are_not_taken(tmp_path, monkeypatch):
    folder, local = tmp_path / "run", tmp_path / "local"
    run_killed(folder, local, monkeypatch, 3)
    cfg = config(folder, *KEYS, f"checkpoint.local_dir={local}")
    mine = local_folder(cfg)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / tier.TOKEN).write_text((folder / tier.TOKEN).read_text())
    copy = config(tmp_path / "copy", *KEYS, f"checkpoint.local_dir={local}")
    assert local_folder(copy) != mine
    (folder / tier.TOKEN).unlink()  # as with a run.dir that was removed and made again
    assert new_trainer(cfg).checkpoints.latest_step() is None
    tier.claim(cfg)
    assert local_folder(cfg) != mine and (mine / "process-0" / "3").is_dir()


@exhaustive
def test_starting_over_starts_without_local_steps(tmp_path, unbroken, monkeypatch, capfd):
    folder, local = tmp_path / "run", tmp_path / "local"
    run_killed(folder, local, monkeypatch, 3)
    capfd.readouterr()
    run(folder, *KEYS, f"checkpoint.local_dir={local}", "checkpoint.resume=never")
    assert "starting at step 0" in capfd.readouterr().out
    same_end(folder, unbroken)


@exhaustive
def test_an_unfit_local_tier_alone_ends_in_one_line(tmp_path, monkeypatch):
    """Nothing in run.dir, and local steps of another mesh: no quiet start at step 0."""
    folder, local = tmp_path / "run", tmp_path / "local"
    run_killed(folder, local, monkeypatch, 3)
    cfg = config(folder, *KEYS, f"checkpoint.local_dir={local}", "mesh.tp=2", "mesh.dp=1")
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:2]))
    with pytest.raises(UserError, match="another mesh has saved it.*checkpoint.resume=never"):
        trainer.restore()


NODES = [*KEYS[:2], "checkpoint.local_interval=1", "checkpoint.local_dir=local", "train.steps=8"]
SHARDED = ["mesh.dp=8", "mesh.zero=1", "train.eval_interval=8"]


@pytest.fixture(scope="module")
def nodes_before(tmp_path_factory):
    """(a run of two processes that ends, the folder of one that was killed after step 4).

    Each process of the latter has its own folder `local`, as on a node of its own.
    """
    base = tmp_path_factory.mktemp("nodes")
    finish(base / "whole", processes.start(base / "whole", 2, *SHARDED, "train.steps=8"))
    nodes = [base / "node-0", base / "node-1"]
    for node in nodes:
        node.mkdir()
    more = ["train.steps=1000000", "checkpoint.interval=1000000"]
    started = processes.start(base / "run", 2, *SHARDED, *NODES, *more, nodes=nodes)
    wait_until(lambda: list(nodes[0].glob("local/*/process-0/5")))
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return base


LOST = {
    "none": lambda nodes: None,
    "the first node": lambda nodes: shutil.rmtree(nodes[0] / "local"),
    "the second node": lambda nodes: shutil.rmtree(nodes[1] / "local"),
    "nodes change places": lambda nodes: swap(*nodes),
}


def swap(one, two) -> None:
    one.rename(one.with_name("other"))
    two.rename(one)
    one.with_name("other").rename(two)


@exhaustive
@pytest.mark.parametrize("lost", LOST)
def test_a_lost_node_costs_no_local_step(tmp_path, nodes_before, lost):
    base = tmp_path / "nodes"
    shutil.copytree(nodes_before, base)
    # The name of the tier's folder comes from the place of run.dir.
    folder, nodes = nodes_before / "run", [base / "node-0", base / "node-1"]
    kept = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    LOST[lost](nodes)
    finish(folder, processes.start(folder, 2, *SHARDED, *NODES, nodes=nodes))
    said = (folder.parent / "run.0").read_text()
    assert "resumed from local" in said.replace(str(nodes[0]) + "/", "") and "mjax-run" in said
    got, want = processes.losses(folder), processes.losses(nodes_before / "whole")
    for path in folder.iterdir():  # as it was, for the next case
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)
    assert got[-3:] == want[-3:]
    assert not list(base.glob("node-*/local/*")), "removed once run.dir holds the end"


@slow
def test_kill_9_between_the_saves_in_run_dir_loses_local_steps_only(tmp_path):
    folder, local = tmp_path / "run", tmp_path / "local"
    keys = ["train.steps=400", "checkpoint.interval=100000", "checkpoint.local_interval=5"]
    keys += [f"checkpoint.local_dir={local}"]
    first = start(folder, *keys)
    saved = "*/process-0/[0-9]*[05]"
    wait_until(lambda: first.poll() is not None or len(list(local.glob(saved))) > 0)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (folder / "checkpoints").is_dir()
    again = start(folder, *keys)
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0 and f"resumed from {local}" in out, err
    whole = start(tmp_path / "whole", *keys[:2])
    assert whole.wait(240) == 0
    assert dict(losses(folder)) == dict(losses(tmp_path / "whole"))
