"""Laws of profiles: asked for by key or by signal they are written; none is worth the run."""

import json
import os
import signal

import jax
import pytest

from mjax.config import load
from mjax.run.loop import train
from mjax.run.monitor import profile
from mjax.sharding.mesh import make_mesh
from tests.marks import exhaustive, slow
from tests.tiny import TINY

BASE = [*TINY, "train.steps=12", "checkpoint.interval=null"]


def run(folder, *overrides) -> tuple[list[str], list[int]]:
    """The events and the steps in the log of a run."""
    cfg = load(None, [*BASE, f"run.dir={folder}", *overrides])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    records = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    events = [record["event"] for record in records if "event" in record]
    return events, [record["step"] for record in records if "loss" in record]


def traces(folder) -> list[str]:
    """The folders of traces in a run that hold one."""
    return sorted(
        {p.parents[3].name for p in folder.glob("profile/*/plugins/profile/*/*.xplane.pb")}
    )


@slow
def test_the_steps_of_the_key_and_the_next_ones_on_a_signal_are_traced(tmp_path, monkeypatch):
    begin = profile.Profiler.begin

    def signaled_before_step_7(self, step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGUSR2)
        begin(self, step)

    monkeypatch.setattr(profile.Profiler, "begin", signaled_before_step_7)
    before = signal.getsignal(signal.SIGUSR2)
    events, steps = run(tmp_path / "run", "log.profile_steps=[3,4]")
    key, on_signal = traces(tmp_path / "run")
    first = int(on_signal.removeprefix("step_"))
    assert key == "step_3" and first in (7, 8) and steps == list(range(1, 13))
    folder = tmp_path / "run" / "profile"
    assert events == [
        f"profile of steps 3 to 4: {folder / key}",
        f"profile of steps {first} to {first + 2}: {folder / on_signal}",
    ]
    assert signal.getsignal(signal.SIGUSR2) is before


@exhaustive
def test_a_profile_ends_with_its_run(tmp_path):
    events, _ = run(tmp_path / "run", "log.profile_steps=[11,20]")
    (name,) = traces(tmp_path / "run")
    assert events == [f"profile of steps 11 to 12: {tmp_path / 'run' / 'profile' / name}"]


@slow
@pytest.mark.parametrize("part", ["start_trace", "stop_trace"])
def test_a_profile_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capfd, part):
    genuine = getattr(jax.profiler, part)

    def fail(*arguments, **keywords):
        if part == "stop_trace":
            genuine()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, part, fail)
    events, steps = run(tmp_path / "run", "log.profile_steps=[3,4]")
    assert events == [] and steps == list(range(1, 13))
    said = capfd.readouterr().err
    assert "mjax: no profile (No space left on device); training goes on" in said
