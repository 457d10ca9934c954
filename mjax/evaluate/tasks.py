"""Scores of a run on tasks of lm-evaluation-harness (`train.eval_tasks`), while it trains.

The harness asks the model in memory: no checkpoint is written, no weight converted. Tasks are those
that the harness knows by name, or of YAML files in a folder of one's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.corpus.text import tokenizer_of_run
from mjax.errors import UserError, reason
from mjax.interop.pretrained import Pretrained
from mjax.models import Definition
from mjax.sharding.processes.agreement import HelperFailed, on_process_0, same_for_all

ROWS_SCORED = 8  # scored at once


class KnownTask(NamedTuple):
    """A task of the harness: its name, and the manager that knows it."""

    name: str
    manager: Any


@dataclass
class TaskScores:
    """Scores a model on tasks.

    model: it as the harness asks it, a `HarnessModel`.
    tasks: with how many documents of each are scored; None: all.
    """

    model: Any
    tasks: list[tuple[KnownTask, int | None]]

    def scores(self, params: dict, beat: Callable[[], None]) -> dict[str, float]:
        """{"task/arc_easy/acc": 0.31, ..} of the model with these weights, on process 0.

        The harness runs there, and other processes join its programs. beat: is called after each.
        Raises `UserError` where a task fails.
        """
        found: dict[str, float] = {}
        self.model.beat = beat
        self.model.update_weights(params)
        on_process_0(partial(self._score, found), self.model)
        self.model.rest()
        return found

    def _score(self, found: dict[str, float]) -> None:
        from lm_eval import simple_evaluate

        for task, limit in self.tasks:
            given = {"limit": limit, "task_manager": task.manager, "log_samples": False}
            with faults_of(task.name):
                results = simple_evaluate(self.model, tasks=[task.name], **given)
            for scored, values in results["results"].items():
                found |= named_scores(scored, values)


@contextmanager
def faults_of(task: str) -> Iterator[None]:
    """Raise what the harness, or the code of a task, raises as `UserError`; the model's passes."""
    try:
        yield
    except (UserError, HelperFailed, jax.errors.JaxRuntimeError):
        raise
    except (Exception, SystemExit) as e:
        why = f"{type(e).__name__}: {reason(e)}"
        raise UserError(f"train.eval_tasks: {task}: {why}; mend the task, or leave it out") from e


def named_scores(task: str, values: dict[str, object]) -> dict[str, float]:
    """The scores of a task in the harness's results, without their standard errors."""
    found = {}
    for key, value in values.items():
        metric, _, way = key.partition(",")
        if isinstance(value, int | float) and way and not metric.endswith("_stderr"):
            found[f"task/{task}/{metric}{'' if way == 'none' else f'.{way}'}"] = float(value)
    return found


def tasks_of(cfg: Config, definition: Definition, mesh: Mesh) -> TaskScores | None:
    """The tasks of a run; None without any. Raises `UserError` for those that are not known."""
    if not cfg.train.eval_tasks:
        return None
    adapter = same_for_all(partial(_model_of_run, cfg, definition, mesh))
    managers: dict[str | None, Any] = {}
    wanted = cfg.train.eval_tasks.items()
    tasks: list[tuple[KnownTask, int | None]] = []  # of process 0
    on_process_0(lambda: tasks.extend((known_task(name, managers), n) for name, n in wanted))
    return TaskScores(adapter, tasks)


def _model_of_run(cfg: Config, definition: Definition, mesh: Mesh) -> Any:
    from mjax.evaluate.harness import HarnessModel  # says so where lm_eval is missing

    name = tokenizer_of_run(cfg.data, cfg.run.dir)
    if name is None:
        raise UserError("train.eval_tasks needs a tokenizer; set data.tokenizer")
    model = Pretrained(cfg.model, definition, {}, mesh, None)
    given = {"dtype": cfg.precision.compute, "batch_size": ROWS_SCORED}
    return HarnessModel(model, load_tokenizer(name), **given)


def known_task(name: str, managers: dict[str | None, Any]) -> KnownTask:
    """A task by its name, or FOLDER/NAME for one of the YAML files in a folder.

    managers: the harness's own of each folder, which are added to. Raises `UserError`.
    """
    from lm_eval.tasks import TaskManager

    folder, _, task = name.rpartition("/")
    place = folder or None
    if place is not None and not Path(place).is_dir():
        raise UserError(f"train.eval_tasks: {name!r}: no folder {place}; write NAME or FOLDER/NAME")
    with faults_of(name):
        manager = managers.setdefault(place, None) or TaskManager(include_path=place)
        is_known = bool(manager.match_tasks([task]))
    managers[place] = manager
    if not is_known:
        raise UserError(
            f"train.eval_tasks: the harness has no task {name!r}; `lm-eval ls tasks` lists all"
        )
    return KnownTask(task, manager)
