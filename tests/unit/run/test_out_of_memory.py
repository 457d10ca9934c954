"""Laws of a run that is out of memory: a table of what held it, then one line with the ways out."""

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.plan.memory import ways_to_save
from mjax.run import out_of_memory
from mjax.run.loop import train
from mjax.run.out_of_memory import array_bytes, memory_table
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.marks import slow
from tests.tiny import TINY

SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 73400320 bytes.\nmore"


def trainer(*keys):
    cfg = load(None, [*TINY, *keys])
    return Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:2]))


@slow
def test_a_run_out_of_memory_says_what_held_it_and_how_to_mend_it(tmp_path, monkeypatch, capfd):
    def exhausted(self, *arguments):
        self.state = None  # donated
        raise jax.errors.JaxRuntimeError(SAID)

    monkeypatch.setattr(Trainer, "step", exhausted)
    cfg = load(None, [*TINY, f"run.dir={tmp_path}", "train.micro_batch_size=2"])
    with pytest.raises(UserError) as caught:
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    line = str(caught.value)
    assert line.startswith(
        f"out of memory on a device: {SAID.splitlines()[0]}; to mend it, lower t"
    )
    assert "train.micro_batch_size=2" in line and "train.remat=full" in line and "\n" not in line
    said = capfd.readouterr().err
    for words in ("GB a device", "parameters", "  dense.mlp.up", "optimizer", "temporaries"):
        assert f"mjax: {words}" in said
    assert (tmp_path / "out_of_memory" / "memory.0.prof").stat().st_size > 0


@slow
def test_other_errors_of_a_device_stay_as_they_are(tmp_path, monkeypatch):
    def failing(self, *arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: a device erred")

    monkeypatch.setattr(Trainer, "step", failing)
    cfg = load(None, [*TINY, f"run.dir={tmp_path}"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))


@slow
def test_the_table_has_the_bytes_of_one_device():
    one = trainer("mesh.dp=2", "train.micro_batch_size=2")
    one.init()
    sizes = array_bytes(one.state["params"])
    held = {leaf.device for array in jax.tree.leaves(one.state["params"]) for leaf in
            array.addressable_shards}  # fmt: skip
    for device in held:
        found = sum(
            shard.data.nbytes
            for array in jax.tree.leaves(one.state["params"])
            for shard in array.addressable_shards
            if shard.device == device
        )
        assert found == sum(sizes.values())
    rows = {name.strip(): (held, planned) for name, held, planned in memory_table(one)}
    total = f"{sum(sizes.values()) / 1e9:.3f}"
    assert rows["parameters"][0] == total and rows["parameters"][1]
    assert rows["temporaries"][0] and rows["optimizer"][1] and "all that is alive now" in rows
    assert "2 more" in rows or any(name.endswith(" more") for name in rows)


def test_a_part_that_cannot_be_found_out_hides_no_error(tmp_path, monkeypatch, capfd):
    def broken(*arguments):
        raise ValueError("no table")

    monkeypatch.setattr(out_of_memory, "memory_table", broken)
    one = trainer(f"run.dir={tmp_path}", "train.micro_batch_size=2")
    with pytest.raises(UserError, match="out of memory"), out_of_memory.explained(one):
        raise jax.errors.JaxRuntimeError(SAID)


def test_the_line_says_whose_devices_ran_out(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(out_of_memory, "temporary_bytes", lambda trainer: None)
    one = trainer(f"run.dir={tmp_path}", "train.micro_batch_size=2")
    one.role_devices = jax.devices()[2:3]
    with pytest.raises(UserError, match="of the trainer: RESOURCE.*; to mend it, lower train"):
        with out_of_memory.explained(one):
            raise jax.errors.JaxRuntimeError(SAID)
    held = jax.device_put(np.zeros(10**6, np.float32), jax.devices()[2])
    with pytest.raises(UserError, match="^out of memory on a device of the teacher: .*; add some$"):
        with out_of_memory.explained(one), out_of_memory.owned_by(" of the teacher", "add some"):
            raise jax.errors.JaxRuntimeError(SAID)
    lines = [line.split() for line in capfd.readouterr().err.splitlines()]
    (role,) = (line for line in lines[-20:] if line[-2:-1] == ["role"])
    assert float(role[-1]) >= held.nbytes / 1e9 > 0


def test_ways_that_were_gone_are_not_named():
    most = ["train.micro_batch_size=1", "train.remat=full", "mesh.zero=3"]
    ways = ways_to_save(load(None, [*TINY, *most, "optimizer.offload=true"]))
    assert len(ways) == 2 and not any("remat" in way or "offload" in way for way in ways)
