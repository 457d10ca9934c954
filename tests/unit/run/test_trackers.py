"""Laws of trackers: figures by step, one identity over restarts, and none is worth the run."""

import os
import sys
from types import ModuleType

import pytest

from mjax.config import load
from mjax.config.schema.log import LogConfig
from mjax.errors import UserError
from mjax.run.monitor import trackers
from mjax.run.monitor.trackers import TrackedRun, TrackerRecords, require_trackers, tracker_writers

RECORD = {"loss": 0.5, "mfu": None, "loads": [1.0, 2.0], "time": 9.0}


def tracked(folder, start, *keys):
    return TrackedRun(load(None, ["data.mock=true", *keys]), folder, start)


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    records = TrackerRecords(lambda: trackers.open_tensorboard(tracked(tmp_path, 0)))
    records({"step": 3, **RECORD})
    records.finish()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes() and b"mfu" not in events.read_bytes()


def test_wandb_goes_on_under_one_id(tmp_path, monkeypatch):
    class FakeRun:
        logged: list = []

        def log(self, figures, step):
            self.logged.append((step, figures))

        def finish(self):
            self.finished = True

    calls, fake, run = [], ModuleType("wandb"), FakeRun()
    fake.init = lambda **kwargs: calls.append(kwargs) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for start in (0, 4, 0):
        opened = tracked(tmp_path, start, "log.wandb_project=p")
        records = TrackerRecords(lambda opened=opened: trackers.open_wandb(opened))
        records({"step": start + 1, **RECORD})
        records.finish()
    assert run.finished
    assert run.logged == [(1, {"loss": 0.5}), (5, {"loss": 0.5}), (1, {"loss": 0.5})]
    first, resumed, anew = (call["id"] for call in calls)
    assert first == resumed != anew and calls[0]["project"] == "p"


@pytest.mark.parametrize("start", [4, 0])
def test_mlflow_goes_on_in_one_run(tmp_path, monkeypatch, start):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for first in (0, start):
        run = tracked(tmp_path, first, "log.mlflow_experiment=e", "schedule.lr=0.25")
        records = TrackerRecords(lambda run=run: trackers.open_mlflow(run))
        records({"step": first + 1, "eval_loss/code": 2.0, **RECORD})
        records.finish()
    client = mlflow.MlflowClient((tmp_path / "mlruns").absolute().as_uri())
    experiment = client.get_experiment_by_name("e").experiment_id
    runs = client.search_runs([experiment])
    assert len(runs) == (1 if start else 2)
    assert runs[0].info.status == "FINISHED" and runs[0].data.params["schedule.lr"] == "0.25"
    history = client.get_metric_history(runs[0].info.run_id, "eval_loss/code")
    assert [metric.step for metric in history] == ([1, 5] if start else [1])


def test_trackio_goes_on_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs the extra `trackio`")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for start in (0, 4):
        run = tracked(tmp_path, start, "log.trackio_project=p")
        records = TrackerRecords(lambda run=run: trackers.open_trackio(run))
        records({"step": start + 1, **RECORD})
        records.finish()
    (found,) = trackio.Api().runs("p")
    name = f"{tmp_path.name}-{(tmp_path / 'trackio_id').read_text()[:8]}"
    assert found.name == name
    from trackio.sqlite_storage import SQLiteStorage

    logged = SQLiteStorage.get_logs("p", name)
    assert [(entry["step"], entry["loss"]) for entry in logged] == [(1, 0.5), (5, 0.5)]


def test_a_tracker_that_cannot_be_opened_or_written_is_one_line_and_tried_again(
    tmp_path, monkeypatch, capfd
):
    """Opened at the third try, as when a network comes back; then its disk is full."""
    tries, logged = [], []

    class Full:
        def log(self, figures, step):
            logged.append(step)
            raise OSError(28, "No space left on device")

        def finish(self):
            raise OSError(28, "No space left on device")

    def open_late(run):
        tries.append(run)
        if len(tries) < 3:
            raise ConnectionError("no route to host")
        return Full()

    row = trackers.TRACKERS[1]._replace(open=open_late)
    monkeypatch.setattr(trackers, "TRACKERS", (row,))
    (writer,) = tracker_writers(tracked(tmp_path, 0, "log.wandb_project=p"))
    for step in range(1, 6):
        writer({"step": step, **RECORD})
    writer.close()
    assert logged == [3, 4, 5] and len(tries) == 3
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mjax: ")]
    assert said == ["mjax: wandb cannot be written (no route to host); training goes on"]


def test_a_missing_tracker_is_one_line_before_the_run(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    require_trackers(LogConfig())
    for key, extra in {
        "wandb_project": "wandb",
        "mlflow_experiment": "mlflow",
        "trackio_project": "trackio",
    }.items():
        with pytest.raises(UserError, match=rf"{key} needs .*pip install 'mjax\[{extra}\]'"):
            require_trackers(LogConfig(**{key: "p"}))
    with pytest.raises(UserError, match=r"pip install 'mjax\[tensorboard\]'"):
        require_trackers(LogConfig(tensorboard=True))


def test_a_run_that_starts_over_sets_the_identities_aside():
    from mjax.run.training_run import OF_RUN

    assert {f"{name}_id" for name in ("wandb", "mlflow", "trackio")} <= set(OF_RUN)
    assert os.path.basename(OF_RUN[0]) == "metrics.jsonl"
