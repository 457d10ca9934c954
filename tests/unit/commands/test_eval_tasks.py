"""Tasks of lm-evaluation-harness are scored in a run as on its checkpoint, without a conversion.

Where lm_eval is missing, `tests/stand_in_harness.py` stands in for it.
"""

import importlib.util
import json
import re
import sys
from types import SimpleNamespace

import jax
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.evaluate.tasks import KnownTask, TaskScores, known_task, named_scores, tasks_of
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.sharding.processes.agreement import HelperFailed
from tests.laws.run.test_failures import records
from tests.marks import slow
from tests.stand_in_harness import modules
from tests.tiny import TINY

REAL = importlib.util.find_spec("lm_eval") is not None
KEYS = [*TINY, "model.vocab_size=257", "data.tokenizer=byte", "schedule.lr=0.1", "train.steps=4"]


@pytest.fixture
def task(monkeypatch, tmp_path):
    """FOLDER/NAME of a task with the metric acc."""
    documents = [{"q": f"Q{i}", "choices": ["yes", "no!"], "gold": i % 2} for i in range(6)]
    (tmp_path / "d.json").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "choice.yaml").write_text(
        f"task: my_choice\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path}/d.json\n"
        "test_split: train\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}:'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n"
    )
    if REAL:
        yield f"{tmp_path}/my_choice"
        return
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mjax.evaluate.harness", raising=False)
    yield f"{tmp_path}/my_choice"
    sys.modules.pop("mjax.evaluate.harness", None)


@slow
def test_tasks_are_scored_every_so_many_steps_and_at_the_end(tmp_path, task):
    keys = [f"train.eval_tasks={{{task}: 4}}", "train.eval_tasks_interval=2"]
    cfg = load(None, [*KEYS, *keys, f"run.dir={tmp_path / 'run'}"])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    found = {r["step"]: r["task/my_choice/acc"] for r in records(tmp_path / "run") if
             "task/my_choice/acc" in r}  # fmt: skip
    assert list(found) == [2, 4]
    if not REAL:
        assert found[2] != found[4]  # those of the weights at each step


def test_scores_are_named_by_task_and_metric():
    values = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "n": 3}
    assert named_scores("t", values) == {"task/t/acc": 0.5, "task/t/em.strict": 1.0}


def test_a_task_that_nobody_knows_is_one_line_before_the_run(tmp_path, task):
    for name, said in (("no_such", "no task 'no_such'"), ("/no/such/task", "no folder /no/such")):
        cfg = load(None, [*KEYS, f"train.eval_tasks={{{name}: null}}"])
        with pytest.raises(UserError, match=said):
            tasks_of(cfg, None, None)
    assert tasks_of(load(None, KEYS), None, None) is None


@pytest.mark.parametrize("failure", [KeyError("no such field"), SystemExit("gave up")])
def test_an_error_of_a_task_is_one_line(monkeypatch, failure):
    def fails(*_, **__):
        raise failure

    lm_eval = SimpleNamespace(simple_evaluate=fails)
    monkeypatch.setitem(sys.modules, "lm_eval", lm_eval)
    model = SimpleNamespace(update_weights=lambda params: None)
    tasks = TaskScores(model, [(KnownTask("quiz", None), 3)])
    line = f"train.eval_tasks: quiz: {type(failure).__name__}: {failure}; mend"
    with pytest.raises(UserError, match=re.escape(line)):
        tasks.scores({}, lambda: None)
    # what others explain, and a fault of the model's programs
    for failure in jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), HelperFailed("a bug"):
        with pytest.raises(type(failure)):
            tasks.scores({}, lambda: None)


def test_a_folder_of_tasks_that_cannot_be_read_is_one_line(monkeypatch, tmp_path):
    def fails(include_path):
        raise ValueError("quiz.yaml: no mapping")

    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=fails))
    line = f"train.eval_tasks: {tmp_path}/quiz: ValueError: quiz.yaml: no mapping; mend"
    with pytest.raises(UserError, match=re.escape(line)):
        known_task(f"{tmp_path}/quiz", {})


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "mjax.evaluate.harness", raising=False)
    cfg = load(None, [*KEYS, "train.eval_tasks={arc_easy: 5}"])
    with pytest.raises(UserError, match=r"install mjax\[lm-eval\]"):
        tasks_of(cfg, None, None)
    sys.modules.pop("mjax.evaluate.harness", None)
