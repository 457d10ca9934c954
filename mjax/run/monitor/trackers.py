"""Trackers: programs that keep the figures of many runs. TensorBoard, W&B, MLflow, Trackio.

A tracker gets the config when it is opened, figures by step, and an end. Invariants: a tracker is
opened, called and ended in its own thread (`log_writer.py`), so one that fails or hangs costs one
line and never the run. A resumed run goes on under the identity that its folder keeps. To add one:
a function that opens it, a key of `LogConfig`, a row of `TRACKERS`.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from mjax.config.languages.difference import keys_and_values
from mjax.config.schema.run import Config, LogConfig
from mjax.errors import UserError
from mjax.run.monitor.log_writer import LogWriter

LONGEST_PARAM = 500  # characters of a value of MLflow's parameters
MOST_PARAMS = 100  # of a call


class Tracker(Protocol):
    """An open run in a tracker."""

    def log(self, figures: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker opens it: one of `folder` that goes on from `start_step`."""

    cfg: Config
    folder: Path
    start_step: int

    def identity(self, file: str) -> str:
        """The id in a file of the run folder; a run that starts over has a new one."""
        path = self.folder / file
        if self.start_step == 0 or not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    def keys(self) -> dict[str, object]:
        """The config by dotted keys."""
        return dict(keys_and_values(self.cfg.model_dump(mode="json")))


def open_tensorboard(run: TrackedRun) -> Tracker:
    """Event files in RUN/tensorboard. Curves of a killed run after `start_step` are hidden."""
    # Its SummaryWriter writes in a thread that dies of a full disk; then every call blocks.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    folder = run.folder / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    writer = EventsWriter(str(folder / "events"))
    start = SessionLog(status=SessionLog.START)
    writer.write_event(Event(wall_time=time.time(), step=run.start_step + 1, session_log=start))
    writer.flush()

    class EventFile:
        finish = writer.close

        def log(self, figures: dict[str, float], step: int) -> None:
            values = [Summary.Value(tag=name, simple_value=v) for name, v in figures.items()]
            summary = Summary(value=values)
            writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            writer.flush()

    return EventFile()


def open_wandb(run: TrackedRun) -> Tracker:
    """Weights & Biases; the id is kept in RUN/wandb_id."""
    import wandb

    return wandb.init(
        project=run.cfg.log.wandb_project,
        name=run.folder.name,
        id=run.identity("wandb_id"),
        resume="allow",
        dir=str(run.folder),
        config=run.cfg.model_dump(mode="json"),
    )


def open_trackio(run: TrackedRun) -> Tracker:
    """Trackio, whose runs go by name: the folder's, and what RUN/trackio_id says."""
    import trackio

    return trackio.init(
        project=run.cfg.log.trackio_project,
        name=f"{run.folder.name}-{run.identity('trackio_id')[:8]}",
        resume="allow",
        config=run.keys(),
        embed=False,
    )


def open_mlflow(run: TrackedRun) -> Tracker:
    """MLflow, on the server of MLFLOW_TRACKING_URI or else in files, RUN/mlruns."""
    import mlflow
    from mlflow.entities import Metric, Param

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would say each try
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it asks for that
        address = (run.folder / "mlruns").absolute().as_uri()
    client, name = mlflow.MlflowClient(address), run.cfg.log.mlflow_experiment
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    identity = run.identity("mlflow_id")
    found = client.search_runs([experiment], f"tags.mjax_id = '{identity}'")
    if found:
        number = found[0].info.run_id
        client.update_run(number, "RUNNING")
    else:
        made = client.create_run(experiment, tags={"mjax_id": identity}, run_name=run.folder.name)
        number = made.info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.keys().items()]
        for at in range(0, len(params), MOST_PARAMS):
            client.log_batch(number, params=params[at : at + MOST_PARAMS])

    class MlflowRun:
        def log(self, figures: dict[str, float], step: int) -> None:
            now = int(1000 * time.time())
            metrics = [Metric(name, value, now, step) for name, value in figures.items()]
            client.log_batch(number, metrics=metrics)

        def finish(self) -> None:
            client.set_terminated(number)

    return MlflowRun()


class TrackerKind(NamedTuple):
    """A row of `TRACKERS`: the key of `LogConfig` that asks for it, its module and extra."""

    key: str
    module: str
    extra: str
    open: Callable[[TrackedRun], Tracker]


TRACKERS = (
    TrackerKind("tensorboard", "tensorboardX", "tensorboard", open_tensorboard),
    TrackerKind("wandb_project", "wandb", "wandb", open_wandb),
    TrackerKind("mlflow_experiment", "mlflow", "mlflow", open_mlflow),
    TrackerKind("trackio_project", "trackio", "trackio", open_trackio),
)


def require_trackers(log: LogConfig) -> None:
    """Raise `UserError`, before a run has begun, if a tracker that it asks for is not installed."""
    for kind in TRACKERS:
        if getattr(log, kind.key) and find_spec(kind.module) is None:
            raise UserError(f"log.{kind.key} needs {kind.module}; pip install 'mjax[{kind.extra}]'")


def tracker_writers(run: TrackedRun) -> list[LogWriter]:
    """A function for each tracker that the config asks for; it takes records."""
    wanted = [kind for kind in TRACKERS if getattr(run.cfg.log, kind.key)]
    records = [TrackerRecords(partial(kind.open, run)) for kind in wanted]
    pairs = zip(wanted, records, strict=True)
    return [LogWriter(kind.extra, record, record.finish) for kind, record in pairs]


@dataclass
class TrackerRecords:
    """Gives the figures of records to a tracker, which is opened for the first one."""

    open: Callable[[], Tracker]
    _tracker: Tracker | None = None

    def __call__(self, record: dict) -> None:
        if self._tracker is None:
            self._tracker = self.open()
        self._tracker.log(_scalars(record), record["step"])

    def finish(self) -> None:
        if self._tracker is not None:
            self._tracker.finish()


def _scalars(record: dict) -> dict[str, float]:
    """The numbers of a record; trackers have a step and a time of their own."""
    known = {name: v for name, v in record.items() if isinstance(v, int | float)}
    return {name: v for name, v in known.items() if name not in ("step", "time")}
